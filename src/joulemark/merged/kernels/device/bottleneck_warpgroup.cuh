// Bottleneck with the products of warpgroups (sm_90a): 1×1, 3×3, 1×1, and the input added, or JOINED: with a pointwise
// convolution of the input added. Persistent: one block on a multiprocessor, all weights in its shared memory; each of
// its GROUPS groups takes brick after brick of the output.
//
// The constants in capitals stand in front of this text; bottleneck_warpgroup.py writes them. The sequence has INPUTS
// channels in front, CHANNELS behind and 64 inside. WARPGROUPS warpgroups of a group share a brick's tiles of 64 positions, which run on over the
// ends of rows: a tap of the 3×3 is a distance, and what lies between two rows is made and left.
//
//   reduce   straight from global memory to registers: lane t of a pixel reads channels 8 t … 8 t + 7 of 32 at once. The
//            order of channels within a product is free as long as the weights follow it, and they are packed so. The
//            result goes to shared memory, by octets: what the products of the 3×3 read, at any shift.
//   convolve 36 products of a tile, one after another without a wait; their result stays in registers, where it is the
//   widen    next operand. Again the weights are packed so that a lane gets 8 neighbouring channels, adds those of the
//            input and stores 16 bytes. JOINED, the input's channels are operands behind those of the 3×3, one product.

constexpr int PITCH = BRICK_WIDTH + 2, ROWS = BRICK_HEIGHT + 2;
constexpr int REDUCED_TILES = (ROWS * PITCH + 63) / 64, TILES = (BRICK_HEIGHT * PITCH + 63) / 64;
constexpr int PLANE = PLANE_PIXELS * 16;  // bytes of an octet of the brick
constexpr int BLOCKS_32 = INPUTS / 32;
constexpr int AHEAD = BLOCKS_32 < 4 ? BLOCKS_32 : 4;  // blocks of 32 channels on their way while one is multiplied
static_assert(WARPGROUPS * GROUPS * 128 == THREADS, "threads of a block");
static_assert(WARPGROUPS <= TILES, "each warpgroup has a tile");
static_assert(PLANE_PIXELS >= 64 * REDUCED_TILES, "an octet has room for whole tiles");
static_assert(PLANE_PIXELS >= 64 * TILES + 2 * PITCH + 2, "and for all taps of them");

struct Place {
    int row, pair;         // of an 8×8 fragment: row; pair of its columns
    int slab;              // first of the warp's 16 rows in a tile
    int warpgroup, group;  // within the group; of the block
};
struct Brick {
    int image, top, left;  // of the output
};

DEVICE Place place_of() {
    const int lane = threadIdx.x & 31, warp = own_warp();
    return {lane >> 2, lane & 3, warp % 4 * 16, warp / 4 % WARPGROUPS, warp / 4 / WARPGROUPS};
}

DEVICE Brick brick_of(const Arguments& a, int number) {
    const int row = number / a.bricks[2], image = row / a.bricks[1];
    return {image, (row - image * a.bricks[1]) * BRICK_HEIGHT, (number - row * a.bricks[2]) * BRICK_WIDTH};
}

// The number of a pixel of the tensor, `margin` rows and columns before the brick's first; −1 outside of it.
DEVICE int pixel_at(const Arguments& a, const Brick& brick, int margin, int position) {
    const int y = brick.top - margin + position / PITCH, x = brick.left - margin + position % PITCH;
    const bool there = (u32)y < (u32)a.size[1] && (u32)x < (u32)a.size[2];
    return there ? (brick.image * a.size[1] + y) * a.size[2] + x : -1;
}

// The sums of a lane's channels `channel` and `channel` + 1, of both its pixels, begin with the bias.
DEVICE void begin(float (&sum)[4], const Arguments& a, int offset, int channel) {
    float bias[2];
    load_bias(a, offset, channel, bias);
    UNROLL for (int q = 0; q < 4; q++) sum[q] = bias[q & 1];
}

