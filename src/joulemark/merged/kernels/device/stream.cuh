// Row streaming: a block carries a band of columns from top to bottom; each layer has warps of its own, which pass rows
// on through rings in shared memory. Nothing is recomputed from row to row, and weights stay in registers throughout.
//
// Every row of a tensor lies in slot (number of the row) mod ROWS of its ring. Its writers wait until the slot's former
// row has been read (`empty`), its readers until the row has been written (`full`). No circle of waiting: a layer waits
// for `full` of the tensor before and for `empty` of the tensor after it only; a reader takes each row once and gives it
// back before it waits for the next, so a ring of two rows would do; a residual's ring has as many more as the rows by
// which its second reader lags behind. The input's readers bring it themselves, up to three rows at a time and LAG rows
// less ahead than the ring is long: before they read row r they wait until row r + 2 − LAG was given back. Without a
// residual the other warps of the layer do so without waiting for more than is brought, and LAG is 3 at least; with one,
// added d layers on, a row q is given back once this layer has made row q + d − 1. Before it reads row r it has made r − 2:
// LAG is d + 3 at least.
#pragma once

template <int ROWS_, int PITCH, int READERS_, int WRITERS_> struct Ring {
    static constexpr int ROWS = ROWS_, BARRIERS = ROWS * 16, READERS = READERS_, WRITERS = WRITERS_;
    DEVICE static u32 row(u32 slots, u32 number) { return slots + number % ROWS * PITCH; }
    DEVICE static u32 full(u32 barriers, u32 number) { return barriers + number % ROWS * 8; }
    DEVICE static u32 empty(u32 barriers, u32 number) { return barriers + ROWS * 8 + number % ROWS * 8; }
    DEVICE static void start(u32 barriers) {
        for (int i = 0; i < ROWS; i++) barrier_start(barriers + i * 8, WRITERS), barrier_start(barriers + (ROWS + i) * 8, READERS);
    }
    DEVICE static void wait_full(u32 barriers, u32 number) { barrier_wait(full(barriers, number), number / ROWS & 1); }
    DEVICE static void wait_empty(u32 barriers, u32 number) {
        if (number >= ROWS) barrier_wait(empty(barriers, number), (number / ROWS - 1) & 1);
    }
};

template <class R> struct RingSource {
    u32 slots, barriers, number;
    DEVICE u32 row(int) {
        R::wait_full(barriers, number);
        return R::row(slots, number);
    }
    DEVICE void release() {
        warp_sync();
        if ((threadIdx.x & 31) == 0) barrier_arrive(R::empty(barriers, number));
        number++;
    }
    DEVICE void ahead(int) {}
};

// What a layer adds from an earlier tensor's ring: the row behind the one that is finished.
template <class Y, class F> struct RingResidual {
    using R = typename Y::AddedRing;
    u32 slots, barriers, number;
    DEVICE u32 wait() {
        R::wait_full(barriers, number);
        return R::row(slots, number);
    }
    DEVICE void release() {
        warp_sync();
        if ((threadIdx.x & 31) == 0) barrier_arrive(R::empty(barriers, number));
        number++;
    }
    DEVICE void skip(int rows) {
        for (int i = 0; i < rows; i++) wait(), release();
    }
};

