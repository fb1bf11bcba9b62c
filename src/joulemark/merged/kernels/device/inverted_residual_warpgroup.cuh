// Inverted residual with the products of warpgroups (sm_90a): 1×1 expansion, depthwise 3×3, 1×1 projection, input added.
//
// The constants in capitals stand in front of this text; inverted_residual_warpgroup.py writes them. A block makes the
// bricks of IMAGES images at one place. A warp owns TILES tiles of 16 output positions, as in inverted_residual.cuh, and
// keeps their projected channels in registers. Hidden channels come in chunks of CHUNK:
//   expand      64 pixels of the bricks' input at a time, both operands in shared memory; pixels of rows outside of the
//               image are not expanded, they are zero from the start;
//   depthwise   products with diagonal matrices of two taps, by each warp for itself;
//   project     the depthwise's result is the operand in registers, the weights lie in shared memory.
// The next chunk is expanded while this one is taken through the other two: the warpgroup's products run on their own.
// Weights come from global memory a chunk ahead, by one copy each for expansion and projection.
//
// SPLIT blocks, a cluster, share a brick's hidden channels: each takes every SPLIT-th chunk; at the end each adds up a
// part of the output's channels, from the shared memory of all.
//
// GROUPS groups of warps of a block share them further: each has a pipeline of its own, chunks, hidden channels and weights,
// and waits for no other; their sums are added up with the cluster's.
//
// With HALVES hidden channels are fp16, and the depthwise is multiplied and added two channels at a time, without the
// tensor cores: a lane's four channels of 16 are neighbours, for which the projection's inputs are packed in that order.
//
// With EARLY the kernel begins while the one before it ends, and lets the next one do so.
//
// With AHEAD the block is persistent: while it computes a brick, the next one's input comes. Weights come on and on.

constexpr int OCTETS_IN = CHANNELS_IN / 8, STEPS_IN = (CHANNELS_IN + 15) / 16;
constexpr int OCTETS = CHUNK / 8, STEPS = CHUNK / 16;                      // of a chunk
constexpr int OCTETS_OUT = CHANNELS_OUT / 8;
constexpr int PRODUCTS = (OCTETS_OUT + 31) / 32;                           // a product makes at most 256 channels
constexpr int OCTETS_EACH = OCTETS_OUT / PRODUCTS;
constexpr int OCTETS_OWN = (OCTETS_OUT + SPLIT - 1) / SPLIT;               // that a block of the cluster adds up
constexpr int TILE_ROWS = NARROW ? 2 : 1, TILE_WIDTH = NARROW ? 8 : 16;
constexpr int STRIPS = (BRICK_WIDTH + TILE_WIDTH - 1) / TILE_WIDTH;
constexpr int BAND = TILES * TILE_ROWS;                                    // rows of a warp
constexpr int WARPS_EACH = STRIPS * ((BRICK_HEIGHT + BAND - 1) / BAND);    // of an image
constexpr int WARPS = THREADS / 32, GROUP_THREADS = THREADS / GROUPS;
constexpr int GROUP_WARPS = GROUP_THREADS / 32, WARPGROUPS = GROUP_THREADS / 128;
constexpr int HALF_ROW = BRICK_WIDTH + 1;                                  // even columns of a row, with STRIDE 2
constexpr int PITCH = STRIDE == 2 ? 2 * HALF_ROW : BRICK_WIDTH + 2;        // pixels of a row of the brick's input
constexpr int ROWS = STRIDE * (BRICK_HEIGHT - 1) + 3;
constexpr int IMAGE_PIXELS = ROWS * PITCH;
constexpr int TURNS = (IMAGES * ((IMAGE_PIXELS + 63) / 64) + WARPGROUPS - 1) / WARPGROUPS;
constexpr int PLANE = PLANE_PIXELS * 16, HIDDEN_PLANE = HIDDEN_PIXELS * 16, OUT_PLANE = OUT_PLANE_PIXELS * 16;  // bytes of an octet
constexpr int OUT_PITCH = RESIDUAL ? PITCH : STRIPS * TILE_WIDTH, OUT_ORIGIN = RESIDUAL ? PITCH + 1 : 0;
constexpr int OUT_IMAGE = RESIDUAL ? IMAGE_PIXELS : BRICK_HEIGHT * OUT_PITCH, OUT_OCTET = RESIDUAL ? PLANE : OUT_PLANE;
constexpr int TILE_STEP = STRIDE * TILE_ROWS, TAP_ROWS = TILE_STEP * (TILES - 1) + 3;
constexpr int SECOND_TAP = STRIDE == 2 ? HALF_ROW : 1, THIRD_TAP = STRIDE == 2 ? 1 : 2;
constexpr int SECOND_HALF = NARROW ? STRIDE * PITCH : 8;                   // from a tile's first 8 pixels to the others
constexpr int SHARES = SPLIT * GROUPS;                                     // of a brick's hidden channels
constexpr int LEFT = HALVES && !NARROW ? 2 : 1, RIGHT = NARROW ? 0 : HALVES ? 1 : 8;  // column of a tile: LEFT row + RIGHT half
// A chunk's weights: for the expansion with the sums' beginnings behind; for the projection with the taps and the
// beginnings of the depthwise's sums behind.
constexpr int EXPAND_SUMS = STEPS_IN * CHUNK * 32, EXPAND_BYTES = EXPAND_SUMS + CHUNK * 8;
constexpr int TAPS = OCTETS * CHANNELS_OUT * 16, DEPTHWISE_SUMS = TAPS + OCTETS * 384;
constexpr int PROJECT_BYTES = HALVES ? TAPS + STEPS * 320 : DEPTHWISE_SUMS + CHUNK * 8;
static_assert(WARPS_EACH * IMAGES <= GROUP_WARPS && GROUP_WARPS % 4 == 0, "whole warpgroups, and tiles for all positions");
static_assert(TURNS <= 16, "two bits for each tile of pixels");
static_assert(OCTETS_EACH * PRODUCTS == OCTETS_OUT, "products of the projection of one size");

