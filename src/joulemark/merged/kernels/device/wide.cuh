// Two layers of 64 channels in streamed rows, each by a warpgroup that keeps its weights in registers (wgmma).
//
// A group is ROWS rows of 32 pixels, the N of one matrix product: D[64 channels, ROWS · 32 pixels]; a tap is a shift of the
// operand's start in shared memory. Groups go from the loading warps through a ring to layer 1, through a second ring to
// layer 2, and out. Both rings hold four groups, and once more their last row before the first and their first behind the
// last, so that a shifted operand stays in one piece. Group −1 and the one behind the last hold the rows of the halo.
// Waiting goes one way as in stream.cuh: a layer that makes group j has read groups up to j + 1 and gives back j − 1.
#pragma once

template <class F, int START, int BARRIERS> struct WideRing {  // offsets in shared memory
    static constexpr int SLOTS = 4, ROW = 32 * 128, ROWS = SLOTS * F::ROWS, BYTES = (ROWS + 2) * ROW;
    u32 shared;
    DEVICE u32 rows() const { return shared + START + ROW; }
    DEVICE u32 full(int number) const { return shared + BARRIERS + number % SLOTS * 8; }
    DEVICE u32 empty(int number) const { return shared + BARRIERS + SLOTS * 8 + number % SLOTS * 8; }
    DEVICE void start(int writers, int readers) const {
        for (int i = 0; i < SLOTS; i++) barrier_start(full(i), writers), barrier_start(empty(i), readers);
    }
    DEVICE void wait_full(int number) const { barrier_wait(full(number), number / SLOTS & 1); }
    DEVICE void wait_empty(int number) const {
        if (number >= SLOTS) barrier_wait(empty(number), (number / SLOTS - 1) & 1);
    }
    DEVICE void filled(int number) const { barrier_arrive(full(number)); }
    DEVICE void give_back(int number) const { barrier_arrive(empty(number)); }
    // Calls act(address of the row) for a group's row and for its second place, where it has one.
    template <class Act> DEVICE void each_place(int number, int row, Act act) const {
        const int place = number % SLOTS * F::ROWS + row;
        act(rows() + place * ROW);
        if (place == 0) act(rows() + ROWS * ROW);
        if (place == ROWS - 1) act(rows() - ROW);
    }
};

