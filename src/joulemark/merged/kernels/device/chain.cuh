// Padded bricks: a block computes one brick of the output through all layers of a chain; halos are recomputed.
#pragma once

struct Origin {  // of the field's first pixel in the image
    int n, z, y, x;
};
template <class F> DEVICE Origin origin_of(const Arguments& a, int brick) {
    Origin o;
    o.x = brick % a.bricks[2] * F::TILE_WIDTH - F::LEVELS, brick /= a.bricks[2];
    o.y = brick % a.bricks[1] * F::TILE_HEIGHT - F::LEVELS, brick /= a.bricks[1];
    o.z = brick % a.bricks[0] * F::TILE_DEPTH - (F::VOLUME ? F::LEVELS : 0), brick /= a.bricks[0];
    o.n = brick;
    return o;
}
DEVICE bool within(int v, int size) { return (unsigned)v < (unsigned)size; }
DEVICE const char* pixel_of(const void* tensor, const Arguments& a, int n, int z, int y, int x, int bytes) {
    return (const char*)tensor + ((((size_t)n * a.size[0] + z) * a.size[1] + y) * a.size[2] + x) * bytes;
}

// Number of a pixel in memory = of its row + of its column: channels-last, or in bricks (layouts.py) where F has some.
template <class F> DEVICE size_t row_index(const Arguments& a, int n, int z, int y) {
    const size_t plane = ((size_t)n * a.size[0] + z) * a.size[1];
    if constexpr (F::BRICK_WIDTH == 0) return (plane + y) * a.size[2];
    else return (plane + y - y % F::BRICK_HEIGHT) * a.size[2] + y % F::BRICK_HEIGHT * F::BRICK_WIDTH;
}
template <class F> DEVICE int column_index(int x) {
    if constexpr (F::BRICK_WIDTH == 0) return x;
    else return x / F::BRICK_WIDTH * (F::BRICK_HEIGHT * F::BRICK_WIDTH) + x % F::BRICK_WIDTH;
}

// 16 bytes of channels put together one by one, where a pixel is no multiple of 16 bytes.
template <class T, int CHANNELS> DEVICE uint4 gathered(const char* pixel, int chunk) {
    u32 w[4] = {};
    constexpr int PER = 4 / T::bytes;
    UNROLL for (int i = 0; i < 4 * PER; i++) {
        const int c = chunk * 4 * PER + i;
        if (c >= CHANNELS) continue;
        if constexpr (PER == 1) w[i] = ((const u32*)pixel)[c];
        else w[i / 2] |= (u32)((const u16*)pixel)[c] << (16 * (i & 1));
    }
    return uint4{w[0], w[1], w[2], w[3]};
}

// A row of pixels into a field's row, zeros for the pixels from `x` on that are outside of [0, width), by `WARPS` warps of
// which this is number `warp`. `from` is the row's pixel 0 in global memory; nothing of it is read where it is not `there`.
template <class T, int CHANNELS, int CHUNKS, int WARPS, class F>
DEVICE void load_pixels(const char* from, bool there, int x, int width, u32 to, int warp) {
    const int lane = threadIdx.x & 31;
    constexpr int ITEMS = F::WIDTH * CHUNKS;
    UNROLL for (int i = 0; i < ITEMS; i += 32 * WARPS) {
        const int item = i + 32 * warp + lane, q = item / CHUNKS, chunk = item % CHUNKS;
        if (i + 32 * WARPS > ITEMS && item >= ITEMS) break;
        const bool inside = there && within(x + q, width);
        const char* pixel = from + column_index<F>(x + q) * (CHANNELS * T::bytes);  // perhaps outside of the tensor
        const u32 at = to + offset<CHUNKS>(q, chunk);
        if constexpr (CHANNELS * T::bytes % 16 == 0) copy_async(at, pixel + chunk * 16, inside && chunk * 16 < CHANNELS * T::bytes);
        else store_shared_4(at, inside ? gathered<T, CHANNELS>(pixel, chunk) : uint4{0, 0, 0, 0});
    }
}
// A row of the input.
template <class T, int CHANNELS, int CHUNKS, int WARPS, class F>
DEVICE void load_row(const Arguments& a, const Origin& o, int z, int y, u32 to, int warp) {
    const bool there = within(z, a.size[0]) && within(y, a.size[1]);
    const char* from = (const char*)a.input + row_index<F>(a, o.n, there ? z : 0, there ? y : 0) * (CHANNELS * T::bytes);
    load_pixels<T, CHANNELS, CHUNKS, WARPS, F>(from, there, o.x, a.size[2], to, warp);
}
// The input of a brick into a field; a warp takes row after row.
template <class T, int CHANNELS, int CHUNKS, class F> DEVICE void load_field(const Arguments& a, const Origin& o, u32 field) {
    NO_UNROLL for (int row = threadIdx.x >> 5; row < F::DEPTH * F::HEIGHT; row += F::WARPS) {
        const u32 to = field + F::GUARD * CHUNKS * 16 + row * (F::WIDTH * CHUNKS * 16);
        load_row<T, CHANNELS, CHUNKS, 1, F>(a, o, o.z + row / F::HEIGHT, o.y + row % F::HEIGHT, to, 0);
    }
    copy_commit();
}