struct Place {
    int lane, row, pair;          // row of an 8×8 fragment; pair of its columns
    int group, warp, warpgroup;   // the warp and its warpgroup within their group
    int image, strip, first_row;  // of the warp's output tiles; image IMAGES: it has none
};
struct Brick {
    int image, top, left;         // of the output; the first of its images
};

DEVICE Place place_of() {
    Place at;
    const int thread = threadIdx.x;
    at.lane = thread & 31;
    at.row = at.lane >> 2;
    at.pair = at.lane & 3;
    at.group = GROUPS == 1 ? 0 : shuffle(thread / GROUP_THREADS, 0);
    at.warp = (thread >> 5) - at.group * GROUP_WARPS;
    // Known to be one for the warp: addresses in uniform registers.
    at.warpgroup = GROUPS > 1 && WARPGROUPS == 1 ? 0 : shuffle(thread >> 7, 0) - at.group * WARPGROUPS;
    at.image = at.warp / WARPS_EACH;
    const int within = at.warp % WARPS_EACH;
    at.strip = within % STRIPS;
    at.first_row = within / STRIPS * BAND;
    return at;
}

DEVICE int rank_of() { return SPLIT == 1 ? 0 : block_index() % SPLIT; }

// The block's first brick; its only one unless AHEAD.
DEVICE int first_brick() { return block_index() / SPLIT; }

DEVICE Brick brick_of(const Arguments& a, int number) {
    const int row = number / a.bricks[2], images = row / a.bricks[1];
    return {images * IMAGES, (row - images * a.bricks[1]) * BRICK_HEIGHT, (number - row * a.bricks[2]) * BRICK_WIDTH};
}

// The column of the brick's input at place q of a row, and the other way round.
DEVICE int column_at(int q) { return STRIDE == 1 ? q : q < HALF_ROW ? 2 * q : 2 * (q - HALF_ROW) + 1; }
DEVICE int place_in_row(int column) { return STRIDE == 1 ? column : (column & 1) * HALF_ROW + (column >> 1); }