template <class F> struct Wide {
    using T = typename F::T;
    static constexpr int N = F::ROWS * 32, GUARD = 1024, ROW = 32 * 128, BYTES = (4 * F::ROWS + 2) * ROW;
    const Arguments& a;
    WideRing<F, 2 * GUARD, 0> input;
    WideRing<F, 3 * GUARD + BYTES, 64> middle;
    u32 staged;
    int groups, image;  // of the present brick
    int y0, x0;

    DEVICE Wide(const Arguments& a) : a(a), input{shared_base()}, middle{shared_base()}, staged(shared_base() + 4 * GUARD + 2 * BYTES) {}
    DEVICE void open(int brick) {
        x0 = brick % a.bricks[2] * F::TILE_WIDTH - 2, brick /= a.bricks[2];
        y0 = brick % a.bricks[1] * F::TILE_HEIGHT, image = brick / a.bricks[1];
        const int left = a.size[1] - y0, rows = left < F::TILE_HEIGHT ? left : F::TILE_HEIGHT;
        groups = (rows + F::ROWS - 1) / F::ROWS;
    }

    // Warps that bring the input: a row each at a time; a group is announced when the next one is under way.
    DEVICE void load(int warp) {
        const bool first = (threadIdx.x & 31) == 0;
        int number = 0;
        for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            for (int j = -1; j <= groups; j++, number++) {
                input.wait_empty(number);
                NO_UNROLL for (int r = warp; r < F::ROWS; r += 4) {
                    const int y = y0 + j * F::ROWS + r;
                    const bool there = within(y, a.size[1]);
                    const char* from = pixel_of(a.input, a, image, 0, there ? y : 0, 0, F::TAKEN * T::bytes);
                    NO_UNROLL for (int part = 0; part < 8; part++)  // few registers are left to these warps
                        input.each_place(number, r, [&](u32 to) { load_pixels<T, F::TAKEN, 8, 8, F>(from, there, x0, a.size[2], to, part); });
                }
                copy_commit();
                if (number == 0) continue;
                announce<1>(number - 1, first);
            }
        }
        if (number) announce<0>(number - 1, first);
    }
    template <int PENDING> DEVICE void announce(int number, bool first) {
        copy_wait<PENDING>();
        fence_async();
        warp_sync();
        if (first) input.filled(number);
    }

    // D = bias + Σ over taps and steps of weights · shifted pixels.
    template <class Ring> DEVICE void multiply(float (&d)[N / 2], const u32 (&weights)[36][4], const Ring& ring, int number, float b0, float b1) {
        UNROLL for (int j = 0; j < N / 8; j++) d[4 * j] = d[4 * j + 1] = b0, d[4 * j + 2] = d[4 * j + 3] = b1;
        const u32 group = ring.rows() + number % 4 * F::ROWS * ROW;
        group_fence();
        UNROLL for (int tap = 0; tap < 9; tap++) UNROLL for (int k = 0; k < 4; k++)
            wgmma<T, N>(d, weights[tap * 4 + k], matrix_descriptor(group + (tap / 3 - 1) * ROW + (tap % 3 - 1) * 128 + k * 32));
        group_finish();
    }
    DEVICE void take_weights(u32 (&weights)[36][4], int layer, int warp) {
        const char* from = (const char*)a.weights + layer * F::LAYER_BYTES + (warp * 32 + (threadIdx.x & 31)) * 16;
        UNROLL for (int i = 0; i < 36; i++) {
            const uint4 four = load_global_4(from + i * 4 * 32 * 16);
            weights[i][0] = four.x, weights[i][1] = four.y, weights[i][2] = four.z, weights[i][3] = four.w;
        }
    }
    DEVICE float bias(int layer, int warp, int half) {
        const int channel = warp * 16 + (threadIdx.x >> 2 & 7) + 8 * half;
        return load_float((const char*)a.weights + layer * F::LAYER_BYTES + F::BIAS + channel * 4);
    }
    template <int ACTIVATION> DEVICE static u32 pair(float low, float high) {
        if constexpr (ACTIVATION == NONE) return T::pack(low, high);
        const u32 made = T::pack_relu(low, high);
        return ACTIVATION == RELU6 ? T::minimum_6(made) : made;
    }
    // Where a lane's matrix of two times eight pixels goes in a row, when stored transposed.
    DEVICE static u32 transposed_place(int warp) {
        const int lane = threadIdx.x & 31, matrix = lane >> 3;
        return offset<8>(matrix / 2 * 8 + (lane & 7), 2 * warp + matrix % 2);
    }

    DEVICE void first_layer(int warp) {
        u32 weights[36][4];
        take_weights(weights, 0, warp);
        const float b0 = bias(0, warp, 0), b1 = bias(0, warp, 1);
        const u32 place = transposed_place(warp);
        int number = 0;
        float d[N / 2];
        for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            for (int j = -1; j <= groups; j++, number++) {
                const int y = y0 + j * F::ROWS;
                middle.wait_empty(number);
                if (j == -1) input.wait_full(number);
                if (j < groups) input.wait_full(number + 1);
                const bool outside = y + F::ROWS <= 0 || y >= a.size[1];
                if (!outside) multiply(d, weights, input, number, b0, b1);
                UNROLL for (int r = 0; r < F::ROWS; r++) UNROLL for (int half = 0; half < 2; half++) {
                    u32 w[4];
                    UNROLL for (int m = 0; m < 4; m++) {
                        const int tile = r * 4 + half * 2 + m / 2, x = x0 + (half * 2 + m / 2) * 8 + 2 * (threadIdx.x & 3);
                        u32 kept = within(y + r, a.size[1]) && !outside ? 0xffffffffu : 0u;
                        if (!within(x, a.size[2])) kept &= 0xffff0000u;
                        if (!within(x + 1, a.size[2])) kept &= 0x0000ffffu;
                        w[m] = kept ? pair<F::FIRST_ACTIVATION>(d[4 * tile + 2 * (m % 2)], d[4 * tile + 2 * (m % 2) + 1]) & kept : 0u;
                    }
                    middle.each_place(number, r, [&](u32 to) { store_matrix_4t(to + half * 2048 + place, w[0], w[1], w[2], w[3]); });
                }
                fence_async();
                middle.filled(number);
                if (j >= 0) input.give_back(number - 1);
                if (j == groups) input.give_back(number);
            }
        }
    }

    DEVICE void second_layer(int warp) {
        u32 weights[36][4];
        take_weights(weights, 1, warp);
        const float b0 = bias(1, warp, 0), b1 = bias(1, warp, 1);
        const u32 place = transposed_place(warp);
        constexpr int STAGED = F::RESIDUAL == NOTHING ? F::LAST_ACTIVATION : NONE;
        int number = 0;
        float d[N / 2];
        for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            middle.wait_full(number);
            middle.wait_full(number + 1);
            number++;
            for (int k = 0; k < groups; k++, number++) {
                middle.wait_full(number + 1);
                multiply(d, weights, middle, number, b0, b1);
                middle.give_back(number - 1);
                if (k == groups - 1) middle.give_back(number), middle.give_back(number + 1);
                named_sync(1, 128);  // the group before has been copied out
                UNROLL for (int r = 0; r < F::ROWS; r++) UNROLL for (int half = 0; half < 2; half++) {
                    u32 w[4];
                    UNROLL for (int m = 0; m < 4; m++) {
                        const int tile = r * 4 + half * 2 + m / 2;
                        w[m] = pair<STAGED>(d[4 * tile + 2 * (m % 2)], d[4 * tile + 2 * (m % 2) + 1]);
                    }
                    store_matrix_4t(staged + r * ROW + half * 2048 + place, w[0], w[1], w[2], w[3]);
                }
                named_sync(1, 128);
                copy_out(y0 + k * F::ROWS);
            }
            number++;
        }
    }

    DEVICE void copy_out(int y) {
        using Out = GlobalPiece<T, 4, F::CHANNELS, 64>;
        const int bottom = y0 + F::TILE_HEIGHT < a.size[1] ? y0 + F::TILE_HEIGHT : a.size[1];
        NO_UNROLL for (int item = threadIdx.x & 127; item < F::ROWS * 32 * 8; item += 128) {
            const int pixel = item / 8, chunk = item % 8, row = y + pixel / 32, q = pixel % 32, x = x0 + q;
            if (q < 2 || q >= 2 + F::TILE_WIDTH || row >= bottom || x >= a.size[2]) continue;
            u32 w[4];
            load_piece(w, staged + offset<8>(pixel, chunk));
            if constexpr (F::RESIDUAL == GLOBAL) {
                u32 other[4];
                Out::load(other, pixel_of(F::ADDS_INPUT ? a.input : a.residual, a, image, 0, row, x, F::CHANNELS * T::bytes), chunk * 8);
                UNROLL for (int i = 0; i < 4; i++)
                    w[i] = pair<F::LAST_ACTIVATION>(T::low(w[i]) + T::low(other[i]), T::high(w[i]) + T::high(other[i]));
            }
            Out::store((char*)pixel_of(a.output, a, image, 0, row, x, F::CHANNELS * T::bytes), chunk * 8, w);
        }
    }
};

template <class F> DEVICE void wide(const Arguments& a) {
    Wide<F> run(a);
    if (threadIdx.x == 0) {
        run.input.start(4, 128);
        run.middle.start(128, 128);
        fence_async();
    }
    block_sync();
    const int warp = threadIdx.x >> 5;
    if (warp >= 8) {
        registers_down<24>();
        run.load(warp - 8);
    } else {
        registers_up<240>();
        if (warp < 4) run.first_layer(warp);
        else run.second_layer(warp - 4);
    }
}
