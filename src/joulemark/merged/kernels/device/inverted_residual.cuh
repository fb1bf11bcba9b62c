// Inverted residual: 1×1 expansion, depthwise 3×3, 1×1 projection, and the input added. A block makes one brick.
//
// The constants in capitals stand in front of this text, with expansion.cuh; inverted_residual.py writes them.
//
// A warp keeps the projected channels of its tiles in registers over all hidden channels: the depthwise's result has the
// layout of the next product's operand and never leaves the registers.
// With AHEAD the block is persistent and brings the next brick's input while it computes this one.
// GROUPS groups of warps share the brick's input and take the chunks in turns; their sums are added at the end. Where
// there are few bricks, PARTS blocks make a brick, each a part of its output channels.

constexpr int OCTETS_OUT = CHANNELS_OUT / 8 / PARTS, PAIRS_OUT = (OCTETS_OUT + 1) / 2;
constexpr int OUT_PLANE = OUT_PLANE_PIXELS * 16;  // bytes of an octet of the output
static_assert(PARTS == 1 || CHANNELS_OUT % (16 * PARTS) == 0, "whole pairs of octets in each part");

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