// Rows of the brick's input that lie in the image: from the first to behind the last.
DEVICE int first_inside(const Brick& brick) { return brick.top == 0 ? 1 : 0; }
DEVICE int last_inside(const Arguments& a, const Brick& brick) {
    const int rest = a.size[1] - (brick.top * STRIDE - 1);
    return rest < ROWS ? rest : ROWS;
}

// Brings the pixels inside of the image; what is made of others is not kept.
DEVICE void load_input(const Arguments& a, const Place& at, int number, u32 input) {
    const Brick brick = brick_of(a, number);
    const int top = brick.top * STRIDE - 1, left = brick.left * STRIDE - 1, height = a.size[1], width = a.size[2];
    const int begin = brick.left == 0 ? 1 : 0, rest = width - left, last = last_inside(a, brick);
    const int count = ((rest < PITCH ? rest : PITCH) - begin) * OCTETS_IN;
    for (int image = 0; image < IMAGES && brick.image + image < a.batch; image++) {
        for (int r = first_inside(brick) + at.group * GROUP_WARPS + at.warp; r < last; r += WARPS) {
            const u64 first = ((u64)(brick.image + image) * height + top + r) * width + left + begin;
            const u16* from = (const u16*)a.input + first * CHANNELS_IN + at.lane * 8;
            const u32 to = input + (image * IMAGE_PIXELS + r * PITCH) * 16;
            Walk<OCTETS_IN> walk(at.lane);
            for (int j = at.lane; j < count; j += 32, from += 32 * 8, walk.next())
                copy_async(to + place_in_row(begin + walk.pixel) * 16 + walk.octet * PLANE, from, true);
        }
    }
    if (OCTETS_IN % 2)  // the last step of the expansion has half the channels
        for (int i = threadIdx.x; i < PLANE_PIXELS; i += THREADS)
            store_shared_4(input + OCTETS_IN * PLANE + i * 16, uint4{0, 0, 0, 0});
    copy_commit();
}

// Of the tiles of 64 pixels that the warpgroup expands: their first byte in an octet, NOWHERE where there is none, and
// in bits 2 i + h whether pixel 8 h + row of the warp's 16 of the i-th one lies outside of the image.
constexpr u32 NOWHERE = ~0u;
struct Expanded {
    u32 start[TURNS], outside;
    u32 stored[TURNS];  // of a pixel for store_matrix_4; behind all others where the tile goes on behind the image's rows
};
DEVICE void find_expanded(const Arguments& a, const Place& at, int number, Expanded& to) {
    const Brick brick = brick_of(a, number);
    const int first = first_inside(brick), tiles = ((last_inside(a, brick) - first) * PITCH + 63) / 64;
    to.outside = 0;
    UNROLL for (int i = 0; i < TURNS; i++) {
        const int tile = at.warpgroup + i * WARPGROUPS, image = tile / tiles;
        const int start = first * PITCH + (tile - image * tiles) * 64;
        to.start[i] = image < IMAGES ? (image * IMAGE_PIXELS + start) * 16 : NOWHERE;
        const int own = start + (at.warp & 3) * 16 + (at.lane & 15);
        to.stored[i] = (own < IMAGE_PIXELS ? image * IMAGE_PIXELS + own : HIDDEN_PIXELS - 1) * 16 + (at.lane >> 4) * HIDDEN_PLANE;
        UNROLL for (int h = 0; h < 2; h++) {
            const int pixel = start + (at.warp & 3) * 16 + 8 * h + at.row;
            const int y = brick.top * STRIDE - 1 + pixel / PITCH, x = brick.left * STRIDE - 1 + column_at(pixel % PITCH);
            if (pixel >= IMAGE_PIXELS || (u32)y >= (u32)a.size[1] || (u32)x >= (u32)a.size[2]) to.outside |= 1u << (2 * i + h);
        }
    }
}

