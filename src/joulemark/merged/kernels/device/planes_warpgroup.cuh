// What stream_warpgroup.cuh does with planes of a volume: where they go to, and how they come.

// Row and column in the field of the first pixel that a lane makes; the second lies a row below.
template <class F> struct TilePixel {
    int y, x;
    DEVICE TilePixel(int warp, int lane)
        : y(warp / 4 / F::ACROSS * 8 + 1 + warp % 4 * 2), x(warp / 4 % F::ACROSS * 8 + 1 + (lane >> 2)) {}
};

// An intermediate's planes into the ring of the next layer, zeros outside of the image.
template <class Y, class F> struct PlaneSink {
    using R = typename Y::OutRing;
    u32 slots, barriers, number, inside_plane;
    int z, depth;
    bool inside[2];

    template <class Lines> DEVICE void begin(const Arguments& a, const Origin& o, const Lines& rows, int warp) {
        const TilePixel<F> at(warp, rows.lane);
        const int byte = rows.channel * Y::T::bytes;
        z = o.z + Y::LEVEL, depth = a.size[0];
        inside_plane = offset<Y::OUT>(at.y * F::WIDTH + at.x, byte / 16) + byte % 16;
        UNROLL for (int h = 0; h < 2; h++) inside[h] = within(o.y + at.y + h, a.size[1]) && within(o.x + at.x, a.size[2]);
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        R::wait_empty(barriers, number);
        UNROLL for (int h = 0; h < 2; h++) {
            u32 w[PIECE<Y>];
            finish<Y>(w, d, h, nullptr);
            const bool kept = inside[h] && within(z, depth);
            UNROLL for (int i = 0; i < PIECE<Y>; i++) w[i] = kept ? w[i] : 0u;
            store_piece(R::row(slots, number) + inside_plane + h * F::WIDTH * Y::OUT * 16, w);
        }
        warp_sync();
        if ((threadIdx.x & 31) == 0) barrier_arrive(R::full(barriers, number));
        number++, z++;
    }
};

// The last layer's planes into the output.
template <class Y, class F> struct PlaneOutput {
    static constexpr int BYTES = Y::CHANNELS * Y::T::bytes;
    using Out = GlobalPiece<typename Y::T, PIECE<Y>, Y::CHANNELS, PADDED_CHANNELS<Y>>;
    char* to[2];
    const char* outside[2];  // what is added
    size_t plane;
    int channel;
    bool own[2];

    template <class Lines> DEVICE void begin(const Arguments& a, const Origin& o, const Lines& rows, int warp) {
        const TilePixel<F> at(warp, rows.lane);
        channel = rows.channel, plane = (size_t)a.size[1] * a.size[2] * BYTES;
        UNROLL for (int h = 0; h < 2; h++) {
            const int y = at.y + h, x = at.x;
            own[h] = within(y - F::LEVELS, F::TILE_HEIGHT) && within(x - F::LEVELS, F::TILE_WIDTH);
            own[h] = own[h] && o.y + y < a.size[1] && o.x + x < a.size[2];
            to[h] = (char*)pixel_of(a.output, a, o.n, o.z + F::LEVELS, o.y + y, o.x + x, BYTES);
            if constexpr (Y::RESIDUAL == GLOBAL)
                outside[h] = pixel_of(Y::ADDS_INPUT ? a.input : a.residual, a, o.n, o.z + F::LEVELS, o.y + y, o.x + x, BYTES);
        }
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        UNROLL for (int h = 0; h < 2; h++) {
            u32 w[PIECE<Y>], other[PIECE<Y>];
            if constexpr (Y::RESIDUAL == GLOBAL) if (own[h]) Out::load(other, outside[h], channel);
            finish<Y>(w, d, h, Y::RESIDUAL == NOTHING ? nullptr : other);
            if (own[h]) Out::store(to[h], channel, w);
            to[h] += plane;
            if constexpr (Y::RESIDUAL == GLOBAL) outside[h] += plane;
        }
    }
};
template <bool LAST, class Y, class F> struct PlaneSinkOf { using Type = PlaneSink<Y, F>; };
template <class Y, class F> struct PlaneSinkOf<true, Y, F> { using Type = PlaneOutput<Y, F>; };
template <class Y, class F> struct ThirdsSinkOf<true, Y, F> { using Type = typename PlaneSinkOf<Y::LAST, Y, F>::Type; };

// The warps that bring the input of the first layer Y.
template <class Y, class F> DEVICE void bring_planes(const Arguments& a, u32 shared, int warp) {
    using R = typename Y::InRing;
    const u32 slots = shared + Y::SOURCE, barriers = shared + Y::SOURCE_BARRIERS;
    u32 number = 0;
    NO_UNROLL for (int brick = blockIdx.x; brick < a.count; brick += gridDim.x) {
        const Origin o = origin_of<F>(a, brick);
        const int depth = planes_of<F>(a, o);
        NO_UNROLL for (int p = 0; p < depth; p++, number++) {
            R::wait_empty(barriers, number);
            NO_UNROLL for (int r = warp; r < F::HEIGHT; r += Y::BRINGERS)
                load_row<typename Y::T, Y::TAKEN, Y::IN, 1, F>(a, o, o.z + p, o.y + r, R::row(slots, number) + r * (F::WIDTH * Y::IN * 16), 0);
            if constexpr (Y::TAKEN * Y::T::bytes % 16 == 0) barrier_arrive_copied(R::full(barriers, number));
            else barrier_arrive(R::full(barriers, number));
        }
    }
    copy_commit();
    copy_wait<0>();  // nobody leaves before what it has asked for is there
}
