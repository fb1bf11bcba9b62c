// The first convolution of a network by products of warpgroups: up to four channels, or 16, up to eight taps in a row, and
// stride 2 there.
//
// A product's 64 rows are output channels, of which there may be twice as many, its columns pixels of the output, its depth
// a row of taps. Lines of the image lie in shared memory with four channels of 16 bits, a pixel in 8 bytes: at stride 2
// neighbouring outputs begin 16 bytes apart, and so do the next two taps. Without swizzle a matrix of 16-bit numbers, depth
// innermost, is made of blocks of 8 rows × 16 bytes in 128 contiguous bytes, each at a distance of its own from the one for
// the next 8 rows and the one for the next 8 numbers (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout":
// stride and leading dimension byte offsets). Here these are 128 and 16 bytes: blocks overlap, and nothing is copied to
// gather the taps.
//
// Of 16 channels a tap is a product's depth. Even columns of a line lie apart from odd ones, and octets of channels from each
// other, OCTET_BYTES on: so at stride 2 neighbouring outputs want neighbours again, of 16 bytes each.
//
// A line has PITCH times 16 bytes, a multiple of 128, and lines whose numbers have the same rest by the stride follow each
// other: so do a product's columns from one output line into the next. Products go TILE_WIDTH, rounded up to eights, into
// the last of its lines, and a tap at most 64 bytes further than where its output begins: eight outputs behind the tile
// (PITCH is 8 more) keep all that is read inside the lines of a slot, and bring() writes all of them, zeros outside of the
// image: no product reads what nobody wrote.
//
// At stride 1 FOLD = 2 neighbouring outputs are one of twice the channels: both see the same taps and one more, a product's
// rows are the one's channels, then the other's, and so they lie in the output.
//
// Taps and channels that fill up have weights of zero; with an infinity or a NaN in the image an output beside those that
// see it is none either.
#pragma once
enum FurtherActivation { SILU = LEAKY + 1, HARDSWISH };
template <class T, int ACTIVATION> DEVICE u32 finished(float low, float high) {
    if constexpr (ACTIVATION == SILU)
        return T::pack(.5f * low * (1.f + tanh_fast(.5f * low)), .5f * high * (1.f + tanh_fast(.5f * high)));
    else if constexpr (ACTIVATION == HARDSWISH)
        return T::pack(low * (activated<RELU6>(low + 3.f) / 6.f), high * (activated<RELU6>(high + 3.f) / 6.f));
    else return packed<T, ACTIVATION>(low, high);
}

// Two neighbouring pixels as they come from memory: of three channels in three words, where they begin at one; else as stored.
struct PixelPair { u32 w[4]; };