DEVICE u32 group_thread(const Place& at) { return GROUPS == 1 ? threadIdx.x : threadIdx.x - at.group * GROUP_THREADS; }
DEVICE void group_sync(const Place& at) {
    if (GROUPS == 1) block_sync();
    else named_sync(1 + at.group, GROUP_THREADS);
}

// What is not expanded is zero in both buffers of the group.
DEVICE void clear_hidden(const Arguments& a, const Place& at, int number, u32 hidden) {
    const Brick brick = brick_of(a, number);
    if (first_inside(brick) == 0 && last_inside(a, brick) == ROWS) return;
    for (int i = group_thread(at) * 16; i < 2 * OCTETS * HIDDEN_PLANE; i += GROUP_THREADS * 16) store_shared_4(hidden + i, uint4{0, 0, 0, 0});
}

DEVICE void load_sum_shared(u32 from, int channel, float (&sum)[4]) {
    const uint4 v = load_shared_4(from + channel * 8);
    sum[0] = float_of(v.x);
    sum[1] = float_of(v.y);
    sum[2] = float_of(v.z);
    sum[3] = float_of(v.w);
}

// Begins the expansion of 64 pixels; it runs on its own until the next wait.
DEVICE void begin_expanding(const Place& at, u32 pixels_at, u32 weights, float (&sum)[OCTETS][4]) {
    UNROLL for (int j = 0; j < OCTETS; j++) load_sum_shared(weights + EXPAND_SUMS, j * 8 + 2 * at.pair, sum[j]);
    const u64 pixels = plain_matrix(pixels_at, PLANE, 128), given = plain_matrix(weights, CHUNK * 16, 128);
    group_fence();
    UNROLL for (int k = 0; k < STEPS_IN; k++)
        wgmma<Element, CHUNK>(sum, matrix_behind(pixels, k * (2 * PLANE)), matrix_behind(given, k * (CHUNK * 32)));
    group_commit();
}
DEVICE void end_expanding(u32 to, u32 bits, float (&sum)[OCTETS][4]) {
    group_settle(sum);
    UNROLL for (int j = 0; j < OCTETS; j += 2) {
        u32 made[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float* pair = &sum[j + i / 2][i % 2 * 2];
            made[i] = activate<EXPAND_ACTIVATION, Hidden>(pair[0], pair[1], bits >> (i & 1) & 1);
        }
        store_matrix_4(to + j * HIDDEN_PLANE, made[0], made[1], made[2], made[3]);
    }
}