// One tile of the brick with its halo, to 64 channels in shared memory.
DEVICE void reduce_tile(const Arguments& a, const Place& at, const Brick& brick, u32 weights, u32 middle, int tile) {
    // Zero, which the compiler cannot know: it puts an operand's registers side by side once.
    const u32 nothing = a.count >> 31;
    const int position = tile * 64 + at.slab + at.row;
    const u16* from[2];
    bool outside[2];
    uint4 next[AHEAD][2];
    UNROLL for (int h = 0; h < 2; h++) {
        const int pixel = pixel_at(a, brick, 1, position + 8 * h);
        outside[h] = pixel < 0;
        from[h] = (const u16*)a.input + (u64)(pixel < 0 ? 0 : pixel) * INPUTS + at.pair * 8;
        UNROLL for (int c = 0; c < AHEAD; c++) next[c][h] = load_global_4(from[h] + c * 32);
    }
    const u64 given = plain_matrix(weights, 64 * 16, 128);
    float sum[8][4];
    UNROLL for (int i = 0; i < 8; i++) begin(sum[i], a, REDUCE_BIAS_AT, i / 4 * 32 + at.pair * 8 + i % 4 * 2);
    UNROLL for (int c = 0; c < BLOCKS_32; c++) {
        const uint4 low = next[c % AHEAD][0], high = next[c % AHEAD][1];
        UNROLL for (int h = 0; h < 2; h++)
            if (c + AHEAD < BLOCKS_32) next[c % AHEAD][h] = load_global_4(from[h] + (c + AHEAD) * 32);
        const u32 first[4] = {low.x ^ nothing, high.x ^ nothing, low.y ^ nothing, high.y ^ nothing};
        const u32 second[4] = {low.z ^ nothing, high.z ^ nothing, low.w ^ nothing, high.w ^ nothing};
        group_fence();
        wgmma<Element, 64>(sum, first, matrix_behind(given, c * (4 * 64 * 16)));
        wgmma<Element, 64>(sum, second, matrix_behind(given, c * (4 * 64 * 16) + 2 * 64 * 16));
        group_commit();
        group_wait<1>();
    }
    group_finish(sum);
    UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < 8; i += 4) {
        u32 words[4];  // channels 8 pair … 8 pair + 7 of 32
        UNROLL for (int j = 0; j < 4; j++)
            words[j] = activate<REDUCE_ACTIVATION>(sum[i + j][2 * h], sum[i + j][2 * h + 1], outside[h]);
        const u32 there = middle + (i + at.pair) * PLANE + (position + 8 * h) * 16;
        store_shared_4(there, uint4{words[0], words[1], words[2], words[3]});
    }
}

// The 3×3 of one tile: operands of the next product.
DEVICE void convolve_tile(const Arguments& a, const Place& at, u32 weights, u32 middle, int tile, u32 (&result)[4][4]) {
    float sum[8][4];
    UNROLL for (int i = 0; i < 8; i++) begin(sum[i], a, CONVOLVE_BIAS_AT, i * 8 + 2 * at.pair);
    const u64 pixels = plain_matrix(middle + tile * (64 * 16), PLANE, 128), given = plain_matrix(weights, 64 * 16, 128);
    group_fence();
    UNROLL for (int tap = 0; tap < 9; tap++) UNROLL for (int k = 0; k < 4; k++) {
        const u64 shifted = matrix_behind(pixels, (tap / 3 * PITCH + tap % 3) * 16 + k * (2 * PLANE));
        wgmma<Element, 64>(sum, shifted, matrix_behind(given, (tap * 8 + k * 2) * (64 * 16)));
    }
    group_commit();
    group_finish(sum);
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int h = 0; h < 2; h++)
        result[i / 2][i % 2 * 2 + h] = activate<CONVOLVE_ACTIVATION>(sum[i][2 * h], sum[i][2 * h + 1], false);
}

// Eight channels of a pixel of the input, by its number; of one outside of the brick, of any.
DEVICE uint4 input_at(const Arguments& a, int number, int channel) {
    return load_global_4((const u16*)a.input + (u64)(number < 0 ? 0 : number) * INPUTS + channel);
}

// Of both pixels of a lane, by their numbers, the channels of the input: operands in the order of the reduction's.
DEVICE void take_input(const Arguments& a, const Place& at, const int (&number)[2], u32 (&pixels)[INPUTS / 16][4]) {
    const u32 nothing = a.count >> 31;  // as in reduce_tile
    UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int c = 0; c < BLOCKS_32; c++) {
            const uint4 v = input_at(a, number[h], at.pair * 8 + c * 32);
            pixels[2 * c][h] = v.x ^ nothing;
            pixels[2 * c][2 + h] = v.y ^ nothing;
            pixels[2 * c + 1][h] = v.z ^ nothing;
            pixels[2 * c + 1][2 + h] = v.w ^ nothing;
        }
    }
}

