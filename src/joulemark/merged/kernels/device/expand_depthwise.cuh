// 1×1 expansion and depthwise convolution: the front of an inverted residual whose hidden channels something else reads,
// as squeeze-and-excitation does. A block makes one brick; the expanded tensor stays in shared memory.
//
// The constants in capitals stand in front of this text, with expansion.cuh; expand_depthwise.py writes them, and packs
// the hidden channels of two octets such that a lane's results are 4 neighbouring ones: they leave from registers, 32
// contiguous bytes of a pixel from four lanes.
// GROUPS groups of warps share the brick's input and take the chunks in turns; PARTS blocks share a brick likewise.

constexpr int OCTETS = HIDDEN / 8;

// Bit 2 j + h tells that the position of the lane's half h of the warp's tile j is one of the output's.
DEVICE u32 inside_bits(const Arguments& a, const Place& at, const Brick& brick) {
    u32 bits = 0;
    UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int h = 0; h < 2; h++) {
        const int y = at.first_row + j * TILE_ROWS + (NARROW ? h : 0);
        const int x = at.strip * TILE_WIDTH + at.row + (NARROW ? 0 : 8 * h);
        if (x < BRICK_WIDTH && brick.left + x < a.out[2] && brick.top + y < a.out[1]) bits |= 1u << (2 * j + h);
    }
    return bits;
}

// Clears the warp's tiles of pixels in rows outside of the image, in all its buffers; they stay so. A bit for each.
DEVICE u32 clear_outside(const Arguments& a, const Place& at, const Brick& brick, u32 buffers) {
    const int top = brick.top * STRIDE - WINDOW / 2;
    u32 cleared = 0;
    NO_UNROLL for (int i = 0; i < TURNS; i++) {
        const int first = (at.warp + i * WARPS) * 16;
        if (first >= PIXEL_TILES * 16 || (top + (first + 15) / PITCH >= 0 && top + first / PITCH < a.size[1])) continue;
        cleared |= 1u << i;
        for (int j = at.lane >> 4; j < 4 * BUFFERS; j += 2)
            store_shared_4(buffers + j * PLANE + (first + (at.lane & 15)) * 16, uint4{0, 0, 0, 0});
    }
    return cleared;
}

DEVICE void expand_depthwise(const Arguments& a) {
    const Place at = place_of();
    const Brick brick = brick_of(a, first_brick());
    const u32 input = shared_base(), buffers = input + 2 * STEPS_IN * PLANE;
    u32 hidden = buffers + at.group * (BUFFERS * 4 * PLANE), other = hidden + (BUFFERS - 1) * 4 * PLANE;
    load_input(a, at, first_brick(), input);
    const u32 outside = outside_bits(a, at, first_brick()), inside = inside_bits(a, at, brick);
    const u32 cleared = clear_outside(a, at, brick, hidden);
    const int width = a.out[2], y = brick.top + at.first_row, x = brick.left + at.strip * TILE_WIDTH + at.row;
    const int second = (NARROW ? width : 8) * HIDDEN, next = TILE_ROWS * width * HIDDEN;  // to a half, to a tile
    u16* out = (u16*)a.output + (((u64)brick.image * a.out[1] + y) * width + x) * HIDDEN + at.pair * 4;
    copy_wait<0>();
    block_sync();
    NO_UNROLL for (int chunk = part_of() + at.group * PARTS; chunk < CHUNKS; chunk += GROUPS * PARTS) {
        // With two buffers the barrier of the last chunk has shown that nobody reads this one any more.
        if (BUFFERS == 1) named_sync(1 + at.group, WARPS * 32);
        expand_chunk(a, at, input, hidden, chunk, outside, cleared);
        named_sync(1 + at.group, WARPS * 32);
        NO_UNROLL for (int s = 0; s < 2; s++) {
            u32 made[2][TILES][2];
            UNROLL for (int i = 0; i < 2; i++)
                depthwise_octet(a, at, hidden + (2 * s + i) * PLANE, chunk * 4 + 2 * s + i, made[i]);
            if (chunk * 4 + 2 * s + (at.pair >> 1) >= OCTETS) continue;
            UNROLL for (int j = 0; j < TILES; j++) UNROLL for (int h = 0; h < 2; h++)
                if (inside >> (2 * j + h) & 1)
                    *(uint2*)(out + chunk * 32 + s * 16 + j * next + h * second) = uint2{made[0][j][h], made[1][j][h]};
        }
        if (BUFFERS == 2) {
            const u32 last = hidden;
            hidden = other;
            other = last;
        }
    }
}