// Depthwise convolution of 8 hidden channels: two of the four registers of an operand, for each of the warp's tiles.
// Lanes that hold nothing of a diagonal read their taps from zeros.
DEVICE void depthwise_octet(u32 taps, u32 sums, u32 pairs, u32 thirds, const Place& at, u32 (&result)[TILES][4], int half) {
    u32 tap[12];
    UNROLL for (int i = 0; i < 3; i++) {
        const uint4 w = load_shared_4(taps + i * 128);
        tap[4 * i] = w.x;
        tap[4 * i + 1] = w.y;
        tap[4 * i + 2] = w.z;
        tap[4 * i + 3] = w.w;
    }
    float begin[4], sum[TILES][4];
    load_sum_shared(sums, 2 * at.pair, begin);
    UNROLL for (int r = 0; r < TAP_ROWS; r++) {
        if (TILE_STEP == 4 && r % 4 == 3) continue;  // no tap of any tile begins in this row
        u32 pixels[4];
        load_matrix_4(pixels, pairs + r * (PITCH * 16));
        UNROLL for (int dy = 0; dy < 3; dy++) {
            const int tile = (r - dy) / TILE_STEP;
            if (r < dy || (r - dy) % TILE_STEP || tile >= TILES) continue;
            multiply(dy == 0, sum[tile], pixels, tap[3 * dy], tap[3 * dy + 1], begin);
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
        result[j][2 * half] = activate<DEPTHWISE_ACTIVATION>(sum[j][0], sum[j][1], false);
        result[j][2 * half + 1] = activate<DEPTHWISE_ACTIVATION>(sum[j][2], sum[j][3], false);
    }
}

// Memory and barriers of a group, and which of the chunks are its own: share, share + SHARES, … They come once for each of
// its bricks, n counts them all.
struct Weights {
    const char* from;
    u32 expand, project, barriers;
    int share, count;

    DEVICE u32 expand_at(int n) const { return expand + (n & 1) * EXPAND_BYTES; }
    DEVICE u32 project_at(int n) const { return project + (n & 1) * PROJECT_BYTES; }
    DEVICE void bring_expand(int n) const {
        if (n >= count) return;
        const u32 barrier = barriers + (n & 1) * 8;
        barrier_expect(barrier, EXPAND_BYTES);
        copy_bulk(expand_at(n), from + EXPAND_AT + (share + n % OWN_CHUNKS * SHARES) * EXPAND_BYTES, EXPAND_BYTES, barrier);
    }
    DEVICE void bring_project(int n) const {
        if (n >= count) return;
        const u32 barrier = barriers + 16 + (n & 1) * 8;
        barrier_expect(barrier, PROJECT_BYTES);
        copy_bulk(project_at(n), from + PROJECT_AT + (share + n % OWN_CHUNKS * SHARES) * PROJECT_BYTES, PROJECT_BYTES, barrier);
    }
    DEVICE void wait_expand(int n) const { barrier_wait_copied(barriers + (n & 1) * 8, n >> 1 & 1); }
    DEVICE void wait_project(int n) const { barrier_wait_copied(barriers + 16 + (n & 1) * 8, n >> 1 & 1); }
};

using Sums = float[TILES][PRODUCTS][OCTETS_EACH][4];

// Depthwise of 16 hidden channels of a chunk: an operand of the projection for each of the warp's tiles.
DEVICE void depthwise_step(const Place& at, u32 hidden, u32 weights, u32 zeros, int step, u32 (&pixels)[TILES][4]) {
    const bool diagonal = at.pair == at.row >> 1;
    const int image = at.image < IMAGES ? at.image : 0;
    const int pixel = image * IMAGE_PIXELS + at.first_row * STRIDE * PITCH + at.strip * TILE_WIDTH + (at.lane & 7) +
                      (at.lane >> 3 & 1) * SECOND_HALF;
    const u32 pairs = hidden + (pixel + (at.lane >> 4) * SECOND_TAP) * 16;          // columns 0 and 1
    const u32 thirds = hidden + (pixel + THIRD_TAP + (at.lane >> 4) * PITCH) * 16;  // column 2 of two rows
    UNROLL for (int half = 0; half < 2; half++) {
        const int octet = 2 * step + half;
        const u32 taps = diagonal ? weights + TAPS + octet * 384 + at.row * 16 : zeros;
        depthwise_octet(taps, weights + DEPTHWISE_SUMS + octet * 64, pairs + octet * HIDDEN_PLANE, thirds + octet * HIDDEN_PLANE, at, pixels, half);
    }
}
// The same in halves: a lane's channels 4 pair … of the 16. Taps and then the beginning of the sums, four channels each.
DEVICE void depthwise_halves(const Place& at, u32 hidden, u32 weights, int step, u32 (&pixels)[TILES][4]) {
    constexpr int HIGH = BAND, SIDE = NARROW ? 1 : 2, COLUMNS = STRIDE * (SIDE - 1) + 3;  // outputs of a lane
    const int image = at.image < IMAGES ? at.image : 0;
    const int pixel = image * IMAGE_PIXELS + at.first_row * STRIDE * PITCH + at.strip * TILE_WIDTH + LEFT * at.row;
    const u32 from = hidden + (2 * step + (at.pair >> 1)) * HIDDEN_PLANE + pixel * 16 + (at.pair & 1) * 8;
    u32 tap[10][2], sum[HIGH][SIDE][2];
    UNROLL for (int i = 0; i < 5; i++) {
        const uint4 w = load_shared_4(weights + TAPS + step * 320 + at.pair * 80 + i * 16);
        tap[2 * i][0] = w.x;
        tap[2 * i][1] = w.y;
        tap[2 * i + 1][0] = w.z;
        tap[2 * i + 1][1] = w.w;
    }
    UNROLL for (int r = 0; r < STRIDE * (HIGH - 1) + 3; r++) {
        uint2 column[COLUMNS];
        UNROLL for (int c = 0; c < COLUMNS; c++) column[c] = load_shared_2(from + (r * PITCH + place_in_row(c)) * 16);
        UNROLL for (int y = 0; y < HIGH; y++) {
            const int dy = r - STRIDE * y;
            if (dy < 0 || dy > 2) continue;
            UNROLL for (int x = 0; x < SIDE; x++) UNROLL for (int dx = 0; dx < 3; dx++) {
                const uint2 given = column[STRIDE * x + dx];
                const u32(&by)[2] = tap[3 * dy + dx];
                u32(&to)[2] = sum[y][x];
                const bool first = dy == 0 && dx == 0;
                to[0] = multiply_add_halves(given.x, by[0], first ? tap[9][0] : to[0]);
                to[1] = multiply_add_halves(given.y, by[1], first ? tap[9][1] : to[1]);
            }
        }
    }
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < 4; i++)
        pixels[j][i] = relu6_halves(NARROW ? sum[2 * j + (i & 1)][0][i >> 1] : sum[j][i & 1][i >> 1]);
}
// Begins the projection of them.
DEVICE void begin_projecting(u32 weights, int step, const u32 (&pixels)[TILES][4], Sums& out) {
    const u64 given = plain_matrix(weights, CHANNELS_OUT * 16, 128);
    group_fence();
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < PRODUCTS; i++)
        wgmma<Hidden, 8 * OCTETS_EACH>(out[j][i], pixels[j],
                                        matrix_behind(given, step * (CHANNELS_OUT * 32) + i * (OCTETS_EACH * 128)));
    group_commit();
}

