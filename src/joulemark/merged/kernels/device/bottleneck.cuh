// Bottleneck: 1×1, 3×3, 1×1, and the input added. Persistent: one block on a multiprocessor, all weights in its shared
// memory; each of its GROUPS groups of warps takes brick after brick of the output.
//
// The constants in capitals stand in front of this text; bottleneck.py writes them. The sequence has CHANNELS channels
// outside and MIDDLE inside.
//
//   reduce   16 pixels of the brick with its halo at a time, straight from global memory to registers: lane t of a
//            pixel reads channels 8 t … 8 t + 7 of 32 at once. The order of channels within a product is free as long
//            as the weights follow it, and they are packed so. The result goes to shared memory, by octets.
//   convolve the warp's TILES tiles of 16 positions, all MIDDLE channels; a loaded row serves the output rows it touches.
//   widen    the result has the layout of the next product's operand and stays in registers. Again the weights are
//            packed so that a lane gets 8 neighbouring channels, adds those of the input and stores 16 bytes.
//
// While a warp convolves, it asks L2 for the next brick.

constexpr int TILE_ROWS = NARROW ? 2 : 1, TILE_WIDTH = NARROW ? 8 : 16;
constexpr int STRIPS = (BRICK_WIDTH + TILE_WIDTH - 1) / TILE_WIDTH;
constexpr int WARPS = STRIPS * BRICK_HEIGHT / (TILES * TILE_ROWS);  // of a group
constexpr int PITCH = BRICK_WIDTH + 2, ROWS = BRICK_HEIGHT + 2, PIXELS = ROWS * PITCH;
constexpr int PIXEL_TILES = (PIXELS + 15) / 16;
constexpr int PLANE = PLANE_PIXELS * 16;  // bytes of an octet
constexpr int OCTETS = MIDDLE / 8, STEPS = MIDDLE / 16, BLOCKS_32 = CHANNELS / 32;
constexpr int TAP_ROWS = TILE_ROWS * (TILES - 1) + 3;
constexpr int SECOND_HALF = NARROW ? PITCH : 8;  // from a tile's first 8 pixels to the others
static_assert(WARPS * TILES * TILE_ROWS == STRIPS * BRICK_HEIGHT, "the warps cover the brick");
static_assert(WARPS * GROUPS * 32 == THREADS, "threads of a block");
static_assert(PLANE_PIXELS >= PIXEL_TILES * 16, "an octet has room for whole tiles");

struct Place {
    int lane, row, pair;   // row of an 8×8 fragment; pair of its columns
    int warp, group;       // within the group; of the block
    int strip, first_row;  // of the warp's output tiles, within the brick
};
struct Brick {
    int image, top, left;  // of the output
};

DEVICE Place place_of() {
    Place at;
    const int thread = threadIdx.x, warp = thread >> 5;
    at.lane = thread & 31;
    at.row = at.lane >> 2;
    at.pair = at.lane & 3;
    at.warp = warp % WARPS;
    at.group = warp / WARPS;
    at.strip = at.warp % STRIPS;
    at.first_row = at.warp / STRIPS * (TILES * TILE_ROWS);
    return at;
}

DEVICE Brick brick_of(const Arguments& a, int number) {
    const int row = number / a.bricks[2], image = row / a.bricks[1];
    return {image, (row - image * a.bricks[1]) * BRICK_HEIGHT, (number - row * a.bricks[2]) * BRICK_WIDTH};
}

// The weights of products of depth 16 with 16 outputs each: 16 bytes for each lane.
DEVICE uint4 weights_of(u32 weights, int product, const Place& at) {
    return load_shared_4(weights + (product * 32 + at.lane) * 16);
}

// The offset of a pixel of the brick's input in the tensor, or −1 outside of it.
DEVICE int pixel_at(const Arguments& a, const Brick& brick, int pixel) {
    const int y = brick.top - 1 + pixel / PITCH, x = brick.left - 1 + pixel % PITCH;
    const bool there = pixel < PIXELS && (u32)y < (u32)a.size[1] && (u32)x < (u32)a.size[2];
    return there ? (brick.image * a.size[1] + y) * a.size[2] + x : -1;
}