// An intermediate's rows into the ring of the next layer, zeros outside of the image.
template <class Y, class F> struct RingSink {
    using R = typename Y::OutRing;
    u32 slots, barriers, number, inside_row;
    RingResidual<Y, F> residual;
    int y, height;
    bool columns[2];

    template <class Lines> DEVICE void begin(const Arguments& a, const Origin& o, const Lines& rows, int x0) {
        const int g = rows.lane >> 2, byte = rows.channel * Y::T::bytes;
        inside_row = offset<Y::OUT>(F::GUARD + x0 + g, byte / 16) + byte % 16;
        y = o.y + Y::LEVEL, height = a.size[1];
        UNROLL for (int h = 0; h < 2; h++) columns[h] = within(o.x + x0 + g + 8 * h, a.size[2]);
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        u32 added = 0;
        if constexpr (Y::RESIDUAL == SHARED) added = residual.wait() + inside_row;
        u32 w[2][PIECE<Y>];
        UNROLL for (int h = 0; h < 2; h++) {
            u32 other[PIECE<Y>];
            if constexpr (Y::RESIDUAL == SHARED) load_piece(other, added + h * 8 * Y::OUT * 16);
            finish<Y>(w[h], d, h, Y::RESIDUAL == SHARED ? other : nullptr);
            const bool inside = columns[h] && within(y, height);
            UNROLL for (int i = 0; i < PIECE<Y>; i++) w[h][i] = inside ? w[h][i] : 0u;
        }
        if constexpr (Y::RESIDUAL == SHARED) residual.release();
        R::wait_empty(barriers, number);
        UNROLL for (int h = 0; h < 2; h++) store_piece(R::row(slots, number) + inside_row + h * 8 * Y::OUT * 16, w[h]);
        warp_sync();
        if ((threadIdx.x & 31) == 0) barrier_arrive(R::full(barriers, number));
        number++, y++;
    }
};

// The last layer's rows into the output.
template <class Y, class F> struct StreamedOutput {
    using Out = GlobalPiece<typename Y::T, PIECE<Y>, Y::CHANNELS, PADDED_CHANNELS<Y>>;
    char* to[2];
    const char* outside[2];  // a residual from outside of the chain
    RingResidual<Y, F> residual;
    u32 inside_row;
    size_t pitch;
    int channel;
    bool columns[2];

    template <class Lines> DEVICE void begin(const Arguments& a, const Origin& o, const Lines& rows, int x0) {
        const int g = rows.lane >> 2, byte = rows.channel * Y::T::bytes;
        inside_row = offset<Y::OUT>(F::GUARD + x0 + g, byte / 16) + byte % 16;
        channel = rows.channel, pitch = (size_t)a.size[2] * (Y::CHANNELS * Y::T::bytes);
        UNROLL for (int h = 0; h < 2; h++) {
            const int q = x0 + g + 8 * h, x = o.x + q;
            columns[h] = q >= F::LEVELS && q < F::LEVELS + F::TILE_WIDTH && x < a.size[2];
            to[h] = (char*)pixel_of(a.output, a, o.n, 0, o.y + F::LEVELS, x, Y::CHANNELS * Y::T::bytes);
            if constexpr (Y::RESIDUAL == GLOBAL) outside[h] = pixel_of(Y::ADDS_INPUT ? a.input : a.residual, a, o.n, 0, o.y + F::LEVELS, x, Y::CHANNELS * Y::T::bytes);
        }
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        u32 added = 0;
        if constexpr (Y::RESIDUAL == SHARED) added = residual.wait() + inside_row;
        UNROLL for (int h = 0; h < 2; h++) {
            u32 w[PIECE<Y>], other[PIECE<Y>];
            if constexpr (Y::RESIDUAL == SHARED) load_piece(other, added + h * 8 * Y::OUT * 16);
            if constexpr (Y::RESIDUAL == GLOBAL) if (columns[h]) Out::load(other, outside[h], channel);
            finish<Y>(w, d, h, Y::RESIDUAL == NOTHING ? nullptr : other);
            if (columns[h]) Out::store(to[h], channel, w);
            to[h] += pitch;
            if constexpr (Y::RESIDUAL == GLOBAL) outside[h] += pitch;
        }
        if constexpr (Y::RESIDUAL == SHARED) residual.release();
    }
};

template <bool LAST, class Y, class F> struct StreamSinkOf { using Type = RingSink<Y, F>; };
template <class Y, class F> struct StreamSinkOf<true, Y, F> { using Type = StreamedOutput<Y, F>; };

// Rows of the field of a brick: the last brick of an image may be shorter.
template <class F> DEVICE int rows_of(const Arguments& a, const Origin& o) {
    const int left = a.size[1] - (o.y + F::LEVELS);
    return (left < F::TILE_HEIGHT ? left : F::TILE_HEIGHT) + 2 * F::LEVELS;
}

