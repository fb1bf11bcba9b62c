// Slices streamed as the rows of stream.cuh, by products of warpgroups that read pixels and weights from shared memory. A
// slice is a row of a band of columns, or of a volume a plane of a tile.
//
// The 64 rows of a product are pixels of one input slice, a tap further on: 64 neighbours in a row, or 8 × 8 in a plane,
// where the distance between eights is a row of the field. Its columns are the channels of the three output slices that
// the input slice reaches, so that nothing is multiplied in vain. Output slice o is summed in third o mod 3 of the
// registers. With input slice i the thirds take slices (i − third) mod 3 of the weights; they lie as slices 2, 1, 0, 2, 1,
// so that a product begins at a third of its own. A field is wider than what the products make: the taps of first and last
// stay within it. What a block does not make of them is unfinished, and read by what the next layers do not finish either.
//
// The input comes by warps of its own. Waiting goes one way as in stream.cuh.

template <bool VOLUME, class Y, class F> struct ThirdsSinkOf { using Type = typename StreamSinkOf<Y::LAST, Y, F>::Type; };

template <class Y, class F> struct Thirds {
    using T = typename Y::T;
    static constexpr int CHANNELS = Y::TILES * 8, N = 3 * CHANNELS, PIXEL = Y::IN * 16;
    static constexpr int TAPS_DOWN = F::VOLUME ? 3 : 1;
    float sum[3 * Y::TILES][4], bias[Y::TILES][2];
    int lane, channel;  // the lane's first
    u32 corner;         // of the warpgroup's 64 pixels, bytes in a slice
    u64 weights;

    DEVICE void start(const Arguments& a, u32 shared, int tile) {
        lane = threadIdx.x & 31, channel = (lane & 3) * 2 * Y::TILES;
        corner = (tile / F::ACROSS * 8 * F::WIDTH + tile % F::ACROSS * F::STEP) * PIXEL;
        weights = matrix_descriptor<PIXEL>(shared + Y::WEIGHTS);
        const char* from = (const char*)a.weights + Y::BIAS + channel * 4;
        UNROLL for (int j = 0; j < Y::TILES; j++) UNROLL for (int i = 0; i < 2; i++) bias[j][i] = load_float(from + (2 * j + i) * 4);
    }
    template <int THIRD> DEVICE void begin() {
        UNROLL for (int j = 0; j < Y::TILES; j++) UNROLL for (int i = 0; i < 4; i++) sum[THIRD * Y::TILES + j][i] = bias[j][i % 2];
    }
    template <int THIRD, class Sink> DEVICE void end(Sink& sink) {
        sink.store(reinterpret_cast<const float (&)[Y::TILES][4]>(sum[THIRD * Y::TILES]));
        begin<THIRD>();
    }
    // Input slice number PHASE mod 3.
    template <int PHASE, class Source> DEVICE void add(Source& source) {
        const u64 pixels = matrix_descriptor<PIXEL>(source.row(0) + corner, F::EIGHTS * PIXEL);
        fence_async();  // others have written the slice
        group_fence();
        UNROLL for (int dy = 0; dy < TAPS_DOWN; dy++) UNROLL for (int dx = 0; dx < 3; dx++) UNROLL for (int k = 0; k < Y::STEPS; k++)
            wgmma<T, N>(sum, matrix_behind(pixels, (dy * F::WIDTH + dx) * PIXEL + k * 32),
                        matrix_behind(weights, ((dy * 3 + dx) * 5 + 2 - PHASE) * CHANNELS * PIXEL + k * 32));
        group_commit();
        group_finish(sum);
        source.release();
    }
    // `count` output slices out of count + 2 of the source.
    template <class Source, class Sink> DEVICE void run(Source& source, Sink& sink, int count) {
        begin<0>();  // what the others sum before their own begin is thrown away
        add<0>(source), begin<1>();
        add<1>(source), begin<2>();
        NO_UNROLL for (;; count -= 3) {
            add<2>(source), end<0>(sink);
            if (count == 1) return;
            add<0>(source), end<1>(sink);
            if (count == 2) return;
            add<1>(source), end<2>(sink);
            if (count == 3) return;
        }
    }
};

// One layer's warpgroups, over all bricks of the block. `warp` counts among the layer's own.
template <class Y, class F> DEVICE void thirds_layer(const Arguments& a, u32 shared, int warp) {
    Thirds<Y, F> thirds;
    thirds.start(a, shared, warp / 4);
    RingSource<typename Y::InRing> source{shared + Y::SOURCE, shared + Y::SOURCE_BARRIERS, 0};
    typename ThirdsSinkOf<F::VOLUME, Y, F>::Type sink;
    if constexpr (!Y::LAST) sink.slots = shared + Y::TARGET, sink.barriers = shared + Y::TARGET_BARRIERS, sink.number = 0;
    NO_UNROLL for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
        const Origin o = origin_of<F>(a, brick);
        sink.begin(a, o, thirds, F::VOLUME ? warp : 1 + warp * 16);
        thirds.run(source, sink, (F::VOLUME ? planes_of<F>(a, o) : rows_of<F>(a, o)) - 2 * Y::LEVEL);
    }
}
// The warps that bring the input of the first layer Y.
template <class Y, class F> DEVICE void bring_input(const Arguments& a, u32 shared, int warp) {
    StreamedInput<Y, F> input{a, shared + Y::SOURCE, shared + Y::SOURCE_BARRIERS};
    input.begin(warp);
    NO_UNROLL while (input.brick < a.count) input.bring();
    copy_commit();
    copy_wait<0>();  // nobody leaves before what it has asked for is there
}
// All weights into shared memory, by all threads.
template <int BYTES, int THREADS> DEVICE void bring_weights(const Arguments& a, u32 to) {
    for (int i = threadIdx.x * 16; i < BYTES; i += THREADS * 16) copy_async(to + i, (const char*)a.weights + i, true);
    copy_commit();
    copy_wait<0>();
    fence_async();
}
