// Layers of 16, 32 or 64 channels in streamed rows, each by a warpgroup that keeps its weights in registers (wgmma).
//
// The 64 rows of a product are PACKED = 64 / CHANNELS output rows times the channels; its N columns are the pixels of
// PAIRS rows, every PACKED-th row of the image. One operand holds the weights for PACKED + 2 input rows, zeros where an
// input row does not reach an output row; the other is the pixels, where a tap is a shift of the start in shared memory.
// A group is PACKED · PAIRS rows. Groups go from the loading warps through a ring to layer 1, through a second ring to
// layer 2, and so on. A ring holds four groups, row r of a group in plane r mod PACKED: so the rows of one operand are
// neighbours. The first plane has its first row once more behind its last, the last plane its last row before its first:
// so a shifted operand stays in one piece. Group −1 and the one behind the last hold the rows of the halo.
// Waiting goes one way as in stream.cuh: a layer that makes group j has read groups up to j + 1 and gives back j − 1.
#pragma once

template <class F> struct WideRing {
    static constexpr int SLOTS = 4, PER_PLANE = SLOTS * F::PAIRS, ROW = F::WIDTH * F::CHANNELS * 2;
    static constexpr int PLANE = (PER_PLANE + 2) * ROW;
    u32 start, barriers;  // of the first plane's row −1

    DEVICE u32 full(int number) const { return barriers + number % SLOTS * 8; }
    DEVICE u32 empty(int number) const { return barriers + (SLOTS + number % SLOTS) * 8; }
    DEVICE void prepare(int writers, int readers) const {
        for (int i = 0; i < SLOTS; i++) barrier_start(full(i), writers), barrier_start(empty(i), readers);
    }
    DEVICE void wait_full(int number) const { barrier_wait(full(number), number / SLOTS & 1); }
    DEVICE void wait_empty(int number) const {
        if (number >= SLOTS) barrier_wait(empty(number), (number / SLOTS - 1) & 1);
    }
    DEVICE void filled(int number) const { barrier_arrive(full(number)); }
    DEVICE void give_back(int number) const { barrier_arrive(empty(number)); }
    // The rows PACKED · pair + row − 1 of a group for all its pairs, row 0 … PACKED + 1: where those of row 0 would be in the
    // first plane, and how far behind it those of a row are.
    DEVICE u32 operand(int number) const { return start + number % SLOTS * (F::PAIRS * ROW); }
    DEVICE static constexpr int distance(int row) {
        return (row + F::PACKED - 1) % F::PACKED * PLANE + (row + F::PACKED - 1) / F::PACKED * ROW;
    }
    // Rows that products of weights of zero read before a group has come there: finite, since NaN · 0 is no zero.
    DEVICE void clear() const {
        constexpr int CHUNKS = ROW / 16;
        for (int i = threadIdx.x; i < (SLOTS + 2) * CHUNKS; i += F::THREADS) {
            const int row = i / CHUNKS;  // the first of the last plane; of the first plane those with which slots begin
            const u32 first = row == 0 ? (F::PACKED - 1) * PLANE : ((row - 1) * F::PAIRS + 1) * ROW;
            store_shared_4(start + first + i % CHUNKS * 16, uint4{0, 0, 0, 0});
        }
    }
    // Calls act(address) for the place of a group's row, and for its second place where it has one.
    template <class Act> DEVICE void each_place(int number, int row, Act act) const {
        const int plane = row % F::PACKED, place = number % SLOTS * F::PAIRS + row / F::PACKED;
        const u32 first = start + plane * PLANE;
        act(first + (place + 1) * ROW);
        if (plane == 0 && place == 0) act(first + (PER_PLANE + 1) * ROW);
        if (plane == F::PACKED - 1 && place == PER_PLANE - 1) act(first);
    }
};

