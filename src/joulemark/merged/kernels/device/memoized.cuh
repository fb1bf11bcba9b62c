// Memoized bricks: every brick of every tensor is computed once, and intermediates live in rings of rows in L2.
//
// A task is (tensor t from 1, row of bricks r, lane, column c): one brick of the output of layer t. Images go through
// `LANES` lanes, one below the other, so that r counts through all images of a lane. Tasks are numbered by wave
// s = r + 2t, then t, lane and column, and blocks take them in this order from a counter. A task waits
//   - for the bricks around it of tensor t − 1: rows r − 1 … r + 1, of waves s − 3 … s − 1;
//   - before it overwrites row r − RING of its ring, for the readers of that row: tensor t + 1, rows r − RING − 1 …
//     r − RING + 1, of waves up to s + 3 − RING: RING is 4 at least.
// All it waits for has a smaller number, so it was taken before, by a block that runs; of the tasks taken and not done
// the one with the smallest number waits for none: no circle of waiting. A task is done when its flag holds the epoch,
// which the last block to end advances, with the counter set back for the next launch.
#pragma once

struct Task {
    int tensor, row, lane, column;
};
struct Ledger {  // of all tasks; lies at the start of the scratch
    u32* header;  // counter, blocks that have ended, epoch
    u32* flags;
    int lanes, columns, rows, image_rows, layers;

    DEVICE u32* flag(int tensor, int row, int lane, int column) const {
        return flags + (((tensor - 1) * rows + row) * lanes + lane) * columns + column;
    }
    DEVICE int tasks() const { return (rows + 2 * (layers - 1)) * layers * lanes * columns; }
    DEVICE Task task(int number) const {
        Task t;
        t.column = number % columns, number /= columns;
        t.lane = number % lanes, number /= lanes;
        t.tensor = number % layers + 1;
        t.row = number / layers - 2 * (t.tensor - 1);
        return t;
    }
};

// A few threads wait for a flag each: rows from `first` (three of them) of a tensor, columns c − 1 … c + 1, as far as
// they exist in the rows [low, high).
DEVICE void wait_around(const Ledger& ledger, const Task& task, int tensor, int first, int low, int high, int thread, u32 epoch) {
    const int row = first + thread / 3, column = task.column - 1 + thread % 3;
    if (thread < 0 || thread >= 9 || row < low || row >= high || column < 0 || column >= ledger.columns) return;
    const u32* flag = ledger.flag(tensor, row, task.lane, column);
    while (load_acquire(flag) != epoch) spin();
}

// Rows of a brick into a ring or the output.
template <class Y, class F> struct BrickSink {
    using Out = GlobalPiece<typename Y::T, PIECE<Y>, Y::STORED, PADDED_CHANNELS<Y>>;
    char* to[2];
    const char* added[2];
    size_t pitch, added_pitch;
    int y, height, channel;
    bool columns[2];

    // `image` and `residual`: pixel (0, 0) of where rows go and of what is added.
    DEVICE BrickSink(char* image, const char* residual, int width, int height, int y, int x, const Rows<Y, F>& rows, int x0)
        : y(y), height(height), channel(rows.channel) {
        pitch = (size_t)width * (Y::STORED * Y::T::bytes), added_pitch = (size_t)width * (Y::CHANNELS * Y::T::bytes);
        UNROLL for (int h = 0; h < 2; h++) {
            const int q = x0 + (rows.lane >> 2) + 8 * h;
            columns[h] = q >= 1 && q < 1 + F::TILE_WIDTH && x + q < width;
            to[h] = image + (x + q) * (Y::STORED * Y::T::bytes);
            if constexpr (Y::RESIDUAL == GLOBAL) added[h] = residual + y * added_pitch + (x + q) * (Y::CHANNELS * Y::T::bytes);
        }
    }
    DEVICE void store(const float (&d)[Y::TILES][4]) {
        UNROLL for (int h = 0; h < 2; h++) {
            if (columns[h] && y < height) {
                u32 w[PIECE<Y>], other[PIECE<Y>];
                if constexpr (Y::RESIDUAL == GLOBAL) GlobalPiece<typename Y::T, PIECE<Y>, Y::CHANNELS, PADDED_CHANNELS<Y>>::load(other, added[h], channel);
                finish<Y>(w, d, h, Y::RESIDUAL == GLOBAL ? other : nullptr);
                Out::store(to[h], channel, w);
            }
            to[h] += pitch;
            if constexpr (Y::RESIDUAL == GLOBAL) added[h] += added_pitch;
        }
        y++;
    }
};

// A row of a ring; `before` is how many bytes per pixel the rings before it take.
template <class F> DEVICE char* ring_row(const Arguments& a, const Task& task, u32 rings, int before, int row, int bytes) {
    const int rows = F::RING * F::TILE_HEIGHT;
    const size_t pixels = (size_t)F::LANES * rows * a.size[2];
    return (char*)a.scratch + rings + before * pixels + ((size_t)task.lane * rows + (row + rows) % rows) * a.size[2] * bytes;
}

