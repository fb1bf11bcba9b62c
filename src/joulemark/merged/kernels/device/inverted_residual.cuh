// Inverted residual: 1×1 expansion, depthwise 3×3, 1×1 projection, and the input added. A block makes one brick.
//
// The constants in capitals stand in front of this text; inverted_residual.py writes them.
//
// A warp owns TILES tiles of 16 output positions: 16 in a row, or (NARROW) 8 in each of two rows. It keeps their
// projected channels in registers over all hidden channels, which come in chunks of 32:
//   expand      the brick with its halo, to 32 hidden channels in shared memory;
//   depthwise   as products with diagonal matrices of two taps: columns 0 and 1 of a row, or two rows of column 2; one
//               tap of nine is left, a product of depth 8. A loaded row of pixels serves all output rows it touches;
//   project     the depthwise's result has the layout of the next product's operand: it never leaves the registers.
// With AHEAD the block is persistent and brings the next brick's input while it computes this one.
// GROUPS groups of warps share the brick's input and take the chunks in turns; their sums are added at the end. Where
// there are few bricks, PARTS blocks make a brick, each a part of its output channels.
//
// With STRIDE 2 a row of the brick's input holds the even columns first, so that a tap reads neighbours again.

constexpr int OCTETS_IN = CHANNELS_IN / 8, OCTETS_OUT = CHANNELS_OUT / 8 / PARTS, PAIRS_OUT = (OCTETS_OUT + 1) / 2;
constexpr int STEPS_IN = EXPANDS ? (CHANNELS_IN + 15) / 16 : 2 * CHUNKS;  // 16 input channels each
constexpr int TILE_ROWS = NARROW ? 2 : 1, TILE_WIDTH = NARROW ? 8 : 16;
constexpr int STRIPS = (BRICK_WIDTH + TILE_WIDTH - 1) / TILE_WIDTH;
constexpr int WARPS = STRIPS * BRICK_HEIGHT / (TILES * TILE_ROWS);      // of a group
constexpr int HALF_ROW = BRICK_WIDTH + 1;                               // even columns of a row, with STRIDE 2
constexpr int PITCH = STRIDE == 2 ? 2 * HALF_ROW : BRICK_WIDTH + 2;     // pixels of a row of the brick's input
constexpr int ROWS = STRIDE * (BRICK_HEIGHT - 1) + 3;
constexpr int PIXEL_TILES = (ROWS * PITCH + 15) / 16;
constexpr int TURNS = (PIXEL_TILES + WARPS - 1) / WARPS;                // tiles of pixels that a warp expands
constexpr int PLANE = PLANE_PIXELS * 16, OUT_PLANE = OUT_PLANE_PIXELS * 16;  // bytes of an octet
constexpr int TILE_STEP = STRIDE * TILE_ROWS;                           // input rows from a warp's tile to its next
constexpr int TAP_ROWS = TILE_STEP * (TILES - 1) + 3;
constexpr int SECOND_TAP = STRIDE == 2 ? HALF_ROW : 1, THIRD_TAP = STRIDE == 2 ? 1 : 2;
constexpr int SECOND_HALF = NARROW ? STRIDE * PITCH : 8;                // from a tile's first 8 pixels to the others
static_assert(PARTS == 1 || CHANNELS_OUT % (16 * PARTS) == 0, "whole pairs of octets in each part");
static_assert(WARPS * TILES * TILE_ROWS == STRIPS * BRICK_HEIGHT, "the warps cover the brick");
static_assert(WARPS * GROUPS * 32 == THREADS, "threads of a block");
static_assert(TURNS <= 16, "two bits for each tile of pixels");
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

// Which of PARTS equal parts of the output channels the block makes.
DEVICE int part_of() { return PARTS == 1 ? 0 : block_index() % PARTS; }

// The block's first brick; its only one unless AHEAD.
DEVICE int first_brick() { return block_index() / PARTS; }

DEVICE Brick brick_of(const Arguments& a, int number) {
    const int row = number / a.bricks[2], image = row / a.bricks[1];
    return {image, (row - image * a.bricks[1]) * BRICK_HEIGHT, (number - row * a.bricks[2]) * BRICK_WIDTH};
}

