// Rows of a 3×3 (×3) convolution on fragments: a warp makes 16 neighbouring pixels of row after row.
//
// A field holds a block of pixels of one tensor in shared memory: [pixel][16-byte chunk of channels], the chunks of a
// pixel swizzled so that eight neighbouring pixels' chunks of one number lie in different banks. All fields of a brick
// have the same pitch, so a tap is a constant distance. The pitch is a multiple of 8: the swizzle of a column is the
// same in all rows. A step is 32 bytes of channels: 16 of 16 bits (m16n8k16) or 8 of 32 bits (m16n8k8).
#pragma once
enum Activation { NONE, RELU, RELU6, LEAKY };
enum Residual { NOTHING, SHARED, GLOBAL };
constexpr float LEAKY_SLOPE = 0.1f;  // joulemark.merged.sequence's

template <int ACTIVATION> DEVICE float activated(float v) {
    if constexpr (ACTIVATION == LEAKY) return v > 0.f ? v : v * LEAKY_SLOPE;
    if constexpr (ACTIVATION != NONE) v = v > 0.f ? v : 0.f;
    if constexpr (ACTIVATION == RELU6) v = v < 6.f ? v : 6.f;
    return v;
}
// Two numbers of 16 bits.
template <class T, int ACTIVATION> DEVICE u32 packed(float low, float high) {
    if constexpr (ACTIVATION == NONE || ACTIVATION == LEAKY) return T::pack(activated<ACTIVATION>(low), activated<ACTIVATION>(high));
    const u32 made = T::pack_relu(low, high);
    return ACTIVATION == RELU6 ? T::minimum_6(made) : made;
}

constexpr DEVICE int swizzle_group(int chunks) { return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1; }
// Byte offset of a chunk of a pixel.
template <int CHUNKS> DEVICE u32 offset(int pixel, int chunk) {
    constexpr int GROUP = swizzle_group(CHUNKS);
    return pixel * CHUNKS * 16 + ((chunk ^ ((pixel / (8 / GROUP)) & (GROUP - 1))) << 4);
}
// The address of the chunk that lies `chunks` (even) behind the one at `address`, of the same pixel.
template <int CHUNKS> DEVICE u32 further(u32 address, int chunks) {
    constexpr int GROUP = swizzle_group(CHUNKS);
    return (address ^ ((chunks % GROUP) << 4)) + (chunks / GROUP * GROUP << 4);
}

// 16 pixels × one step. fp32 is the sum of two tf32 numbers; of their four products the smallest is left out.
template <class T> struct Fragment {
    u32 words[4];
    DEVICE void load(u32 at) { load_matrix_4(words, at); }
    DEVICE void multiply(float (&d)[4], const u32* b) const { T::mma(d, words, b[0], b[1]); }
    DEVICE void multiply_from(float (&d)[4], const u32* b, float c0, float c1) const { T::mma_from(d, words, b[0], b[1], c0, c1); }
};
template <> struct Fragment<fp32> {
    u32 high[4], low[4];
    DEVICE void load(u32 at) {
        u32 words[4];
        load_matrix_4(words, at);
        UNROLL for (int i = 0; i < 4; i++) {
            high[i] = tf32::round(float_of(words[i]));
            low[i] = tf32::round(float_of(words[i]) - float_of(high[i]));
        }
    }
    DEVICE void multiply(float (&d)[4], const u32* b) const {
        tf32::mma(d, low, b[0], b[1]);
        tf32::mma(d, high, b[2], b[3]);
        tf32::mma(d, high, b[0], b[1]);
    }
};


