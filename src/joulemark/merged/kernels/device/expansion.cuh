// 1×1 expansion to hidden channels in shared memory, and a depthwise convolution of WINDOW × WINDOW taps on the tensor
// cores: what the kernels of inverted residuals and of their fronts share. Their constants stand in front of this text.
//
// A warp owns TILES tiles of 16 output positions: 16 in a row, or (NARROW) 8 in each of two rows. Hidden channels come in
// chunks of 32:
//   expand      the brick with its halo, to 32 hidden channels in shared memory;
//   depthwise   as products with diagonal matrices of two taps: two columns of a row, or two rows of the last column; one
//               tap is left, a product of depth 8. A loaded row of pixels serves all output rows it touches.
//
// With STRIDE 2 a row of the brick's input holds the even columns first, so that a tap reads neighbours again.

constexpr int OCTETS_IN = CHANNELS_IN / 8;
constexpr int STEPS_IN = EXPANDS ? (CHANNELS_IN + 15) / 16 : 2 * CHUNKS;  // 16 input channels each
constexpr int TILE_ROWS = NARROW ? 2 : 1, TILE_WIDTH = NARROW ? 8 : 16;
constexpr int STRIPS = (BRICK_WIDTH + TILE_WIDTH - 1) / TILE_WIDTH;
constexpr int WARPS = STRIPS * BRICK_HEIGHT / (TILES * TILE_ROWS);      // of a group
constexpr int HALF_ROW = BRICK_WIDTH + WINDOW / 2;                      // even columns of a row, with STRIDE 2
constexpr int PITCH = STRIDE == 2 ? 2 * HALF_ROW : BRICK_WIDTH + WINDOW - 1;  // pixels of a row of the brick's input
constexpr int ROWS = STRIDE * (BRICK_HEIGHT - 1) + WINDOW;
constexpr int PIXEL_TILES = (ROWS * PITCH + 15) / 16;
constexpr int TURNS = (PIXEL_TILES + WARPS - 1) / WARPS;                // tiles of pixels that a warp expands
constexpr int PLANE = PLANE_PIXELS * 16;                                // bytes of an octet
constexpr int TILE_STEP = STRIDE * TILE_ROWS;                           // input rows from a warp's tile to its next
constexpr int TAP_ROWS = TILE_STEP * (TILES - 1) + WINDOW;
constexpr int SECOND_TAP = STRIDE == 2 ? HALF_ROW : 1, THIRD_TAP = STRIDE == 2 ? 1 : 2;  // from a row's first tap
constexpr int LAST_TAP = WINDOW / 2 * THIRD_TAP;
constexpr int TAP_LOADS = (WINDOW * WINDOW + 3) / 4;                    // of four words
constexpr int SECOND_HALF = NARROW ? STRIDE * PITCH : 8;                // from a tile's first 8 pixels to the others
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

// Which of PARTS parts of the channels the block makes.
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
    const int top = brick.top * STRIDE - WINDOW / 2, left = brick.left * STRIDE - WINDOW / 2, height = a.size[1], width = a.size[2];
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
        const int y = brick.top * STRIDE - WINDOW / 2 + pixel / PITCH, x = brick.left * STRIDE - WINDOW / 2 + column_at(pixel % PITCH);
        if ((u32)y >= (u32)a.size[1] || (u32)x >= (u32)a.size[2]) bits |= 1u << i;
    }
    return bits;
}

// Bit i of `skipped`: the i-th tile of pixels that the warp would expand is there already.
DEVICE void expand_chunk(const Arguments& a, const Place& at, u32 input, u32 hidden, int chunk, u32 outside, u32 skipped = 0) {
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
                if (at.warp + (i + m) * WARPS >= PIXEL_TILES || (skipped >> (i + m) & 1)) continue;
                u32 pixels[4];
                load_matrix_4(pixels, from + (i + m) * (WARPS * 256) + k * (2 * PLANE));
                multiply(k == 0, sum[m][0], pixels, w0.x, w0.y, bias[0]);
                multiply(k == 0, sum[m][1], pixels, w0.z, w0.w, bias[1]);
                multiply(k == 0, sum[m][2], pixels, w1.x, w1.y, bias[2]);
                multiply(k == 0, sum[m][3], pixels, w1.z, w1.w, bias[3]);
            }
        }
        UNROLL for (int m = 0; m < TOGETHER; m++) {
            if (at.warp + (i + m) * WARPS >= PIXEL_TILES || (skipped >> (i + m) & 1)) continue;
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
    u32 tap[4 * TAP_LOADS];
    const bool diagonal = at.pair == at.row >> 1;
    UNROLL for (int i = 0; i < TAP_LOADS; i++) {
        const uint4 w = load_global_4(weights_at(a, DEPTHWISE_AT) + (octet * TAP_LOADS + i) * 8 + at.row);
        tap[4 * i] = diagonal ? w.x : 0;
        tap[4 * i + 1] = diagonal ? w.y : 0;
        tap[4 * i + 2] = diagonal ? w.z : 0;
        tap[4 * i + 3] = diagonal ? w.w : 0;
    }
    float bias[4], sum[TILES][4];
    load_sum(a, DEPTHWISE_BIAS_AT, octet * 8 + 2 * at.pair, bias);
    const int corner = at.first_row * STRIDE * PITCH + at.strip * TILE_WIDTH;
    const int pixel = corner + (at.lane & 7) + (at.lane >> 3 & 1) * SECOND_HALF;
    const u32 pairs = hidden + (pixel + (at.lane >> 4) * SECOND_TAP) * 16;         // two columns of a row
    const u32 lasts = hidden + (pixel + LAST_TAP + (at.lane >> 4) * PITCH) * 16;  // the last column of two rows
    UNROLL for (int r = 0; r < TAP_ROWS; r++) {
        if (r % TILE_STEP >= WINDOW) continue;  // no tap of any tile begins in this row
        UNROLL for (int p = 0; p < WINDOW / 2; p++) {
            u32 pixels[4];
            load_matrix_4(pixels, pairs + r * (PITCH * 16) + p * (THIRD_TAP * 16));
            UNROLL for (int dy = 0; dy < WINDOW; dy++) {
                const int tile = (r - dy) / TILE_STEP, first = WINDOW * dy + 2 * p;
                if (r < dy || (r - dy) % TILE_STEP || tile >= TILES) continue;
                multiply(first == 0, sum[tile], pixels, tap[first], tap[first + 1], bias);
            }
        }
    }
    UNROLL for (int r = 0; r < TAP_ROWS; r += 2) {
        u32 pixels[4];  // rows r and r + 1
        load_matrix_4(pixels, lasts + r * (PITCH * 16));
        UNROLL for (int tile = 0; tile < TILES; tile++) {
            const int dy = r - tile * TILE_STEP;  // of row r among the tile's taps
            if (dy < -1 || dy >= WINDOW) continue;
            const int first = WINDOW * dy + WINDOW - 1, second = first + WINDOW;
            if (dy == -1) Element::mma_8(sum[tile], pixels[2], pixels[3], tap[second]);
            else if (dy == WINDOW - 1) Element::mma_8(sum[tile], pixels[0], pixels[1], tap[first]);
            else Element::mma(sum[tile], pixels, tap[first], tap[second]);
        }
    }
    UNROLL for (int j = 0; j < TILES; j++) {
        result[j][0] = activate<DEPTHWISE_ACTIVATION>(sum[j][0], sum[j][1], false);
        result[j][1] = activate<DEPTHWISE_ACTIVATION>(sum[j][2], sum[j][3], false);
    }
}