template <class F> struct Stem {
    using T = typename F::T;
    static constexpr int N = F::COLUMNS, LINE = F::PITCH * 16, CHANNELS = 64 * F::HALVES, PIXEL = F::TAKEN * T::bytes;
    static constexpr int WEIGHT_BYTES = F::TAPS_Y * F::STEPS * CHANNELS * 32;  // of a plane of taps
    using Sums = float[F::HALVES][N / 8][4];
    const Arguments& a;
    u32 shared;
    int image, z, y0, x0, first, last;  // of the present brick, in the output; planes of taps that meet the volume

    DEVICE Stem(const Arguments& a) : a(a), shared(shared_base()) {}
    DEVICE void open(int brick) {
        x0 = brick % a.bricks[2] * F::TILE_WIDTH, brick /= a.bricks[2];
        y0 = brick % a.bricks[1] * F::LINES, brick /= a.bricks[1];
        z = brick % a.bricks[0], image = brick / a.bricks[0];
        first = 0, last = F::PLANES;
        if constexpr (F::PLANES > 1) {
            const int low = z * F::STRIDE_Z - F::PAD_Z;  // of the volume; padding is less than the taps: some plane is in it
            if (low < 0) first = -low;
            if (a.size[0] - low < last) last = a.size[0] - low;
        }
    }

    // Slots: lines for a plane of taps, and its weights where not all of them are resident.
    DEVICE u32 slot(int number) const { return shared + F::SLOT + number % F::SLOTS * F::SLOT_BYTES; }
    DEVICE u32 full(int number) const { return shared + number % F::SLOTS * 8; }
    DEVICE u32 empty(int number) const { return shared + (F::SLOTS + number % F::SLOTS) * 8; }
    DEVICE void prepare() const {
        for (int i = 0; i < F::SLOTS; i++) barrier_start(full(i), F::BRINGERS), barrier_start(empty(i), 128 * F::GROUPS);
    }
    DEVICE void wait_full(int number) const { barrier_wait(full(number), number / F::SLOTS & 1); }
    DEVICE void give_back(int number) const { barrier_arrive(empty(number)); }
    DEVICE u32 weights(int number, int plane) const {
        return F::RESIDENT ? shared + F::WEIGHTS + plane * WEIGHT_BYTES : slot(number) + F::LINE_BYTES;
    }
    template <int THREADS> DEVICE void copy_weights(u32 to, int from, int bytes, int thread) const {
        const char* packed = (const char*)a.weights + from;
        for (int i = thread * 16; i < bytes; i += THREADS * 16) copy_async(to + i, packed + i, true);
        copy_commit();
    }
    // By all threads that multiply: the others bring lines already.
    DEVICE void keep_weights() const {
        if constexpr (F::RESIDENT) {
            copy_weights<128 * F::GROUPS>(shared + F::WEIGHTS, 0, F::PLANES * WEIGHT_BYTES, threadIdx.x);
            copy_wait<0>();
            fence_async();
            named_sync(1 + F::GROUPS, 128 * F::GROUPS);
        }
    }

    // Threads that bring the lines of brick after brick.
    DEVICE void bring(int thread) {
        int number = 0;
        NO_UNROLL for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            NO_UNROLL for (int plane = first; plane < last; plane++, number++) {
                if (number >= F::SLOTS) barrier_wait(empty(number), (number / F::SLOTS - 1) & 1);
                if constexpr (!F::RESIDENT)
                    copy_weights<F::BRINGERS>(slot(number) + F::LINE_BYTES, plane * WEIGHT_BYTES, WEIGHT_BYTES, thread);
                const char* from = pixel_of(a.input, a, image, z * F::STRIDE_Z - F::PAD_Z + plane, 0, 0, PIXEL);
                if constexpr (F::OCTETS > 0) copy_lines(from, slot(number), thread);
                else if (a.size[2] % 2 == 0) bring_lines<true>(from, slot(number), thread);
                else bring_lines<false>(from, slot(number), thread);
                if constexpr (!F::RESIDENT || F::OCTETS > 0) copy_wait<0>();
                fence_async();
                barrier_arrive(full(number));
            }
        }
    }
    // Where a line of the input begins among those of its brick: behind others with the same rest by the stride.
    DEVICE static constexpr int place_of(int row) { return (row % F::STRIDE_Y * F::ROWS_ALIKE + row / F::STRIDE_Y) * LINE; }
    // Lines of octets of channels from the plane that begins at `from`; nothing is read outside of the image.
    DEVICE void copy_lines(const char* from, u32 to, int thread) const {
        constexpr int PIECES = 2 * F::PITCH * F::OCTETS;
        const int top = y0 * F::STRIDE_Y - F::PAD_Y, left = 2 * x0 - F::PAD_X;
        from += ((long long)top * a.size[2] + left) * PIXEL;  // perhaps outside of the tensor
        _Pragma("unroll 4") for (int item = thread; item < F::ROWS * PIECES; item += F::BRINGERS) {
            const int row = item / PIECES, x = item % PIECES / F::OCTETS, octet = item % F::OCTETS;
            const u32 at = to + (x % 2 * F::OCTETS + octet) * F::OCTET_BYTES + place_of(row) + x / 2 * 16;
            const bool there = within(top + row, a.size[1]) && within(left + x, a.size[2]);
            copy_async(at, from + (row * a.size[2] + x) * PIXEL + octet * 16, there);
        }
        copy_commit();
    }
    // Lines from the plane that begins at `from`: pairs of pixels that begin at even columns, so that where lines have even
    // lengths a pair is inside of the image or outside, and begins at a multiple of 4 bytes.
    template <bool EVEN> DEVICE void bring_lines(const char* from, u32 to, int thread) const {
        constexpr int PAIRS = F::PITCH + F::PAD_X % 2, ITEMS = F::ROWS * PAIRS, AT_ONCE = EVEN ? F::AT_ONCE : (F::AT_ONCE + 3) / 4;
        const int top = y0 * F::STRIDE_Y - F::PAD_Y, left = 2 * x0 - F::PAD_X - F::PAD_X % 2;
        from += ((long long)top * a.size[2] + left) * PIXEL;  // perhaps outside of the tensor
        NO_UNROLL for (int begin = thread; begin < ITEMS; begin += AT_ONCE * F::BRINGERS) {
            PixelPair pairs[AT_ONCE];
            UNROLL for (int k = 0; k < AT_ONCE; k++) {
                const int item = begin + k * F::BRINGERS, row = item / PAIRS, x = item % PAIRS * 2;
                const char* at = from + (row * a.size[2] + x) * PIXEL;
                pairs[k] = load_pair<EVEN>(at, left + x, item < ITEMS && within(top + row, a.size[1]));
            }
            UNROLL for (int k = 0; k < AT_ONCE; k++) {
                const int item = begin + k * F::BRINGERS, row = item / PAIRS, pair = item % PAIRS;
                if (item >= ITEMS) continue;
                const u32 at = to + place_of(row) + pair * 16;
                const PixelPair both = spread<EVEN>(pairs[k]);
                const u32 (&w)[4] = both.w;
                if constexpr (F::PAD_X % 2 == 0) store_shared_4(at, uint4{w[0], w[1], w[2], w[3]});
                else {  // half a pair lies before the line, and half a one behind it
                    if (pair > 0) store_shared_2(at - 8, w[0], w[1]);
                    if (pair < F::PITCH) store_shared_2(at, w[2], w[3]);
                }
            }
        }
    }
    // Pixels x and x + 1 of a line, which lie at `at`, zeros where they are outside of it; x is even. Nothing is read that is
    // outside, nor anything of a line that is not there: all reads are inside of the tensor.
    template <bool EVEN> DEVICE PixelPair load_pair(const char* at, int x, bool there) const {
        PixelPair out = {};
        if constexpr (EVEN && F::TAKEN == 4) {
            if (!there || !within(x, a.size[2])) return out;
            const uint4 four = load_global_4(at);
            out.w[0] = four.x, out.w[1] = four.y, out.w[2] = four.z, out.w[3] = four.w;
        } else if constexpr (EVEN && F::TAKEN == 3) {
            if (!there || !within(x, a.size[2])) return out;
            UNROLL for (int i = 0; i < 3; i++) out.w[i] = load_global(at + 4 * i);
        } else UNROLL for (int p = 0; p < 2; p++) {
            if (!there || !within(x + p, a.size[2])) continue;
            UNROLL for (int c = 0; c < F::TAKEN; c++)
                out.w[2 * p + c / 2] |= (u32)((const u16*)at)[p * F::TAKEN + c] << (16 * (c % 2));
        }
        return out;
    }

    // Four channels of each.
    template <bool EVEN> DEVICE static PixelPair spread(const PixelPair& given) {
        const u32 (&w)[4] = given.w;
        if constexpr (EVEN && F::TAKEN == 3) return {{w[0], w[1] & 0xffff, w[1] >> 16 | w[2] << 16, w[2] >> 16}};
        else return given;
    }

    // A warpgroup's lines of brick after brick.
    DEVICE void make(int group, int warp) {
        const int lane = threadIdx.x & 31;
        float bias[2 * F::HALVES];
        UNROLL for (int i = 0; i < 2 * F::HALVES; i++) {
            const int channel = i / 2 * 64 + warp * 16 + (lane >> 2) + i % 2 * 8;
            bias[i] = load_float((const char*)a.weights + F::PLANES * WEIGHT_BYTES + channel * 4);
        }
        keep_weights();
        int number = 0;
        Sums d;
        NO_UNROLL for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
            open(brick);
            NO_UNROLL for (int turn = 0; turn < F::TURNS; turn++) {
                const int line = (turn * F::GROUPS + group) * F::TOGETHER;
                UNROLL for (int half = 0; half < F::HALVES; half++) UNROLL for (int i = 0; i < N / 2; i++)
                    d[half][i / 4][i % 4] = bias[2 * half + i / 2 % 2];
                NO_UNROLL for (int plane = first; plane < last; plane++) {
                    const int present = number + plane - first;
                    wait_full(present);
                    multiply(d, weights(present, plane), slot(present) + line * LINE);
                    if (F::PLANES > 1 && plane > first) {  // and so but one turn: all products but the last ones are done
                        group_wait<1>();
                        give_back(present - 1);
                    }
                }
                UNROLL for (int half = 0; half < F::HALVES; half++) group_finish(d[half]);
                if (turn == F::TURNS - 1) give_back(number + last - first - 1);
                put(d, group, warp, line);
            }
            number += last - first;
        }
    }
    DEVICE void multiply(Sums& d, u32 weights, u32 lines) const {
        const u64 given = plain_matrix(weights, CHANNELS * 16, 128);
        const u64 pixels = plain_matrix(lines, F::OCTETS ? F::OCTET_BYTES : 16, 128);
        group_fence();
        UNROLL for (int tap = 0; tap < F::TAPS_Y; tap++) UNROLL for (int k = 0; k < F::STEPS; k++) {
            const int tap_x = F::OCTETS ? k % 2 * F::OCTETS * F::OCTET_BYTES + k / 2 * 16 : k * 32;
            UNROLL for (int half = 0; half < F::HALVES; half++)
                wgmma<T, N>(d[half], matrix_behind(given, (tap * F::STEPS + k) * CHANNELS * 32 + half * 64 * 16),
                            matrix_behind(pixels, place_of(tap) + tap_x));
        }
        group_commit();
    }
    // Sums into the output, through shared memory: [pixel][channel], 16 pixels of 16 channels of a warp at a time.
    DEVICE void put(const Sums& d, int group, int warp, int line) const {
        const u32 staged = shared + F::STAGED + group * F::STAGED_BYTES;
        const int lane = threadIdx.x & 31, matrix = lane >> 3;
        named_sync(1 + group, 128);  // what was there has been copied out
        UNROLL for (int half = 0; half < F::HALVES; half++) {
            if (half * 64 + warp * 16 >= F::MADE) continue;
            const u32 place = staged + offset<CHANNELS / 8>(matrix / 2 * 8 + (lane & 7), half * 8 + 2 * warp + matrix % 2);
            UNROLL for (int q = 0; q < N; q += 16) {
                u32 w[4] = {};
                UNROLL for (int m = 0; m < 4; m++) {
                    const int tile = q / 8 + m / 2, first = 2 * (m % 2);
                    if (tile < N / 8) w[m] = finished<T, F::ACTIVATION>(d[half][tile][first], d[half][tile][first + 1]);
                }
                store_matrix_4t(place + q * CHANNELS * 2, w[0], w[1], w[2], w[3]);
            }
        }
        named_sync(1 + group, 128);
        copy_out(staged, y0 + line);
    }
    DEVICE void copy_out(u32 staged, int y) const {
        constexpr int CHUNKS = (F::MADE + 7) / 8, OWN = F::MADE / F::FOLD, BYTES = OWN * T::bytes, ITEMS = N * CHUNKS, AT_ONCE = 8;
        using Out = GlobalPiece<T, 4, F::MADE, CHANNELS>;
        char* to = (char*)a.output + ((((size_t)image * a.out[0] + z) * a.out[1] + y) * a.out[2] + x0 * F::FOLD) * BYTES;
        NO_UNROLL for (int begin = threadIdx.x & 127; begin < ITEMS; begin += 128 * AT_ONCE) {
            u32 w[AT_ONCE][4];
            UNROLL for (int k = 0; k < AT_ONCE; k++) {  // loads do not wait for stores
                const int item = begin + k * 128 < ITEMS ? begin + k * 128 : 0;
                load_piece(w[k], staged + offset<CHANNELS / 8>(item / CHUNKS, item % CHUNKS));
            }
            UNROLL for (int k = 0; k < AT_ONCE; k++) {
                const int item = begin + k * 128, pixel = item / CHUNKS, row = pixel / F::PITCH, x = pixel % F::PITCH;
                const int column = (x0 + x) * F::FOLD + (F::FOLD > 1 ? item % CHUNKS * 8 / OWN : 0);
                const bool there = x < F::TILE_WIDTH && column < a.out[2] && y + row < a.out[1] && item < ITEMS;
                if (there) Out::store(to + (u32)(row * a.out[2] + x * F::FOLD) * BYTES, item % CHUNKS * 8, w[k]);
            }
        }
    }
};