template <class F> struct Wide {
    using T = typename F::T;
    using Ring = WideRing<F>;
    static constexpr int N = F::PAIRS * F::WIDTH, ROWS = F::PAIRS * F::PACKED, STEPS = F::CHANNELS / 16;
    static constexpr int FRAGMENTS = (F::PACKED + 2) * 3 * STEPS, CHUNKS = F::CHANNELS / 8;
    using Fragments = u32[FRAGMENTS][4];
    using Sums = float[N / 8][4];
    const Arguments& a;
    u32 shared;
    int groups, image, y0, x0;  // of the present brick

    DEVICE Wide(const Arguments& a) : a(a), shared(shared_base()) {}
    template <int TENSOR> DEVICE Ring ring() const { return {shared + F::RINGS + TENSOR * F::RING_BYTES, shared + TENSOR * 64}; }
    DEVICE u32 staged() const { return shared + F::STAGED; }
    DEVICE void open(int brick) {
        x0 = brick % a.bricks[2] * F::TILE_WIDTH - F::LEVELS, brick /= a.bricks[2];
        y0 = brick % a.bricks[1] * F::TILE_HEIGHT, image = brick / a.bricks[1];
        const int left = a.size[1] - y0, rows = left < F::TILE_HEIGHT ? left : F::TILE_HEIGHT;
        groups = (rows + ROWS - 1) / ROWS;
    }

    // Warps that bring the input: a row each at a time; a group is announced when the next one is under way.
    DEVICE void load(int warp) {
        const Ring input = ring<0>();
        constexpr int UNITS = F::WIDTH * CHUNKS / 32;
        int number = 0;
        for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            for (int j = -1; j <= groups; j++, number++) {
                input.wait_empty(number);
                NO_UNROLL for (int r = warp; r < ROWS; r += 4) {
                    const int y = y0 + j * ROWS + r;
                    const bool there = within(y, a.size[1]);
                    const char* from = pixel_of(a.input, a, image, 0, there ? y : 0, 0, F::TAKEN * T::bytes);
                    NO_UNROLL for (int unit = 0; unit < UNITS; unit++)  // few registers are left to these warps
                        input.each_place(number, r, [&](u32 to) { load_pixels<T, F::TAKEN, CHUNKS, UNITS, F>(from, there, x0, a.size[2], to, unit); });
                }
                copy_commit();
                if (number) announce<1>(input, number - 1);
            }
        }
        if (number) announce<0>(input, number - 1);
    }
    template <int PENDING> DEVICE void announce(const Ring& input, int number) {
        copy_wait<PENDING>();
        fence_async();
        warp_sync();
        if ((threadIdx.x & 31) == 0) input.filled(number);
    }

    // D = bias + Σ over input rows, columns of taps and steps of weights · shifted pixels.
    DEVICE void multiply(Sums& d, const Fragments& weights, const Ring& ring, int number, const float (&bias)[2]) {
        UNROLL for (int i = 0; i < N / 2; i++) d[i / 4][i % 4] = bias[i / 2 % 2];
        const u64 pixels = matrix_descriptor<F::CHANNELS * 2>(ring.operand(number) - F::CHANNELS * 2);
        group_fence();
        UNROLL for (int row = 0; row < F::PACKED + 2; row++) UNROLL for (int dx = 0; dx < 3; dx++) UNROLL for (int k = 0; k < STEPS; k++)
            wgmma<T, N>(d, weights[(row * 3 + dx) * STEPS + k],
                        matrix_behind(pixels, Ring::distance(row) + dx * F::CHANNELS * 2 + k * 32));
        group_commit();
        group_finish(d);
    }
    DEVICE void take_weights(Fragments& weights, float (&bias)[2], int layer, int warp) {
        const int lane = threadIdx.x & 31;
        const char* from = (const char*)a.weights + layer * F::LAYER_BYTES;
        UNROLL for (int i = 0; i < FRAGMENTS; i++) {
            const uint4 four = load_global_4(from + ((i * 4 + warp) * 32 + lane) * 16);
            weights[i][0] = four.x, weights[i][1] = four.y, weights[i][2] = four.z, weights[i][3] = four.w;
        }
        UNROLL for (int h = 0; h < 2; h++)
            bias[h] = load_float(from + FRAGMENTS * 2048 + (warp % STEPS * 16 + (lane >> 2) + 8 * h) * 4);
    }
    // Where a lane's matrix of two times eight pixels goes in a row, when stored transposed.
    DEVICE static u32 transposed_place(int warp) {
        const int lane = threadIdx.x & 31, matrix = lane >> 3;
        return offset<CHUNKS>(matrix / 2 * 8 + (lane & 7), 2 * (warp % STEPS) + matrix % 2);
    }
    // Calls act(row of the group, first of 16 pixels, words) for all that a warp has made.
    template <int ACTIVATION, class Act> DEVICE void each_piece(const Sums& d, int warp, Act act) {
        UNROLL for (int p = 0; p < F::PAIRS; p++) UNROLL for (int q = 0; q < F::WIDTH; q += 16) {
            u32 w[4];
            UNROLL for (int m = 0; m < 4; m++) {
                const int tile = (p * F::WIDTH + q) / 8 + m / 2;
                w[m] = packed<T, ACTIVATION>(d[tile][2 * (m % 2)], d[tile][2 * (m % 2) + 1]);
            }
            act(p * F::PACKED + warp / STEPS, q, w);
        }
    }

    // A layer before the last: from ring LAYER into the next, zeros outside of the image.
    template <int LAYER, int ACTIVATION> DEVICE void inner_layer(int warp) {
        const Ring input = ring<LAYER>(), output = ring<LAYER + 1>();
        Fragments weights;
        float bias[2];
        take_weights(weights, bias, LAYER, warp);
        const u32 place = transposed_place(warp);
        int number = 0;
        Sums d;
        for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            const bool edge = x0 < 0 || x0 + F::WIDTH > a.size[2];
            for (int j = -1; j <= groups; j++, number++) {
                const int y = y0 + j * ROWS;
                output.wait_empty(number);
                if (j == -1) input.wait_full(number);
                if (j < groups) input.wait_full(number + 1);
                const bool outside = y + ROWS <= 0 || y >= a.size[1];
                if (!outside) multiply(d, weights, input, number, bias);
                each_piece<ACTIVATION>(d, warp, [&](int r, int q, u32 (&w)[4]) {
                    const bool row_inside = !outside && within(y + r, a.size[1]);
                    UNROLL for (int m = 0; m < 4; m++) {
                        u32 kept = row_inside ? 0xffffffffu : 0u;
                        if (edge) {
                            const int x = x0 + q + m / 2 * 8 + 2 * (threadIdx.x & 3);
                            if (!within(x, a.size[2])) kept &= 0xffff0000u;
                            if (!within(x + 1, a.size[2])) kept &= 0x0000ffffu;
                        }
                        w[m] = kept ? w[m] & kept : 0u;
                    }
                    output.each_place(number, r, [&](u32 to) { store_matrix_4t(to + q * F::CHANNELS * 2 + place, w[0], w[1], w[2], w[3]); });
                });
                fence_async();
                output.filled(number);
                if (j >= 0) input.give_back(number - 1);
                if (j == groups) input.give_back(number);
            }
        }
    }

    template <int LAYER> DEVICE void last_layer(int warp) {
        const Ring input = ring<LAYER>();
        Fragments weights;
        float bias[2];
        take_weights(weights, bias, LAYER, warp);
        const u32 place = transposed_place(warp);
        constexpr int STAGED = F::RESIDUAL == NOTHING || F::ADDS_BEHIND ? F::LAST_ACTIVATION : NONE;
        int number = 0;
        Sums d;
        for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            input.wait_full(number);
            input.wait_full(number + 1);
            number++;
            for (int k = 0; k < groups; k++, number++) {
                input.wait_full(number + 1);
                multiply(d, weights, input, number, bias);
                input.give_back(number - 1);
                if (k == groups - 1) input.give_back(number), input.give_back(number + 1);
                named_sync(1, 128);  // the group before has been copied out
                each_piece<STAGED>(d, warp, [&](int r, int q, const u32 (&w)[4]) {
                    store_matrix_4t(staged() + r * Ring::ROW + q * F::CHANNELS * 2 + place, w[0], w[1], w[2], w[3]);
                });
                named_sync(1, 128);
                copy_out(y0 + k * ROWS);
            }
            number++;
        }
    }
    DEVICE void copy_out(int y) {
        constexpr int BYTES = F::MADE * T::bytes;
        using Out = GlobalPiece<T, 4, F::MADE, F::CHANNELS>;
        const int bottom = y0 + F::TILE_HEIGHT < a.size[1] ? y0 + F::TILE_HEIGHT : a.size[1];
        // Four at a time where a piece is one store: its loads and stores wait less for each other.
        _Pragma("unroll (F::MADE % 8 ? 1 : 4)") for (int item = threadIdx.x & 127; item < ROWS * F::WIDTH * CHUNKS; item += 128) {
            const int pixel = item / CHUNKS, chunk = item % CHUNKS, row = y + pixel / F::WIDTH, q = pixel % F::WIDTH, x = x0 + q;
            if (q < F::LEVELS || q >= F::LEVELS + F::TILE_WIDTH || row >= bottom || x >= a.size[2]) continue;
            u32 w[4];
            load_piece(w, staged() + offset<CHUNKS>(pixel, chunk));
            if constexpr (F::RESIDUAL == GLOBAL) {
                constexpr int NEXT = F::ADDS_BEHIND ? NONE : F::LAST_ACTIVATION;
                u32 other[4];
                Out::load(other, pixel_of(F::ADDS_INPUT ? a.input : a.residual, a, image, 0, row, x, BYTES), chunk * 8);
                UNROLL for (int i = 0; i < 4; i++)
                    w[i] = packed<T, NEXT>(T::low(w[i]) + T::low(other[i]), T::high(w[i]) + T::high(other[i]));
            }
            Out::store((char*)pixel_of(a.output, a, image, 0, row, x, BYTES), chunk * 8, w);
        }
    }
};