// The column of the brick's input at place q of a row, and the other way round.
DEVICE int column_at(int q) { return STRIDE == 1 ? q : q < HALF_ROW ? 2 * q : 2 * (q - HALF_ROW) + 1; }
DEVICE int place_in_row(int column) { return STRIDE == 1 ? column : (column & 1) * HALF_ROW + (column >> 1); }

DEVICE void load_input(const Arguments& a, const Place& at, int number, u32 input) {
    const Brick brick = brick_of(a, number);
    const int top = brick.top * STRIDE - 1, left = brick.left * STRIDE - 1, height = a.size[1], width = a.size[2];
    for (int r = at.warp + at.group * WARPS; r < ROWS; r += WARPS * GROUPS) {
        const bool row_there = (u32)(top + r) < (u32)height;
        const u64 first = ((u64)brick.image * height + (row_there ? top + r : 0)) * width;
        const u16* row = (const u16*)a.input + first * CHANNELS_IN;
        const u16* from = row + left * CHANNELS_IN + at.lane * 8;
        const u32 to = input + r * (PITCH * 16);
        Walk<OCTETS_IN> walk(at.lane);
        for (int i = at.lane; i < PITCH * OCTETS_IN; i += 32, from += 32 * 8, walk.next()) {
            const bool there = row_there && (u32)(left + walk.pixel) < (u32)width;
            copy_async(to + place_in_row(walk.pixel) * 16 + walk.octet * PLANE, there ? from : row, there);
        }
    }
    if (OCTETS_IN < 2 * STEPS_IN)  // the last octets of a step that is not full
        for (int i = threadIdx.x; i < (2 * STEPS_IN - OCTETS_IN) * PLANE_PIXELS; i += THREADS)
            store_shared_4(input + OCTETS_IN * PLANE + i * 16, uint4{0, 0, 0, 0});
    copy_commit();
}

// Bit 2 i + h tells that pixel 8 h + row of the i-th tile that the warp expands lies outside of the image.
DEVICE u32 outside_bits(const Arguments& a, const Place& at, int number) {
    const Brick brick = brick_of(a, number);
    u32 bits = 0;
    for (int i = 0; i < 2 * TURNS; i++) {
        const int pixel = (at.warp + (i >> 1) * WARPS) * 16 + (i & 1) * 8 + at.row;
        const int y = brick.top * STRIDE - 1 + pixel / PITCH, x = brick.left * STRIDE - 1 + column_at(pixel % PITCH);
        if ((u32)y >= (u32)a.size[1] || (u32)x >= (u32)a.size[2]) bits |= 1u << i;
    }
    return bits;
}