// The input's ring, filled by BRINGERS warps. Where these read it, each brings its part of a row some rows ahead, so far ahead only
// that the slot's former row was given back a few rows ago and nobody waits for it.
template <class Y, class F> struct StreamedInput {
    using R = typename Y::InRing;
    using T = typename Y::T;
    const Arguments& a;
    u32 slots, barriers, number, brought;
    int warp, brick, row_brought, height;
    Origin o;

    DEVICE void open() {
        if (brick < a.count) o = origin_of<F>(a, brick), height = rows_of<F>(a, o), row_brought = 0;
    }
    DEVICE void begin(int its_warp) {
        number = brought = 0, warp = its_warp, brick = blockIdx.x;
        open();
    }
    DEVICE void start(int its_warp) {
        begin(its_warp);
        NO_UNROLL for (int i = 0; i < R::ROWS - Y::LAG; i++) bring();
    }
    DEVICE void bring() {
        if (brick >= a.count) return;
        R::wait_empty(barriers, brought);
        const u32 to = R::row(slots, brought) + F::GUARD * Y::IN * 16;
        load_row<T, Y::TAKEN, Y::IN, Y::BRINGERS, F>(a, o, 0, o.y + row_brought, to, warp);
        if constexpr (Y::TAKEN * T::bytes % 16 == 0) barrier_arrive_copied(R::full(barriers, brought));
        else barrier_arrive(R::full(barriers, brought));
        brought++;
        if (++row_brought == height) {
            brick += gridDim.x;
            open();
        }
    }
    DEVICE u32 row(int) {
        R::wait_full(barriers, number);
        return R::row(slots, number);
    }
    DEVICE void release() {
        warp_sync();
        if ((threadIdx.x & 31) == 0) barrier_arrive(R::empty(barriers, number));
        number++;
    }
    DEVICE void ahead(int rows) {
        NO_UNROLL for (int i = 0; i < rows; i++) bring();
    }
};

// One layer's warps, over all bricks of the block. `warp` counts among the layer's own.
template <class Y, class F, class Source> DEVICE void stream_layer(const Arguments& a, u32 shared, int warp, Source& source) {
    Rows<Y, F> rows;
    rows.start(a, warp);
    const int x0 = warp / Y::SPLITS * 16;
    typename StreamSinkOf<Y::LAST, Y, F>::Type sink;
    if constexpr (!Y::LAST) sink.slots = shared + Y::TARGET, sink.barriers = shared + Y::TARGET_BARRIERS, sink.number = 0;
    if constexpr (Y::RESIDUAL == SHARED) sink.residual = {shared + Y::ADDED, shared + Y::ADDED_BARRIERS, 0};
    NO_UNROLL for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
        const Origin o = origin_of<F>(a, brick);
        sink.begin(a, o, rows, x0);
        // The residual's rows above and below those that are added belong to its halo.
        if constexpr (Y::RESIDUAL == SHARED) sink.residual.skip(Y::LEVEL - Y::ADDED_LEVEL);
        rows.run(source, sink, rows_of<F>(a, o) - 2 * Y::LEVEL, x0);
        if constexpr (Y::RESIDUAL == SHARED) sink.residual.skip(Y::LEVEL - Y::ADDED_LEVEL);
    }
}
template <class Y, class F> DEVICE void stream_first(const Arguments& a, u32 shared, int warp) {
    StreamedInput<Y, F> source{a, shared + Y::SOURCE, shared + Y::SOURCE_BARRIERS};
    source.start(warp);
    stream_layer<Y, F>(a, shared, warp, source);
}
template <class Y, class F> DEVICE void stream_next(const Arguments& a, u32 shared, int warp) {
    RingSource<typename Y::InRing> source{shared + Y::SOURCE, shared + Y::SOURCE_BARRIERS, 0};
    stream_layer<Y, F>(a, shared, warp, source);
}