DEVICE void widen_tile(const Arguments& a, const Place& at, const Brick& brick, u32 weights, int tile,
                       const u32 (&pixels)[4][4]) {
    int number[2];  // of a pixel of the output, or −1
    UNROLL for (int h = 0; h < 2; h++) {
        const int position = tile * 64 + at.slab + at.row + 8 * h;
        const bool within = position < BRICK_HEIGHT * PITCH && position % PITCH < BRICK_WIDTH;
        number[h] = within ? pixel_at(a, brick, 0, position) : -1;
    }
    u32 joined[INPUTS / 16][4];
    if (JOINED) take_input(a, at, number, joined);
    uint4 added[2][2];
    UNROLL for (int b = 0; b < 2; b++) UNROLL for (int h = 0; h < 2; h++)
        added[b][h] = RESIDUAL ? input_at(a, number[h], at.pair * 8 + b * 32) : uint4{0, 0, 0, 0};
    const u64 given = plain_matrix(weights, CHANNELS * 16, 128);
    NO_UNROLL for (int n = 0; n < CHANNELS; n += 64) {
        const int channel = n + at.pair * 8;
        float sum[8][4];
        UNROLL for (int i = 0; i < 8; i++) begin(sum[i], a, WIDEN_BIAS_AT, channel + i / 4 * 32 + i % 4 * 2);
        group_fence();
        UNROLL for (int k = 0; k < 4; k++)
            wgmma<Element, 64>(sum, pixels[k], matrix_behind(given, (2 * k * CHANNELS + n) * 16));
        if (JOINED) UNROLL for (int k = 0; k < INPUTS / 16; k++)
            wgmma<Element, 64>(sum, joined[k], matrix_behind(given, ((8 + 2 * k) * CHANNELS + n) * 16));
        group_commit();
        group_finish(sum);
        UNROLL for (int b = 0; b < 2; b++) UNROLL for (int h = 0; h < 2; h++) {
            const uint4 x = added[b][h];
            const u32 with[4] = {x.x, x.y, x.z, x.w};
            u32 words[4];
            UNROLL for (int i = 0; i < 4; i++) {
                const float* one = &sum[b * 4 + i][2 * h];
                words[i] = activate<WIDEN_ACTIVATION>(one[0] + Element::low(with[i]), one[1] + Element::high(with[i]), false);
            }
            // The next channels are on their way while these are stored and those multiplied.
            if (RESIDUAL && n + 64 < CHANNELS) added[b][h] = input_at(a, number[h], channel + 64 + b * 32);
            if (number[h] >= 0)
                *(uint4*)((u16*)a.output + (u64)number[h] * CHANNELS + channel + b * 32) =
                    uint4{words[0], words[1], words[2], words[3]};
        }
    }
}

// Asks L2 for a brick's input.
DEVICE void ask_for(const Arguments& a, const Place& at, const Brick& brick) {
    constexpr int LINES = (INPUTS * 2 + 127) / 128;
    for (int i = threadIdx.x - at.group * (WARPGROUPS * 128); i < ROWS * PITCH * LINES; i += WARPGROUPS * 128) {
        const int pixel = pixel_at(a, brick, 1, i / LINES);
        if (pixel >= 0) prefetch((const char*)a.input + (u64)pixel * (INPUTS * 2) + i % LINES * 128);
    }
}

DEVICE void copy_weights(const Arguments& a, u32 weights, int from, int to) {
    for (int i = from / 16 + threadIdx.x; i < to / 16; i += THREADS)
        copy_async(weights + i * 16, (const uint4*)a.weights + i, true);
    copy_commit();
}

DEVICE void bottleneck(const Arguments& a) {
    const Place at = place_of();
    const u32 weights = shared_base(), middle = weights + WEIGHTS + at.group * (8 * PLANE);
    copy_weights(a, weights, REDUCE_AT, CONVOLVE_AT);
    copy_weights(a, weights, CONVOLVE_AT, WEIGHTS);
    copy_wait<1>();
    fence_async();
    block_sync();
    bool coming = true;  // the weights of the last two layers
    NO_UNROLL for (int number = block_index() + at.group * a.blocks; number < a.count; number += GROUPS * a.blocks) {
        const Brick brick = brick_of(a, number);
        NO_UNROLL for (int tile = at.warpgroup; tile < REDUCED_TILES; tile += WARPGROUPS)
            reduce_tile(a, at, brick, weights + REDUCE_AT, middle, tile);
        if (coming) copy_wait<0>();
        fence_async();
        if (coming) block_sync();
        else named_sync(1 + at.group, WARPGROUPS * 128);
        coming = false;
        if (number + GROUPS * a.blocks < a.count) ask_for(a, at, brick_of(a, number + GROUPS * a.blocks));
        NO_UNROLL for (int tile = at.warpgroup; tile < TILES; tile += WARPGROUPS) {
            u32 result[4][4];
            convolve_tile(a, at, weights + CONVOLVE_AT, middle, tile, result);
            // The next brick overwrites what the group has read.
            if (tile + WARPGROUPS >= TILES) named_sync(1 + at.group, WARPGROUPS * 128);
            widen_tile(a, at, brick, weights + WIDEN_AT, tile, result);
        }
    }
    if (coming) {  // a group without a brick brings its share for the others
        copy_wait<0>();
        fence_async();
        block_sync();
    }
}