DEVICE void expand_chunk(const Arguments& a, const Place& at, u32 input, u32 hidden, int chunk, u32 outside) {
    constexpr bool KEEP = STEPS_IN <= KEPT_STEPS;  // the weights stay in registers for all tiles
    const uint4* weights = weights_at(a, EXPAND_AT) + chunk * (STEPS_IN * 64) + at.lane;
    float bias[4][4];
    UNROLL for (int j = 0; j < 4; j++) load_sum(a, EXPAND_BIAS_AT, chunk * 32 + j * 8 + 2 * at.pair, bias[j]);
    uint4 kept[KEEP ? STEPS_IN : 1][2];
    UNROLL for (int k = 0; k < (KEEP ? STEPS_IN : 0); k++) {
        kept[k][0] = load_global_4(weights + k * 64);
        kept[k][1] = load_global_4(weights + k * 64 + 32);
    }
    const u32 from = input + (at.lane & 15) * 16 + (at.lane >> 4) * PLANE + at.warp * 256;
    const u32 to = hidden + at.row * 16 + at.pair * 4 + at.warp * 256;
    NO_UNROLL for (int i = 0; i < TURNS; i += TOGETHER) {
        float sum[TOGETHER][4][4];
        UNROLL for (int k = 0; k < STEPS_IN; k++) {
            const uint4 w0 = KEEP ? kept[KEEP ? k : 0][0] : load_global_4(weights + k * 64);
            const uint4 w1 = KEEP ? kept[KEEP ? k : 0][1] : load_global_4(weights + k * 64 + 32);
            UNROLL for (int m = 0; m < TOGETHER; m++) {
                if (at.warp + (i + m) * WARPS >= PIXEL_TILES) continue;
                u32 pixels[4];
                load_matrix_4(pixels, from + (i + m) * (WARPS * 256) + k * (2 * PLANE));
                multiply(k == 0, sum[m][0], pixels, w0.x, w0.y, bias[0]);
                multiply(k == 0, sum[m][1], pixels, w0.z, w0.w, bias[1]);
                multiply(k == 0, sum[m][2], pixels, w1.x, w1.y, bias[2]);
                multiply(k == 0, sum[m][3], pixels, w1.z, w1.w, bias[3]);
            }
        }
        UNROLL for (int m = 0; m < TOGETHER; m++) {
            if (at.warp + (i + m) * WARPS >= PIXEL_TILES) continue;
            const u32 bits = outside >> (2 * (i + m));
            UNROLL for (int j = 0; j < 4; j++) {
                const u32 there = to + (i + m) * (WARPS * 256) + j * PLANE;
                store_shared(there, activate<EXPAND_ACTIVATION>(sum[m][j][0], sum[m][j][1], bits & 1));
                store_shared(there + 128, activate<EXPAND_ACTIVATION>(sum[m][j][2], sum[m][j][3], bits & 2));
            }
        }
    }
}

// Depthwise convolution of 8 hidden channels: two of the four registers of an operand, for each of the warp's tiles.
DEVICE void depthwise_octet(const Arguments& a, const Place& at, u32 hidden, int octet, u32 (&result)[TILES][2]) {
    u32 tap[12];
    const bool diagonal = at.pair == at.row >> 1;
    UNROLL for (int i = 0; i < 3; i++) {
        const uint4 w = load_global_4(weights_at(a, DEPTHWISE_AT) + (octet * 3 + i) * 8 + at.row);
        tap[4 * i] = diagonal ? w.x : 0;
        tap[4 * i + 1] = diagonal ? w.y : 0;
        tap[4 * i + 2] = diagonal ? w.z : 0;
        tap[4 * i + 3] = diagonal ? w.w : 0;
    }
    float bias[4], sum[TILES][4];
    load_sum(a, DEPTHWISE_BIAS_AT, octet * 8 + 2 * at.pair, bias);
    const int corner = at.first_row * STRIDE * PITCH + at.strip * TILE_WIDTH;
    const int pixel = corner + (at.lane & 7) + (at.lane >> 3 & 1) * SECOND_HALF;
    const u32 pairs = hidden + (pixel + (at.lane >> 4) * SECOND_TAP) * 16;       // columns 0 and 1
    const u32 thirds = hidden + (pixel + THIRD_TAP + (at.lane >> 4) * PITCH) * 16;  // column 2 of two rows
    UNROLL for (int r = 0; r < TAP_ROWS; r++) {
        if (TILE_STEP == 4 && r % 4 == 3) continue;  // no tap of any tile begins in this row
        u32 pixels[4];
        load_matrix_4(pixels, pairs + r * (PITCH * 16));
        UNROLL for (int dy = 0; dy < 3; dy++) {
            const int tile = (r - dy) / TILE_STEP;
            if (r < dy || (r - dy) % TILE_STEP || tile >= TILES) continue;
            multiply(dy == 0, sum[tile], pixels, tap[3 * dy], tap[3 * dy + 1], bias);
        }
    }
    UNROLL for (int r = 0; r < TAP_ROWS; r += 2) {
        u32 pixels[4];  // rows r and r + 1
        load_matrix_4(pixels, thirds + r * (PITCH * 16));
        UNROLL for (int tile = 0; tile < TILES; tile++) {
            const int first = tile * TILE_STEP;
            if (first == r) Element::mma(sum[tile], pixels, tap[2], tap[5]);
            if (first == r - 1) Element::mma(sum[tile], pixels, tap[5], tap[8]);
            if (first == r + 1) Element::mma_8(sum[tile], pixels[2], pixels[3], tap[2]);
            if (first == r - 2) Element::mma_8(sum[tile], pixels[0], pixels[1], tap[8]);
        }
    }
    UNROLL for (int j = 0; j < TILES; j++) {
        result[j][0] = activate<DEPTHWISE_ACTIVATION>(sum[j][0], sum[j][1], false);
        result[j][1] = activate<DEPTHWISE_ACTIVATION>(sum[j][2], sum[j][3], false);
    }
}