// Weights of the output channels that a warp makes, of one layer Y (a generated struct of constants): in registers
// where they fit, else fetched through L1 group by group. Packed as [word / 4][lane][word % 4]; a word's number counts
// (group, row, tile, word of the fragment), a group is (plane, step, column) and a multiple of four words.
template <class T> constexpr int FRAGMENT_WORDS = 2;
template <> constexpr int FRAGMENT_WORDS<fp32> = 4;
template <class Y> struct Weights {
    static constexpr int EACH = FRAGMENT_WORDS<typename Y::T>;
    static constexpr int GROUP = (3 * Y::TILES * EACH + 3) / 4 * 4;  // of one (plane, step, column)
    static constexpr int QUADS = Y::PLANES * Y::STEPS * 3 * GROUP / 4;
    u32 words[Y::RESIDENT ? QUADS * 4 : GROUP];
    const uint4* packed;

    DEVICE void fetch(int first, int quads) {
        UNROLL for (int i = 0; i < quads; i++) {
            const uint4* at = packed + (first + i) * 32;
            const uint4 four = Y::RESIDENT ? load_global_4(at) : load_again_4(at);
            words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
        }
    }
    DEVICE void start(const Arguments& a, int split, int lane) {
        packed = (const uint4*)((const char*)a.weights + Y::WEIGHTS) + split * QUADS * 32 + lane;
        if constexpr (Y::RESIDENT) fetch(0, QUADS);
    }
    DEVICE const u32* group(int number) {
        if constexpr (Y::RESIDENT) return words + number * GROUP;
        fetch(number * (GROUP / 4), GROUP / 4);
        return words;
    }
};

template <class Y> DEVICE u32 stored_word(float v) {
    // What the next layer's tf32 instruction reads is rounded here, where the instruction itself would cut it off.
    if constexpr (FRAGMENT_WORDS<typename Y::T> == 2 && !Y::LAST) return tf32::round(v);
    return bits_of(v);
}

template <class Y> constexpr int PADDED_CHANNELS = Y::OUT * 16 / Y::T::bytes;
// The words that a lane holds of one pixel: 2 · TILES neighbouring channels, contiguous in memory.
template <class Y> constexpr int PIECE = Y::T::bytes == 2 ? Y::TILES : 2 * Y::TILES;
template <int N> DEVICE void load_piece(u32 (&w)[N], u32 at) {
    if constexpr (N == 1) w[0] = load_shared(at);
    if constexpr (N == 2) {
        const uint2 two = load_shared_2(at);
        w[0] = two.x, w[1] = two.y;
    }
    if constexpr (N >= 4) UNROLL for (int i = 0; i < N; i += 4) {
        const uint4 four = load_shared_4(at ^ (i * 4));
        w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
    }
}
template <int N> DEVICE void store_piece(u32 at, const u32 (&w)[N]) {
    if constexpr (N == 1) store_shared(at, w[0]);
    if constexpr (N == 2) store_shared_2(at, w[0], w[1]);
    if constexpr (N >= 4) UNROLL for (int i = 0; i < N; i += 4) store_shared_4(at ^ (i * 4), uint4{w[i], w[i + 1], w[i + 2], w[i + 3]});
}
// Of a tensor in global memory only the channels below `C` of `PADDED` exist; whole pieces where the alignment allows it.
template <class T, int N, int C, int PADDED> struct GlobalPiece {
    static constexpr int PER_WORD = 4 / T::bytes;
    static constexpr bool WHOLE = C % (N * PER_WORD) == 0;
    DEVICE static void load(u32 (&w)[N], const char* pixel, int channel) {
        const char* at = pixel + channel * T::bytes;
        UNROLL for (int i = 0; i < N; i++) w[i] = 0;
        if (C < PADDED && channel >= C) return;
        if constexpr (WHOLE && N >= 4) UNROLL for (int i = 0; i < N; i += 4) {
            const uint4 four = ((const uint4*)at)[i / 4];
            w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
        }
        else if constexpr (WHOLE) UNROLL for (int i = 0; i < N; i++) w[i] = ((const u32*)at)[i];
        else UNROLL for (int i = 0; i < N; i++) {
            UNROLL for (int e = 0; e < PER_WORD; e++) {
                if (channel + i * PER_WORD + e >= C) continue;
                if constexpr (PER_WORD == 1) w[i] = ((const u32*)at)[i];
                else w[i] |= (u32)((const u16*)at)[i * 2 + e] << (16 * e);
            }
        }
    }
    DEVICE static void store(char* pixel, int channel, const u32 (&w)[N]) {
        char* at = pixel + channel * T::bytes;
        if (C < PADDED && channel >= C) return;
        if constexpr (WHOLE && N >= 4) UNROLL for (int i = 0; i < N; i += 4) ((uint4*)at)[i / 4] = uint4{w[i], w[i + 1], w[i + 2], w[i + 3]};
        else if constexpr (WHOLE && N == 2) *(uint2*)at = uint2{w[0], w[1]};
        else if constexpr (WHOLE) *(u32*)at = w[0];
        else UNROLL for (int i = 0; i < N; i++) {
            UNROLL for (int e = 0; e < PER_WORD; e++) {
                if (channel + i * PER_WORD + e >= C) continue;
                if constexpr (PER_WORD == 1) ((u32*)at)[i] = w[i];
                else ((u16*)at)[i * 2 + e] = (u16)(w[i] >> (16 * e));
            }
        }
    }
};