// The output of one octet of one of the warp's tiles, put where it leaves from; `staged` is that octet's place.
DEVICE void stage(const Place& at, u32 staged, int tile, const float (&sum)[4]) {
    UNROLL for (int h = 0; h < 2; h++) {
        const int y = at.first_row + tile * TILE_ROWS + (NARROW ? h : 0);
        const int x = at.strip * TILE_WIDTH + LEFT * at.row + RIGHT * h;
        if (x >= BRICK_WIDTH || y >= BRICK_HEIGHT || at.image >= IMAGES) continue;
        const u32 there = staged + (at.image * OUT_IMAGE + OUT_ORIGIN + y * OUT_PITCH + x) * 16 + at.pair * 4;
        const u32 added = RESIDUAL ? load_shared(there) : 0;
        const float low = sum[2 * h] + Element::low(added), high = sum[2 * h + 1] + Element::high(added);
        store_shared(there, activate<PROJECT_ACTIVATION>(low, high, false));
    }
}

// Adds up the sums of all shares for the channels that are this block's, and puts them where they leave from.
DEVICE void add_shares(const Place& at, int rank, u32 scratch, u32 staged, Sums& out) {
    constexpr u32 SUMS = TILES * OCTETS_OUT * GROUP_THREADS * 16;  // bytes of a group's
    const u32 first = scratch + group_thread(at) * 16, mine = first + at.group * SUMS;
    if (GROUPS > 1) block_sync();  // they lie where other groups had hidden channels and weights
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < OCTETS_OUT; i++) {
        const float(&one)[4] = out[j][i / OCTETS_EACH][i % OCTETS_EACH];
        store_shared_4(mine + (j * OCTETS_OUT + i) * (GROUP_THREADS * 16),
                       uint4{bits_of(one[0]), bits_of(one[1]), bits_of(one[2]), bits_of(one[3])});
    }
    if (SPLIT > 1) cluster_sync();
    else block_sync();
    const bool wanted = at.image < IMAGES && at.strip * TILE_WIDTH + LEFT * at.row < BRICK_WIDTH;  // else nothing of the lane is
    UNROLL for (int j = 0; j < TILES; j++) UNROLL_2 for (int i = at.group; i < OCTETS_OWN; i += GROUPS) {
        const int octet = rank * OCTETS_OWN + i;
        if (octet >= OCTETS_OUT || !wanted) break;
        uint4 given[SHARES];
        UNROLL for (int r = 0; r < SHARES; r++) {
            const u32 from = first + r % GROUPS * SUMS + (j * OCTETS_OUT + octet) * (GROUP_THREADS * 16);
            given[r] = SPLIT > 1 ? load_cluster_4(from, r / GROUPS) : load_shared_4(from);
        }
        float sum[4] = {};
        UNROLL for (int r = 0; r < SHARES; r++) {
            sum[0] += float_of(given[r].x);
            sum[1] += float_of(given[r].y);
            sum[2] += float_of(given[r].z);
            sum[3] += float_of(given[r].w);
        }
        stage(at, staged + (RESIDUAL ? octet : i) * OUT_OCTET, j, sum);
    }
    if (SPLIT > 1) cluster_arrive();
}