// `COUNT` tiles of pixels, from the input to MIDDLE channels in shared memory.
template <int COUNT>
DEVICE void reduce_tiles(const Arguments& a, const Place& at, const Brick& brick, u32 weights, u32 middle, int turn) {
    // Zero, which the compiler cannot know: it puts an operand's registers side by side once, not before each product.
    const u32 nothing = a.count >> 31;
    const u16* from[COUNT][2];
    bool outside[COUNT][2];
    uint4 next[COUNT][2];
    UNROLL for (int m = 0; m < COUNT; m++) UNROLL for (int h = 0; h < 2; h++) {
        const int pixel = pixel_at(a, brick, (at.warp + (turn + m) * WARPS) * 16 + h * 8 + at.row);
        outside[m][h] = pixel < 0;
        from[m][h] = (const u16*)a.input + (u64)(pixel < 0 ? 0 : pixel) * CHANNELS + at.pair * 8;
        next[m][h] = load_global_4(from[m][h]);
    }
    float sum[COUNT][OCTETS][4];
    UNROLL for (int i = 0; i < OCTETS; i++) {
        float bias[2];
        load_bias(a, REDUCE_BIAS_AT, i / 4 * 32 + at.pair * 8 + i % 4 * 2, bias);
        UNROLL for (int m = 0; m < COUNT; m++) UNROLL for (int q = 0; q < 4; q++) sum[m][i][q] = bias[q & 1];
    }
    UNROLL_2 for (int c = 0; c < BLOCKS_32; c++) {
        uint4 now[COUNT][2];
        UNROLL for (int m = 0; m < COUNT; m++) UNROLL for (int h = 0; h < 2; h++) {
            now[m][h] = next[m][h];
            if (c + 1 < BLOCKS_32) next[m][h] = load_global_4(from[m][h] + (c + 1) * 32);
        }
        UNROLL for (int k = 0; k < 2; k++) {
            u32 pixels[COUNT][4];
            UNROLL for (int m = 0; m < COUNT; m++) {
                const uint4 low = now[m][0], high = now[m][1];
                pixels[m][0] = (k ? low.z : low.x) ^ nothing;
                pixels[m][1] = (k ? high.z : high.x) ^ nothing;
                pixels[m][2] = (k ? low.w : low.y) ^ nothing;
                pixels[m][3] = (k ? high.w : high.y) ^ nothing;
            }
            UNROLL for (int i = 0; i < OCTETS; i += 2) {
                const uint4 w = weights_of(weights, (c * 2 + k) * STEPS + i / 2, at);
                UNROLL for (int m = 0; m < COUNT; m++) {
                    Element::mma(sum[m][i], pixels[m], w.x, w.y);
                    Element::mma(sum[m][i + 1], pixels[m], w.z, w.w);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < COUNT; m++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int i = 0; i < OCTETS; i += 4) {
        u32 words[4];  // channels 8 pair … 8 pair + 7 of 32
        UNROLL for (int j = 0; j < 4; j++)
            words[j] = activate<REDUCE_ACTIVATION>(sum[m][i + j][2 * h], sum[m][i + j][2 * h + 1], outside[m][h]);
        const int pixel = (at.warp + (turn + m) * WARPS) * 16 + h * 8 + at.row;
        store_shared_4(middle + (i + at.pair) * PLANE + pixel * 16, uint4{words[0], words[1], words[2], words[3]});
    }
}

DEVICE void reduce(const Arguments& a, const Place& at, const Brick& brick, u32 weights, u32 middle) {
    constexpr int TURNS = PIXEL_TILES / WARPS;  // of all warps; some have one more
    NO_UNROLL for (int turn = 0; turn + TOGETHER <= TURNS; turn += TOGETHER)
        reduce_tiles<TOGETHER>(a, at, brick, weights, middle, turn);
    NO_UNROLL for (int turn = TURNS / TOGETHER * TOGETHER; at.warp + turn * WARPS < PIXEL_TILES; turn++)
        reduce_tiles<1>(a, at, brick, weights, middle, turn);
}

// The 3×3 of the warp's tiles: operands of the next product.
DEVICE void convolve(const Arguments& a, const Place& at, u32 weights, u32 middle, u32 (&result)[TILES][STEPS][4]) {
    float sum[TILES][OCTETS][4];
    UNROLL for (int i = 0; i < OCTETS; i++) {
        float bias[2];
        load_bias(a, CONVOLVE_BIAS_AT, i * 8 + 2 * at.pair, bias);
        UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int q = 0; q < 4; q++) sum[j][i][q] = bias[q & 1];
    }
    const int corner = at.first_row * PITCH + at.strip * TILE_WIDTH;
    const int pixel = corner + (at.lane & 7) + (at.lane >> 3 & 1) * SECOND_HALF;
    const u32 from = middle + (at.lane >> 4) * PLANE + pixel * 16;
    NO_UNROLL for (int k = 0; k < STEPS; k++) UNROLL for (int dx = 0; dx < 3; dx++) {
        u32 pixels[TAP_ROWS][4];
        UNROLL for (int r = 0; r < TAP_ROWS; r++) load_matrix_4(pixels[r], from + k * (2 * PLANE) + (r * PITCH + dx) * 16);
        UNROLL for (int dy = 0; dy < 3; dy++) UNROLL for (int i = 0; i < OCTETS; i += 2) {
            const uint4 w = weights_of(weights, ((k * 3 + dx) * 3 + dy) * STEPS + i / 2, at);
            UNROLL for (int j = 0; j < TILES; j++) {
                Element::mma(sum[j][i], pixels[j * TILE_ROWS + dy], w.x, w.y);
                Element::mma(sum[j][i + 1], pixels[j * TILE_ROWS + dy], w.z, w.w);
            }
        }
    }
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < OCTETS; i++) UNROLL for (int h = 0; h < 2; h++)
        result[j][i / 2][i % 2 * 2 + h] = activate<CONVOLVE_ACTIVATION>(sum[j][i][2 * h], sum[j][i][2 * h + 1], false);
}

DEVICE void widen(const Arguments& a, const Place& at, const Brick& brick, u32 weights,
                  const u32 (&pixels)[TILES][STEPS][4]) {
    int offset[TILES][2];  // of a pixel, or −1
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int h = 0; h < 2; h++) {
        const int y = at.first_row + j * TILE_ROWS + (NARROW ? h : 0);
        const int x = at.strip * TILE_WIDTH + at.row + (NARROW ? 0 : 8 * h);
        const bool there = x < BRICK_WIDTH && brick.top + y < a.out[1] && brick.left + x < a.out[2];
        offset[j][h] = there ? (brick.image * a.out[1] + brick.top + y) * a.out[2] + brick.left + x : -1;
    }
    NO_UNROLL for (int c = 0; c < BLOCKS_32; c++) {
        const int channel = c * 32 + at.pair * 8;
        uint4 added[TILES][2];
        UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int h = 0; h < 2; h++) {
            const int pixel = offset[j][h] < 0 ? 0 : offset[j][h];
            if (RESIDUAL) added[j][h] = load_global_4((const u16*)a.input + (u64)pixel * CHANNELS + channel);
        }
        float sum[TILES][4][4];
        UNROLL for (int i = 0; i < 4; i += 2) {
            const uint4 four = load_global_4(weights_at(a, WIDEN_BIAS_AT + (channel + 2 * i) * 4));
            const float bias[4] = {float_of(four.x), float_of(four.y), float_of(four.z), float_of(four.w)};
            UNROLL for (int j = 0; j < TILES; j++)
                UNROLL for (int q = 0; q < 4; q++) sum[j][i][q] = bias[q & 1], sum[j][i + 1][q] = bias[2 + (q & 1)];
        }
        UNROLL for (int k = 0; k < STEPS; k++) UNROLL for (int i = 0; i < 4; i += 2) {
            const uint4 w = weights_of(weights, (c * STEPS + k) * 2 + i / 2, at);
            UNROLL for (int j = 0; j < TILES; j++) {
                Element::mma(sum[j][i], pixels[j][k], w.x, w.y);
                Element::mma(sum[j][i + 1], pixels[j][k], w.z, w.w);
            }
        }
        UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int h = 0; h < 2; h++) {
            const uint4 x = RESIDUAL ? added[j][h] : uint4{0, 0, 0, 0};
            const u32 with[4] = {x.x, x.y, x.z, x.w};
            u32 words[4];
            UNROLL for (int i = 0; i < 4; i++)
                words[i] = activate<WIDEN_ACTIVATION>(sum[j][i][2 * h] + Element::low(with[i]),
                                                      sum[j][i][2 * h + 1] + Element::high(with[i]), false);
            if (offset[j][h] >= 0)
                *(uint4*)((u16*)a.output + (u64)offset[j][h] * CHANNELS + channel) =
                    uint4{words[0], words[1], words[2], words[3]};
        }
    }
}