// Where a warp's rows of an intermediate go: a field, zeros outside of the image.
template <class Y, class F> struct FieldSink {
    u32 to, added;
    int y, height;
    bool columns[2];

    DEVICE FieldSink(const Arguments& a, const Origin& o, u32 fields, const Rows<Y, F>& rows, int z, int first, int x0) {
        const int g = rows.lane >> 2, byte = rows.channel * Y::T::bytes;
        const int pixel = F::GUARD + (z * F::HEIGHT + first) * F::WIDTH + x0 + g;
        const u32 at = offset<Y::OUT>(pixel, byte / 16) + byte % 16;
        to = fields + Y::TARGET + at, added = fields + Y::ADDED + at;
        y = o.y + first, height = within(o.z + z, a.size[0]) ? a.size[1] : 0;
        UNROLL for (int h = 0; h < 2; h++) columns[h] = within(o.x + x0 + g + 8 * h, a.size[2]);
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        UNROLL for (int h = 0; h < 2; h++) {
            u32 w[PIECE<Y>], other[PIECE<Y>];
            if constexpr (Y::RESIDUAL == SHARED) load_piece(other, added + h * 8 * Y::OUT * 16);
            finish<Y>(w, d, h, Y::RESIDUAL == SHARED ? other : nullptr);
            const bool inside = columns[h] && within(y, height);
            UNROLL for (int i = 0; i < PIECE<Y>; i++) w[i] = inside ? w[i] : 0u;
            store_piece(to + h * 8 * Y::OUT * 16, w);
        }
        y++, to += F::WIDTH * Y::OUT * 16, added += F::WIDTH * Y::OUT * 16;
    }
};

// Where a warp's rows of the last layer go: the output, as far as brick and image reach.
template <class Y, class F> struct OutputSink {
    static constexpr int BYTES = Y::CHANNELS * Y::T::bytes;
    using Out = GlobalPiece<typename Y::T, PIECE<Y>, Y::CHANNELS, PADDED_CHANNELS<Y>>;
    const Arguments& a;
    char* to;  // the row
    const char* residual;
    u32 added;
    int n, z, y, height, channel, column[2];

    DEVICE OutputSink(const Arguments& a, const Origin& o, u32 fields, const Rows<Y, F>& rows, int plane, int first, int x0)
        : a(a), n(o.n), z(o.z + plane), y(o.y + first), channel(rows.channel) {
        const int g = rows.lane >> 2, byte = rows.channel * Y::T::bytes;
        added = fields + Y::ADDED + offset<Y::OUT>(F::GUARD + (plane * F::HEIGHT + first) * F::WIDTH + x0 + g, byte / 16) + byte % 16;
        height = within(z, a.size[0]) ? a.size[1] : 0;
        UNROLL for (int h = 0; h < 2; h++) {
            const int q = x0 + g + 8 * h, x = o.x + q;
            column[h] = q >= F::LEVELS && q < F::LEVELS + F::TILE_WIDTH && x < a.size[2] ? column_index<F>(x) * BYTES : -1;
        }
        find_row();
    }
    DEVICE void find_row() {
        const size_t row = row_index<F>(a, n, z, y) * BYTES;
        to = (char*)a.output + row;
        if constexpr (Y::RESIDUAL == GLOBAL) residual = (const char*)a.residual + row;
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        UNROLL for (int h = 0; h < 2; h++) {
            if (column[h] < 0 || y >= height) continue;
            u32 w[PIECE<Y>], other[PIECE<Y>];
            if constexpr (Y::RESIDUAL == SHARED) load_piece(other, added + h * 8 * Y::OUT * 16);
            if constexpr (Y::RESIDUAL == GLOBAL) Out::load(other, residual + column[h], channel);
            finish<Y>(w, d, h, Y::RESIDUAL == NOTHING ? nullptr : other);
            Out::store(to + column[h], channel, w);
        }
        y++, added += F::WIDTH * Y::OUT * 16;
        if constexpr (F::BRICK_WIDTH != 0) find_row();
        else {
            to += (size_t)a.size[2] * BYTES;
            if constexpr (Y::RESIDUAL == GLOBAL) residual += (size_t)a.size[2] * BYTES;
        }
    }
};

template <bool LAST, class Y, class F> struct SinkOf { using Type = FieldSink<Y, F>; };
template <class Y, class F> struct SinkOf<true, Y, F> { using Type = OutputSink<Y, F>; };

// One layer of a brick: every warp takes segments of rows of strips of 16 columns.
template <class Y, class F> DEVICE void layer(const Arguments& a, const Origin& o, u32 fields) {
    const int warp = threadIdx.x >> 5;
    constexpr int STRIPS = F::WIDTH / 16, SKIPPED = F::VOLUME ? Y::LEVEL : 0, PLANES = F::DEPTH - 2 * SKIPPED;
    constexpr int HEIGHT = F::HEIGHT - 2 * Y::LEVEL;
    Rows<Y, F> rows;
    rows.start(a, warp);
    if constexpr (Y::LEVEL == 1) copy_wait<0>();
    block_sync();
    if (warp >= F::WARPS / Y::SPLITS * Y::SPLITS) return;  // the channels leave a rest of warps; no barrier follows here
    NO_UNROLL for (int job = warp / Y::SPLITS; job < STRIPS * PLANES * Y::SEGMENTS; job += F::WARPS / Y::SPLITS) {
        const int x0 = job % STRIPS * 16, segment = job / STRIPS % Y::SEGMENTS, z = SKIPPED + job / STRIPS / Y::SEGMENTS;
        const int first = Y::LEVEL + HEIGHT * segment / Y::SEGMENTS, end = Y::LEVEL + HEIGHT * (segment + 1) / Y::SEGMENTS;
        typename SinkOf<Y::LAST, Y, F>::Type sink(a, o, fields, rows, z, first, x0);
        using Lines = Rows<Y, F>;
        FieldSource<Lines::ROW_IN, Lines::PLANE_IN> source{fields + Y::SOURCE + (z - Y::PLANES / 2) * Lines::PLANE_IN + (first - 1) * Lines::ROW_IN};
        rows.run(source, sink, end - first, x0);
    }
}