DEVICE void store_output(const Arguments& a, const Place& at, int number, int rank, u32 staged) {
    const Brick brick = brick_of(a, number);
    const int height = a.out[1], width = a.out[2], first = rank * OCTETS_OWN;
    const int rest_y = height - brick.top, rest_x = width - brick.left;
    const int rows = rest_y < BRICK_HEIGHT ? rest_y : BRICK_HEIGHT;
    const int count = (rest_x < BRICK_WIDTH ? rest_x : BRICK_WIDTH) * OCTETS_OWN;
    for (int image = 0; image < IMAGES && brick.image + image < a.batch; image++) {
        for (int r = at.group * GROUP_WARPS + at.warp; r < rows; r += WARPS) {
            const u64 pixel = ((u64)(brick.image + image) * height + brick.top + r) * width + brick.left;
            u16* row = (u16*)a.output + pixel * CHANNELS_OUT + first * 8;
            const u32 from = staged + (RESIDUAL ? first * OUT_OCTET : 0) + (image * OUT_IMAGE + OUT_ORIGIN + r * OUT_PITCH) * 16;
            Walk<OCTETS_OWN> walk(at.lane);
            for (int j = at.lane; j < count; j += 32, walk.next())
                if (first + walk.octet < OCTETS_OUT)
                    *(uint4*)(row + walk.pixel * CHANNELS_OUT + walk.octet * 8) =
                        load_shared_4(from + walk.pixel * 16 + walk.octet * OUT_OCTET);
        }
    }
}