DEVICE void project_chunk(const Arguments& a, const Place& at, u32 hidden, int chunk, float (&out)[TILES][OCTETS_OUT][4]) {
    NO_UNROLL for (int s = 0; s < 2; s++) {
        u32 low[TILES][2], high[TILES][2];
        depthwise_octet(a, at, hidden + s * (2 * PLANE), chunk * 4 + s * 2, low);
        depthwise_octet(a, at, hidden + s * (2 * PLANE) + PLANE, chunk * 4 + s * 2 + 1, high);
        const int part = (chunk * 2 + s) * PARTS + part_of();
        const uint4* weights = weights_at(a, PROJECT_AT) + part * (PAIRS_OUT * 32) + at.lane;
        UNROLL for (int i = 0; i < PAIRS_OUT; i++) {
            const uint4 w = load_global_4(weights + i * 32);
            UNROLL for (int j = 0; j < TILES; j++) {
                const u32 pixels[4] = {low[j][0], low[j][1], high[j][0], high[j][1]};
                Element::mma(out[j][2 * i], pixels, w.x, w.y);
                if (2 * i + 1 < OCTETS_OUT) Element::mma(out[j][2 * i + 1], pixels, w.z, w.w);
            }
        }
    }
}

// Adds the sums of all groups to those of the first.
DEVICE void add_groups(const Place& at, u32 scratch, float (&out)[TILES][OCTETS_OUT][4]) {
    const u32 mine = scratch + (at.warp * 32 + at.lane) * 16;
    UNROLL for (int group = 1; group < GROUPS; group++) {
        block_sync();
        if (at.group == group) {
            UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < OCTETS_OUT; i++) {
                const float(&one)[4] = out[j][i];
                store_shared_4(mine + (j * OCTETS_OUT + i) * (WARPS * 512),
                               uint4{bits_of(one[0]), bits_of(one[1]), bits_of(one[2]), bits_of(one[3])});
            }
        }
        block_sync();
        if (at.group == 0) {
            UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < OCTETS_OUT; i++) {
                const uint4 other = load_shared_4(mine + (j * OCTETS_OUT + i) * (WARPS * 512));
                out[j][i][0] += float_of(other.x);
                out[j][i][1] += float_of(other.y);
                out[j][i][2] += float_of(other.z);
                out[j][i][3] += float_of(other.w);
            }
        }
    }
}

// Where the output is put together before it leaves: with a residual over the input, which each thread reads where it
// then writes.
constexpr int OUT_PITCH = RESIDUAL ? PITCH : STRIPS * TILE_WIDTH, OUT_ORIGIN = RESIDUAL ? PITCH + 1 : 0;
constexpr int OUT_OCTET = RESIDUAL ? PLANE : OUT_PLANE;

DEVICE void finish(const Place& at, u32 staged, float (&out)[TILES][OCTETS_OUT][4]) {
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int h = 0; h < 2; h++) {
        const int y = at.first_row + j * TILE_ROWS + (NARROW ? h : 0);
        const int x = at.strip * TILE_WIDTH + at.row + (NARROW ? 0 : 8 * h);
        if (x >= BRICK_WIDTH) continue;  // with a residual, the next row begins there
        const u32 there = staged + (OUT_ORIGIN + y * OUT_PITCH + x) * 16 + at.pair * 4;
        UNROLL for (int i = 0; i < OCTETS_OUT; i++) {
            const u32 added = RESIDUAL ? load_shared(there + i * OUT_OCTET) : 0;
            const float low = out[j][i][2 * h] + Element::low(added), high = out[j][i][2 * h + 1] + Element::high(added);
            store_shared(there + i * OUT_OCTET, activate<PROJECT_ACTIVATION>(low, high, false));
        }
    }
}