// Sums of one pixel (half 0: row g of the fragment, 1: row g + 8) → words: activation and residual, stored format.
template <class Y> DEVICE void finish(u32 (&w)[PIECE<Y>], const float (&d)[Y::TILES][4], int half, const u32* added) {
    using T = typename Y::T;
    UNROLL for (int j = 0; j < Y::TILES; j++) {
        float low = d[j][2 * half], high = d[j][2 * half + 1];
        if constexpr (Y::ADDS_BEHIND) low = activated<Y::ACTIVATION>(low), high = activated<Y::ACTIVATION>(high);
        constexpr int NEXT = Y::ADDS_BEHIND ? NONE : Y::ACTIVATION;
        if constexpr (T::bytes == 2) {
            if (added) low += T::low(added[j]), high += T::high(added[j]);
            w[j] = packed<T, NEXT>(low, high);
        } else {
            if (added) low += float_of(added[2 * j]), high += float_of(added[2 * j + 1]);
            w[2 * j] = stored_word<Y>(activated<NEXT>(low)), w[2 * j + 1] = stored_word<Y>(activated<NEXT>(high));
        }
    }
}

// A field's rows, one after another, of as many planes as a tap reaches.
template <int PITCH, int PLANE> struct FieldSource {
    u32 at;
    DEVICE u32 row(int plane) const { return at + plane * PLANE; }
    DEVICE void release() { at += PITCH; }
    DEVICE void ahead(int) {}
};