// From a brick's input in shared memory, where it is when all have met, to its output in global memory. `n` chunks were
// taken before.
DEVICE void compute_brick(const Arguments& a, const Place& at, int number, const Weights& weights, int n, u32 input, u32 next) {
    const u32 base = weights.barriers - at.group * 32, zeros = base + 128;
    const u32 buffers = base + HIDDEN_AT + at.group * (2 * OCTETS * HIDDEN_PLANE);
    const bool leader = group_thread(at) == 0;
    clear_hidden(a, at, number, buffers);
    Expanded expanded;
    find_expanded(a, at, number, expanded);
    Sums out;
    UNROLL for (int i = 0; i < OCTETS_OUT; i++) {
        float begin[4];
        load_sum(a, PROJECT_BIAS_AT, i * 8 + 2 * at.pair, begin);
        UNROLL for (int j = 0; j < TILES; j++)
            UNROLL for (int q = 0; q < 4; q++) out[j][i / OCTETS_EACH][i % OCTETS_EACH][q] = weights.share == 0 ? begin[q] : 0.f;
    }
    copy_wait<0>();
    fence_async();
    block_sync();
    if (AHEAD && number + a.blocks < a.count) load_input(a, at, number + a.blocks, next);
    weights.wait_expand(n);
    UNROLL for (int i = 0; i < TURNS; i++) {
        if (expanded.start[i] == NOWHERE) continue;
        float sum[OCTETS][4];
        begin_expanding(at, input + expanded.start[i], weights.expand_at(n), sum);
        group_wait<0>();
        end_expanding(buffers + expanded.stored[i], expanded.outside >> (2 * i), sum);
    }
    group_sync(at);
    if (leader) weights.bring_expand(n + 2);
    u32 hidden = buffers, other = buffers + OCTETS * HIDDEN_PLANE;
    NO_UNROLL for (int left = OWN_CHUNKS - 1; left >= 0; left--, n++) {
        const bool more = left > 0;
        weights.wait_project(n);
        if (more) weights.wait_expand(n + 1);
        UNROLL for (int s = 0; s < STEPS || s < TURNS; s++) {
            float sum[OCTETS][4];
            u32 pixels[TILES][4];
            const bool expands = s < TURNS && more && expanded.start[s < TURNS ? s : 0] != NOWHERE;
            if (expands) begin_expanding(at, anew(input + expanded.start[s < TURNS ? s : 0]), weights.expand_at(n + 1), sum);
            if (s < STEPS && HALVES) depthwise_halves(at, hidden, weights.project_at(n), s, pixels);
            else if (s < STEPS) depthwise_step(at, hidden, weights.project_at(n), zeros, s, pixels);
            group_wait<0>();
            if (s < STEPS) begin_projecting(weights.project_at(n), s, pixels, out);
            if (expands) end_expanding(other + expanded.stored[s < TURNS ? s : 0], expanded.outside >> (2 * s), sum);
        }
        group_wait<0>();
        // Here and not behind the loop: there it costs a copy of all sums in each turn.
        UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < PRODUCTS; i++) group_settle(out[j][i]);
        group_sync(at);
        if (leader) {
            if (more) weights.bring_expand(n + 3);
            weights.bring_project(n + 2);
        }
        const u32 last = hidden;
        hidden = other;
        other = last;
    }
    if (SHARES > 1) add_shares(at, weights.share / GROUPS, base + HIDDEN_AT, input, out);
    else UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int i = 0; i < OCTETS_OUT; i++)
        stage(at, input + i * OUT_OCTET, j, out[j][i / OCTETS_EACH][i % OCTETS_EACH]);
    block_sync();
    store_output(a, at, number, weights.share / GROUPS, input);
    if (SPLIT > 1) cluster_wait();  // nobody leaves while others read its shared memory
}

DEVICE void inverted_residual(const Arguments& a) {
    if (EARLY) {
        launch_next();
        wait_previous();
    }
    const Place at = place_of();
    const u32 base = shared_base(), barriers = base + at.group * 32;
    const u32 expand = base + HIDDEN_AT + GROUPS * (2 * OCTETS * HIDDEN_PLANE) + at.group * (2 * (EXPAND_BYTES + PROJECT_BYTES));
    const int bricks = AHEAD ? (a.count - first_brick() + a.blocks - 1) / a.blocks : 1;
    const Weights weights{(const char*)a.weights, expand, expand + 2 * EXPAND_BYTES, barriers,
                          rank_of() * GROUPS + at.group, bricks * OWN_CHUNKS};
    if (group_thread(at) == 0) {
        for (int i = 0; i < 4; i++) barrier_start(barriers + i * 8, 1);
        fence_async();
        for (int n = 0; n < 2; n++) weights.bring_expand(n), weights.bring_project(n);
    }
    u32 input = base + INPUT_AT, next = input + 2 * STEPS_IN * PLANE;
    load_input(a, at, first_brick(), input);
    if (threadIdx.x < 24) store_shared_4(base + 128 + threadIdx.x * 16, uint4{0, 0, 0, 0});
    if (!AHEAD) return compute_brick(a, at, first_brick(), weights, 0, input, next);
    NO_UNROLL for (int number = first_brick(), n = 0; number < a.count; number += a.blocks, n += OWN_CHUNKS) {
        compute_brick(a, at, number, weights, n, input, next);
        const u32 last = input;
        input = next;
        next = last;
    }
}