DEVICE void ask_for(const Arguments& a, const Place& at, const Brick& brick) {
    constexpr int LINES = (CHANNELS * 2 + 127) / 128;
    for (int i = at.warp * 32 + at.lane; i < PIXELS * LINES; i += WARPS * 32) {
        const int pixel = pixel_at(a, brick, i / LINES);
        if (pixel >= 0) prefetch((const char*)a.input + (u64)pixel * (CHANNELS * 2) + i % LINES * 128);
    }
}

DEVICE void bottleneck(const Arguments& a) {
    const Place at = place_of();
    const u32 weights = shared_base(), middle = weights + WEIGHTS + at.group * (OCTETS * PLANE + SLACK);
    for (int i = threadIdx.x; i < WEIGHTS / 16; i += THREADS)
        copy_async(weights + i * 16, (const uint4*)a.weights + i, true);
    copy_commit();
    copy_wait<0>();
    block_sync();
    NO_UNROLL for (int number = block_index() + at.group * a.blocks; number < a.count; number += GROUPS * a.blocks) {
        const Brick brick = brick_of(a, number);
        reduce(a, at, brick, weights + REDUCE_AT, middle);
        named_sync(1 + at.group, WARPS * 32);
        u32 result[TILES][STEPS][4];
        if (number + GROUPS * a.blocks < a.count) ask_for(a, at, brick_of(a, number + GROUPS * a.blocks));
        convolve(a, at, weights + CONVOLVE_AT, middle, result);
        named_sync(1 + at.group, WARPS * 32);  // the next brick overwrites what the group has read
        widen(a, at, brick, weights + WIDEN_AT, result);
    }
}