// One warp's rows of 16 columns, of layer Y.
//
// Y: T, IN (chunks), OUT (chunks), CHANNELS (of the output, as stored globally), STEPS, SPLITS, TILES, PLANES (taps of
// depth), ACTIVATION, RESIDUAL, ADDS_BEHIND (the activation, not before it), LAST, LEVEL (layers up to this one), WEIGHTS
// and BIAS (byte offsets), RESIDENT, SEGMENTS (warps that share a plane's rows), SOURCE, TARGET, ADDED (byte offsets of fields).
// F: DEPTH, HEIGHT, WIDTH (of the field), GUARD (pixels before and behind), WARPS, LEVELS (layers of the chain).
template <class Y, class F> struct Rows {
    using T = typename Y::T;
    using Sums = float[Y::TILES][4];
    static constexpr int ROW_IN = F::WIDTH * Y::IN * 16, ROW_OUT = F::WIDTH * Y::OUT * 16;
    static constexpr int PLANE_IN = F::HEIGHT * ROW_IN;

    Weights<Y> weights;
    float bias[Y::TILES][2];
    int channel;  // the lane's first
    int lane, split;
    u32 column[3];  // of the taps to the left, in the middle, to the right: byte offsets in a row

    DEVICE void start(const Arguments& a, int warp) {
        lane = threadIdx.x & 31, split = warp % Y::SPLITS;
        channel = (split * 4 + (lane & 3)) * 2 * Y::TILES;
        weights.start(a, split, lane);
        const char* from = (const char*)a.weights + Y::BIAS + channel * 4;
        UNROLL for (int j = 0; j < Y::TILES; j++) UNROLL for (int i = 0; i < 2; i++) bias[j][i] = load_float(from + (2 * j + i) * 4);
    }

    // Adds an input row to the sums of up to three output rows: the last of `done`, the middle of `middle`, the first of
    // `fresh`. The source says where the row lies in a plane, and hears when it has been read.
    template <bool DONE, bool MIDDLE, bool FRESH, class Source> DEVICE void step(Sums& done, Sums& middle, Sums& fresh, Source& source) {
        constexpr int EACH = Weights<Y>::EACH;
        UNROLL for (int plane = 0; plane < Y::PLANES; plane++) {
            const u32 row = source.row(plane);
            UNROLL for (int k = 0; k < Y::STEPS; k++) {
                Fragment<T> pixels[3];
                UNROLL for (int dx = 0; dx < 3; dx++) pixels[dx].load(further<Y::IN>(row + column[dx], 2 * k));
                if (plane == Y::PLANES - 1 && k == Y::STEPS - 1) source.release();
                if constexpr (EACH == 4) add_exactly<DONE, MIDDLE, FRESH>(done, middle, fresh, pixels, plane, k);
                else UNROLL for (int dx = 0; dx < 3; dx++) {
                    const u32* w = weights.group((plane * Y::STEPS + k) * 3 + dx);
                    UNROLL for (int j = 0; j < Y::TILES; j++) {
                        if constexpr (DONE) pixels[dx].multiply(done[j], w + (2 * Y::TILES + j) * EACH);
                        if constexpr (MIDDLE) pixels[dx].multiply(middle[j], w + (Y::TILES + j) * EACH);
                        if constexpr (!FRESH) continue;
                        if (plane + k + dx == 0) pixels[dx].multiply_from(fresh[j], w + j * EACH, bias[j][0], bias[j][1]);
                        else pixels[dx].multiply(fresh[j], w + j * EACH);
                    }
                }
            }
        }
    }

    // fp32: the matrix instruction cuts its sums off where an addition rounds, so a step's products have sums of their own.
    template <bool DONE, bool MIDDLE, bool FRESH>
    DEVICE void add_exactly(Sums& done, Sums& middle, Sums& fresh, const Fragment<T> (&pixels)[3], int plane, int k) {
        constexpr int EACH = Weights<Y>::EACH;
        constexpr bool WANTED[3] = {FRESH, MIDDLE, DONE};
        Sums part[3] = {};
        UNROLL for (int dx = 0; dx < 3; dx++) {
            const u32* w = weights.group((plane * Y::STEPS + k) * 3 + dx);
            UNROLL for (int row = 0; row < 3; row++) UNROLL for (int j = 0; j < Y::TILES; j++)
                if (WANTED[row]) pixels[dx].multiply(part[row][j], w + (row * Y::TILES + j) * EACH);
        }
        UNROLL for (int j = 0; j < Y::TILES; j++) UNROLL for (int i = 0; i < 4; i++) {
            if constexpr (DONE) done[j][i] += part[2][j][i];
            if constexpr (MIDDLE) middle[j][i] += part[1][j][i];
            if constexpr (FRESH) fresh[j][i] = (plane + k ? fresh[j][i] : bias[j][i % 2]) + part[0][j][i];
        }
    }

    // `count` output rows of the 16 columns from `x0`, out of count + 2 rows of the source.
    template <class Source, class Sink> DEVICE void run(Source& source, Sink& sink, int count, int x0) {
        UNROLL for (int dx = 0; dx < 3; dx++) column[dx] = offset<Y::IN>(F::GUARD + x0 + (lane & 15) + dx - 1, lane >> 4);
        Sums x, y, z;
        source.ahead(2);  // so many rows will be asked for
        step<false, false, true>(z, z, x, source);
        step<false, true, true>(z, x, y, source);
        if (count == 1) {
            source.ahead(1);
            step<true, false, false>(x, z, z, source);
            sink.store(x);
            return;
        }
        int left = count - 2;
        NO_UNROLL for (; left >= 3; left -= 3) {
            source.ahead(3);
            step<true, true, true>(x, y, z, source);
            sink.store(x);
            step<true, true, true>(y, z, x, source);
            sink.store(y);
            step<true, true, true>(z, x, y, source);
            sink.store(z);
        }
        NO_UNROLL for (; left > 0; left--) {
            source.ahead(1);
            step<true, true, true>(x, y, z, source);
            sink.store(x);
            UNROLL for (int j = 0; j < Y::TILES; j++) UNROLL for (int i = 0; i < 4; i++) x[j][i] = y[j][i], y[j][i] = z[j][i];
        }
        source.ahead(2);
        step<true, true, false>(x, y, z, source);
        sink.store(x);
        step<true, false, false>(y, z, z, source);
        sink.store(y);
    }
};