// Brick and halo of the tensor before into the field.
template <class Y, class F> DEVICE void bring_brick(const Arguments& a, const Task& task, int image, int row, u32 rings, u32 field) {
    using T = typename Y::T;
    const int y0 = row * F::TILE_HEIGHT - 1, x0 = task.column * F::TILE_WIDTH - 1;
    NO_UNROLL for (int r = threadIdx.x >> 5; r < F::HEIGHT; r += F::WARPS) {
        const u32 to = field + F::GUARD * Y::IN * 16 + r * (F::WIDTH * Y::IN * 16);
        const bool there = within(y0 + r, a.size[1]);
        if constexpr (Y::LEVEL == 1) {
            const char* from = pixel_of(a.input, a, image, 0, there ? y0 + r : 0, 0, Y::TAKEN * T::bytes);
            load_pixels<T, Y::TAKEN, Y::IN, 1, F>(from, there, x0, a.size[2], to, 0);
        } else {
            constexpr int CHANNELS = Y::IN * 16 / T::bytes;
            const char* from = ring_row<F>(a, task, rings, Y::SOURCE_RING, (task.row - row) * F::TILE_HEIGHT + y0 + r, Y::IN * 16);
            load_pixels<T, CHANNELS, Y::IN, 1, F>(from, there, x0, a.size[2], to, 0);
        }
    }
    copy_commit();
}

template <class Y, class F> DEVICE void make_brick(const Arguments& a, const Ledger& ledger, const Task& task, int image, u32 rings, u32 field, u32 epoch) {
    constexpr int STRIPS = F::WIDTH / 16;
    const int thread = threadIdx.x, warp = thread >> 5, row = task.row % ledger.image_rows;
    Rows<Y, F> rows;
    rows.start(a, warp);
    if constexpr (Y::LEVEL > 1) {  // only the image's own bricks are read
        wait_around(ledger, task, Y::LEVEL - 1, task.row - 1, task.row - row, task.row - row + ledger.image_rows, thread, epoch);
        block_sync();
    }
    bring_brick<Y, F>(a, task, image, row, rings, field);
    if constexpr (!Y::LAST) wait_around(ledger, task, Y::LEVEL + 1, task.row - F::RING - 1, 0, ledger.rows, thread - 32, epoch);
    copy_wait<0>();
    block_sync();
    char* to;
    if constexpr (Y::LAST) to = (char*)pixel_of(a.output, a, image, 0, row * F::TILE_HEIGHT, 0, Y::CHANNELS * Y::T::bytes);
    else to = ring_row<F>(a, task, rings, Y::TARGET_RING, task.row * F::TILE_HEIGHT, Y::OUT * 16);
    const void* other = Y::ADDS_INPUT ? a.input : a.residual;
    const char* residual = Y::RESIDUAL == GLOBAL ? pixel_of(other, a, image, 0, 0, 0, Y::CHANNELS * Y::T::bytes) : nullptr;
    if (warp < F::WARPS / Y::SPLITS * Y::SPLITS)
        NO_UNROLL for (int job = warp / Y::SPLITS; job < STRIPS * Y::SEGMENTS; job += F::WARPS / Y::SPLITS) {
            const int x0 = job % STRIPS * 16, segment = job / STRIPS;
            const int first = F::TILE_HEIGHT * segment / Y::SEGMENTS, end = F::TILE_HEIGHT * (segment + 1) / Y::SEGMENTS;
            const size_t skipped = (size_t)first * a.size[2] * (Y::STORED * Y::T::bytes);
            BrickSink<Y, F> sink(
                to + skipped, residual, a.size[2], a.size[1], row * F::TILE_HEIGHT + first, task.column * F::TILE_WIDTH - 1, rows, x0);
            FieldSource<Rows<Y, F>::ROW_IN, 0> source{field + first * Rows<Y, F>::ROW_IN};
            rows.run(source, sink, end - first, x0);
        }
    fence_gpu();
    block_sync();
    if (thread == 0) store_release(ledger.flag(task.tensor, task.row, task.lane, task.column), epoch);
}

// A block's way through the tasks.
template <class F> struct Run {
    const Arguments& a;
    Ledger ledger;
    Task task;
    u32 field, rings, epoch;
    int image;

    DEVICE Run(const Arguments& a) : a(a) {
        ledger.header = (u32*)a.scratch;
        ledger.flags = (u32*)((char*)a.scratch + F::HEADER);
        ledger.lanes = F::LANES, ledger.columns = a.bricks[2], ledger.image_rows = a.bricks[1], ledger.layers = F::LEVELS;
        ledger.rows = (a.batch + F::LANES - 1) / F::LANES * ledger.image_rows;
        epoch = load_acquire(ledger.header + 2) + 1;
        field = shared_base() + F::TICKET;
        const int flags = F::LEVELS * ledger.rows * ledger.lanes * ledger.columns;
        rings = F::HEADER + (flags * 4 + F::HEADER - 1) / F::HEADER * F::HEADER;
    }
    // Takes the next task; false when there is none.
    DEVICE bool next() {
        block_sync();  // the former ticket has been read
        if (threadIdx.x == 0) store_shared(shared_base(), atomic_add(ledger.header, 1));
        block_sync();
        const int number = load_shared(shared_base());
        if (number >= ledger.tasks()) return false;
        task = ledger.task(number);
        image = task.row / ledger.image_rows * F::LANES + task.lane;
        return true;
    }
    template <class Y> DEVICE void make() {
        if (task.tensor != Y::LEVEL || task.row < 0 || task.row >= ledger.rows || image >= a.batch) return;
        make_brick<Y, F>(a, ledger, task, image, rings, field, epoch);
    }
    DEVICE void end() {
        if (threadIdx.x != 0 || add_release(ledger.header + 1, 1) != gridDim.x - 1u) return;
        ledger.header[0] = 0, ledger.header[1] = 0;
        store_release(ledger.header + 2, epoch);
    }
};