DEVICE void store_output(const Arguments& a, const Place& at, int number, u32 staged) {
    const Brick brick = brick_of(a, number);
    const int height = a.out[1], width = a.out[2];
    const int rest = width - brick.left, columns = rest < BRICK_WIDTH ? rest : BRICK_WIDTH;
    for (int r = at.warp + at.group * WARPS; r < BRICK_HEIGHT && brick.top + r < height; r += WARPS * GROUPS) {
        const u64 first = ((u64)brick.image * height + brick.top + r) * width + brick.left;
        u16* row = (u16*)a.output + first * CHANNELS_OUT + part_of() * (OCTETS_OUT * 8);
        Walk<OCTETS_OUT> walk(at.lane);
        for (int i = at.lane; i < columns * OCTETS_OUT; i += 32, walk.next()) {
            const u32 from = staged + (OUT_ORIGIN + r * OUT_PITCH + walk.pixel) * 16 + walk.octet * OUT_OCTET;
            *(uint4*)(row + walk.pixel * CHANNELS_OUT + walk.octet * 8) = load_shared_4(from);
        }
    }
}

// From a brick's input in shared memory to its output in global memory.
DEVICE void compute_brick(const Arguments& a, const Place& at, int number, u32 input, u32 scratch) {
    const u32 outside = EXPANDS ? outside_bits(a, at, number) : 0;
    float out[TILES][OCTETS_OUT][4];
    UNROLL for (int i = 0; i < OCTETS_OUT; i++) {
        float bias[4];
        load_sum(a, PROJECT_BIAS_AT, (part_of() * OCTETS_OUT + i) * 8 + 2 * at.pair, bias);
        UNROLL for (int j = 0; j < TILES; j++)
            UNROLL for (int q = 0; q < 4; q++) out[j][i][q] = at.group == 0 ? bias[q] : 0.f;
    }
    if (!AHEAD) {
        copy_wait<0>();
        block_sync();
    }
    u32 hidden = EXPANDS ? scratch + at.group * (BUFFERS * 4 * PLANE) : input, other = hidden + (BUFFERS - 1) * 4 * PLANE;
    NO_UNROLL for (int chunk = at.group; chunk < CHUNKS; chunk += GROUPS) {
        if (EXPANDS) {
            // With two buffers the barrier of the last chunk has shown that nobody reads this one any more.
            if (BUFFERS == 1) named_sync(1 + at.group, WARPS * 32);
            expand_chunk(a, at, input, hidden, chunk, outside);
            named_sync(1 + at.group, WARPS * 32);
        }
        project_chunk(a, at, EXPANDS ? hidden : input + chunk * (4 * PLANE), chunk, out);
        if (BUFFERS == 2) {
            const u32 last = hidden;
            hidden = other;
            other = last;
        }
    }
    if (GROUPS > 1) add_groups(at, scratch, out);
    block_sync();
    const u32 staged = input + (RESIDUAL ? part_of() * (OCTETS_OUT * PLANE) : 0);
    if (at.group == 0) finish(at, staged, out);
    block_sync();
    store_output(a, at, AHEAD ? number : first_brick(), staged);
}

DEVICE void inverted_residual(const Arguments& a) {
    const Place at = place_of();
    constexpr int INPUT = 2 * STEPS_IN * PLANE;
    u32 input = shared_base(), next = input + INPUT;
    const u32 scratch = input + (AHEAD ? 2 : 1) * INPUT;
    load_input(a, at, first_brick(), input);
    if (!AHEAD) return compute_brick(a, at, first_brick(), input, scratch);
    NO_UNROLL for (int number = first_brick(); number < a.count; number += a.blocks) {
        copy_wait<0>();
        block_sync();  // the input is there for all, and nobody reads the other place any more
        if (number + a.blocks < a.count) load_input(a, at, number + a.blocks, next);
        compute_brick(a, at, number, input, scratch);
        const u32 last = input;
        input = next;
        next = last;
    }
}
