// Plane streaming: a block carries a tile of a volume from front to back; each layer has warps of its own, which pass
// planes on through rings in shared memory. Of the volume only the tile's sides are computed by two blocks.
//
// A layer that makes plane z has waited for planes z − 1, z and z + 1 of the tensor before and then gives back z − 1. The
// warps of the first layer bring the input themselves, plane z + 3 into the fifth slot when they begin z: they wait for
// each other to have ended z − 2, for which nothing is needed that is not under way. Layers wait one way only (stream.cuh).
#pragma once

template <int SLOTS_, int PLANE> struct PlaneRing {
    static constexpr int SLOTS = SLOTS_;
    u32 planes, barriers;
    DEVICE void prepare(int writers, int readers) const {
        for (int i = 0; i < SLOTS; i++) barrier_start(barriers + i * 8, writers), barrier_start(barriers + (SLOTS + i) * 8, readers);
    }
    DEVICE u32 plane(int number) const { return planes + number % SLOTS * PLANE; }
    DEVICE u32 full(int number) const { return barriers + number % SLOTS * 8; }
    DEVICE void wait_full(int number) const { barrier_wait(full(number), number / SLOTS & 1); }
    DEVICE void wait_empty(int number) const {
        if (number >= SLOTS) barrier_wait(barriers + (SLOTS + number % SLOTS) * 8, (number / SLOTS - 1) & 1);
    }
    // By one lane of a warp whose lanes have all come this far.
    DEVICE void filled(int number) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(full(number));
    }
    DEVICE void give_back(int number) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(barriers + (SLOTS + number % SLOTS) * 8);
    }
};

template <int PITCH> struct PlaneSource {
    u32 planes[3];
    DEVICE u32 row(int plane) const { return planes[plane]; }
    DEVICE void release() { UNROLL for (int i = 0; i < 3; i++) planes[i] += PITCH; }
    DEVICE void ahead(int) {}
};

template <class F> DEVICE int planes_of(const Arguments& a, const Origin& o) {
    const int left = a.size[0] - (o.z + F::LEVELS);
    return (left < F::TILE_DEPTH ? left : F::TILE_DEPTH) + 2 * F::LEVELS;
}

// The input's planes, brought by the first layer's warps.
template <class Y, class F> struct PlaneInput {
    const Arguments& a;
    typename Y::InRing ring;
    int warp, number, brick, plane, depth;
    Origin o;

    DEVICE void open() {
        if (brick < a.count) o = origin_of<F>(a, brick), depth = planes_of<F>(a, o), plane = 0;
    }
    DEVICE void bring() {
        if (brick >= a.count) return;
        ring.wait_empty(number);
        const u32 to = ring.plane(number) + F::GUARD * Y::IN * 16;
        NO_UNROLL for (int r = warp; r < F::HEIGHT; r += Y::WARPS)
            load_row<typename Y::T, Y::TAKEN, Y::IN, 1, F>(a, o, o.z + plane, o.y + r, to + r * (F::WIDTH * Y::IN * 16), 0);
        if constexpr (Y::TAKEN * Y::T::bytes % 16 == 0) barrier_arrive_copied(ring.full(number));
        else barrier_arrive(ring.full(number));
        number++;
        if (++plane == depth) {
            brick += gridDim.x;
            open();
        }
    }
};

// One layer's warps, over all bricks of the block. `warp` counts among the layer's own.
template <class Y, class F> DEVICE void plane_layer(const Arguments& a, u32 shared, int warp) {
    constexpr int STRIPS = F::WIDTH / 16, HEIGHT = F::HEIGHT - 2 * Y::LEVEL, WORKERS = Y::WARPS / Y::SPLITS;
    using Lines = Rows<Y, F>;
    const typename Y::InRing input{shared + Y::SOURCE, shared + Y::SOURCE_BARRIERS};
    const typename Y::OutRing output{shared + Y::TARGET_RING, shared + Y::TARGET_BARRIERS};
    Lines rows;
    rows.start(a, warp);
    PlaneInput<Y, F> bringing{a, input, warp, 0, (int)blockIdx.x};
    if constexpr (Y::LEVEL == 1) {
        bringing.open();
        for (int i = 0; i < 3; i++) bringing.bring();
    }
    int read = 0, written = 0;
    NO_UNROLL for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
        Origin o = origin_of<F>(a, brick);
        const int count = planes_of<F>(a, o) - 2 * Y::LEVEL;
        o.z += Y::LEVEL;
        input.wait_full(read);
        input.wait_full(read + 1);
        NO_UNROLL for (int p = 0; p < count; p++, read++, written++, o.z++) {
            if constexpr (Y::LEVEL == 1) bringing.bring();
            input.wait_full(read + 2);
            if constexpr (!Y::LAST) output.wait_empty(written);
            if (warp < WORKERS * Y::SPLITS)
                NO_UNROLL for (int job = warp / Y::SPLITS; job < STRIPS * Y::SEGMENTS; job += WORKERS) {
                    const int x0 = job % STRIPS * 16, segment = job / STRIPS;
                    const int first = Y::LEVEL + HEIGHT * segment / Y::SEGMENTS, end = Y::LEVEL + HEIGHT * (segment + 1) / Y::SEGMENTS;
                    typename SinkOf<Y::LAST, Y, F>::Type sink(a, o, output.plane(written), rows, 0, first, x0);
                    PlaneSource<Lines::ROW_IN> source;
                    UNROLL for (int i = 0; i < 3; i++) source.planes[i] = input.plane(read + i) + (first - 1) * Lines::ROW_IN;
                    rows.run(source, sink, end - first, x0);
                }
            warp_sync();
            if constexpr (!Y::LAST) output.filled(written);
            input.give_back(read);
        }
        input.give_back(read), input.give_back(read + 1);
        read += 2;
        if constexpr (Y::LEVEL == 1) bringing.bring(), bringing.bring();  // a brick takes two planes more than it makes
    }
}
