// The vocabulary of device/prelude.cuh on a CPU: every thread of a block is a fiber.
//
// A fiber runs until it must wait. The lanes of a warp run round until the whole warp waits for others, then another
// warp runs: a warp gets as far ahead of the others as the barriers let it, in ascending or descending order, so that
// a missing barrier gives wrong numbers. Copies by copy_async land when they are waited for, not before. Shared memory
// starts as NaN, an access outside of it fails the launch, and so does a state in which nobody can go on.
#pragma once
#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Dim { int x; };
#define EMULATED
#define DEVICE inline
#define UNROLL
#define NO_UNROLL
#define __restrict__

namespace emulation {

constexpr size_t STACK = 256 << 10;

struct Copy { u32 to; const void* from; bool there; };
struct Fiber {
    int block, thread;
    bool done = false;
    jmp_buf state;
    ucontext_t start;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
struct Barrier { int arrived = 0; u32 generation = 0; };
struct Warp {
    Barrier barrier;
    u32 words[32][16];
    u32 results[32][4];
    u32 address[32];
};
struct Phases { u32 expected = 0, pending = 0, ended = 0; };
struct Bulk { u32 to; const void* from; u32 bytes; };
struct Block {
    std::map<u32, Phases> phases;
    std::map<u32, std::vector<Bulk>> bulks;  // under way, by the barrier that they arrive at
    Barrier cluster;                         // of the cluster that begins with this block
    std::vector<u8> memory;
    std::vector<Warp> warps;
    Barrier barriers[16];
    int threads;
};

inline std::vector<Fiber>* fibers;
inline std::vector<Block>* blocks;
inline Fiber* me;
inline jmp_buf scheduler;
inline u64 progress;
inline std::string failure;
inline void (*body)();
inline bool backwards;  // warps run in descending order

inline Block& block() { return (*blocks)[me->block]; }
inline Warp& warp() { return block().warps[me->thread >> 5]; }
inline int lane() { return me->thread & 31; }

[[noreturn]] inline void leave() { _longjmp(scheduler, 1); }
inline void fail(const std::string& what) {
    if (failure.empty()) failure = what + " (thread " + std::to_string(me->thread) + ")";
    me->done = true;
    leave();
}
inline void step_aside() {
    Fiber* self = me;
    if (!_setjmp(self->state)) leave();
    me = self;
}
template <class Condition> void wait_until(Condition condition) {
    while (!condition()) step_aside();
    progress++;
}
// The last to arrive runs `act` before anybody goes on.
template <class Act> void meet(Barrier& barrier, int expected, Act act) {
    const u32 generation = barrier.generation;
    progress++;
    if (++barrier.arrived == expected) {
        act();
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    wait_until([&] { return barrier.generation != generation; });
}
inline u8* shared(u32 at, u32 bytes) {
    if (at % bytes) fail("misaligned access to shared memory at " + std::to_string(at));
    if (at < 1024 || at + bytes > 1024 + block().memory.size())
        fail("access outside of shared memory at " + std::to_string((long)at - 1024));
    return block().memory.data() + (at - 1024);
}
inline void land(const Copy& copy) {
    u8* to = shared(copy.to, 16);
    if (copy.there) memcpy(to, copy.from, 16);
    else memset(to, 0, 16);
}
inline void entry() {
    body();
    me->done = true;
    progress++;
    leave();
}
inline void prepare(Fiber& fiber, char* stack) {
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stack;
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, entry, 0);
}

}  // namespace emulation

#define threadIdx (Dim{emulation::me->thread})
#define blockIdx (Dim{emulation::me->block + emulation_first_block})
#define gridDim (Dim{emulation_grid})
inline int emulation_first_block, emulation_grid;

DEVICE u32 shared_base() { return 1024; }
template <class T> T emulated_load(u32 at) {
    T v;
    memcpy(&v, emulation::shared(at, sizeof(T)), sizeof(T));
    return v;
}
template <class T> void emulated_store(u32 at, T v) { memcpy(emulation::shared(at, sizeof(T)), &v, sizeof(T)); }
DEVICE u32 load_shared(u32 at) { return emulated_load<u32>(at); }
DEVICE uint2 load_shared_2(u32 at) { return emulated_load<uint2>(at); }
DEVICE uint4 load_shared_4(u32 at) { return emulated_load<uint4>(at); }
DEVICE void store_shared(u32 at, u32 v) { emulated_store(at, v); }
DEVICE void store_shared_2(u32 at, u32 x, u32 y) { emulated_store(at, uint2{x, y}); }
DEVICE void store_shared_4(u32 at, uint4 v) { emulated_store(at, v); }

DEVICE void copy_async(u32 to, const void* from, bool there) {
    if ((uintptr_t)from % 16 && there) emulation::fail("copy_async from an address that is no multiple of 16");
    emulation::me->open.push_back({to, from, there});
}
DEVICE void copy_commit() {
    emulation::me->groups.push_back(std::move(emulation::me->open));
    emulation::me->open.clear();
}
template <int N> void copy_wait() {
    auto& groups = emulation::me->groups;
    for (; groups.size() > N; groups.pop_front())
        for (const auto& copy : groups.front()) emulation::land(copy);
}

template <class T> T emulated_global(const void* p) {
    if ((uintptr_t)p % sizeof(T)) emulation::fail("misaligned access to global memory");
    T v;
    memcpy(&v, p, sizeof(T));
    return v;
}
DEVICE u32 load_global(const void* p) { return emulated_global<u32>(p); }
DEVICE uint4 load_global_4(const void* p) { return emulated_global<uint4>(p); }
DEVICE void prefetch(const void*) {}
DEVICE uint4 load_again_4(const void* p) { return emulated_global<uint4>(p); }
DEVICE float load_float(const void* p) { return emulated_global<float>(p); }
DEVICE u32 load_acquire(const u32* p) { return *p; }
DEVICE void store_release(u32* p, u32 v) { *p = v; emulation::progress++; }
DEVICE u32 add_release(u32* p, u32 v) { emulation::progress++; return (*p += v) - v; }
DEVICE u32 atomic_add(u32* p, u32 v) { emulation::progress++; return (*p += v) - v; }
DEVICE void fence_gpu() {}
DEVICE void spin() { emulation::step_aside(); }

DEVICE int block_index() { return blockIdx.x; }
DEVICE void block_sync() { emulation::meet(emulation::block().barriers[0], emulation::block().threads, [] {}); }
DEVICE void named_sync(int barrier, int threads) { emulation::meet(emulation::block().barriers[barrier], threads, [] {}); }
DEVICE void warp_sync() { emulation::meet(emulation::warp().barrier, 32, [] {}); }
DEVICE emulation::Phases& emulated_barrier(u32 at) {
    emulation::shared(at, 8);
    return emulation::block().phases[at];
}
DEVICE void barrier_start(u32 at, u32 expected) { emulated_barrier(at) = {expected, expected, 0}; }
DEVICE void barrier_arrive(u32 at) {
    auto& phases = emulated_barrier(at);
    if (!phases.expected) emulation::fail("arrival at a barrier that was not started");
    if (!--phases.pending) phases.pending = phases.expected, phases.ended++, emulation::progress++;
}
DEVICE void barrier_arrive_copied(u32 at) {
    copy_commit();
    copy_wait<0>();
    barrier_arrive(at);
}
DEVICE void barrier_wait(u32 at, u32 parity) {
    auto& phases = emulated_barrier(at);
    emulation::wait_until([&] { return (phases.ended & 1) != parity; });
}
// All lanes put words down, the last one computes for all, each takes its results.
template <class Act> void emulated_together(Act act) {
    auto& warp = emulation::warp();
    emulation::meet(warp.barrier, 32, [&] { act(warp); });
}
DEVICE u32 shuffle(u32 v, int lane) {
    auto& warp = emulation::warp();
    warp.words[emulation::lane()][0] = v;
    emulated_together([](emulation::Warp& w) { for (int i = 0; i < 32; i++) w.results[i][0] = w.words[i][0]; });
    return warp.results[lane & 31][0];
}

DEVICE void load_matrix_4(u32 (&r)[4], u32 at) {
    auto& warp = emulation::warp();
    const int me = emulation::lane();
    warp.address[me] = at;
    emulated_together([](emulation::Warp& w) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++)
                memcpy(&w.results[lane][m], emulation::shared(w.address[8 * m + (lane >> 2)], 16) + 4 * (lane & 3), 4);
    });
    for (int m = 0; m < 4; m++) r[m] = warp.results[me][m];
}

DEVICE float float_of(u32 bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
DEVICE u32 bits_of(float v) {
    u32 bits;
    memcpy(&bits, &v, 4);
    return bits;
}

DEVICE float tanh_fast(float v) { return std::tanh(v); }

// mma.m16n8kK: words 0–3 hold A, 4–5 hold B, 8–11 hold C. `PER` elements per word, element e of word w by T::element.
template <class T, int K, int PER> void emulated_mma(float (&d)[4], const u32* a, int a_words, const u32* b, int b_words) {
    auto& warp = emulation::warp();
    const int me = emulation::lane();
    for (int i = 0; i < a_words; i++) warp.words[me][i] = a[i];
    for (int i = 0; i < b_words; i++) warp.words[me][4 + i] = b[i];
    for (int i = 0; i < 4; i++) warp.words[me][8 + i] = bits_of(d[i]);
    emulated_together([](emulation::Warp& w) {
        float A[16][K], B[K][8];
        constexpr int HALF = 4 * PER;  // columns of A in one word of the four lanes of a row
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < K; k++)
                A[row][k] = T::element(w.words[(row & 7) * 4 + k % HALF / PER][(row >> 3) + k / HALF * 2], k % PER);
        for (int k = 0; k < K; k++)
            for (int n = 0; n < 8; n++) B[k][n] = T::element(w.words[n * 4 + k % HALF / PER][4 + k / HALF], k % PER);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = (lane >> 2) + (i >> 1) * 8, n = 2 * (lane & 3) + (i & 1);
                float sum = float_of(w.words[lane][8 + i]);
                for (int k = 0; k < K; k++) sum += A[row][k] * B[k][n];
                w.results[lane][i] = bits_of(sum);
            }
    });
    for (int i = 0; i < 4; i++) d[i] = float_of(warp.results[me][i]);
}

template <class T> struct EmulatedHalf {
    static constexpr int bytes = 2;
    static float element(u32 word, int which) { return T::widen((u16)(word >> (16 * which))); }
    static u32 pack(float low, float high) { return T::narrow(low) | (u32)T::narrow(high) << 16; }
    static u32 pack_relu(float low, float high) { return pack(low < 0 ? 0 : low, high < 0 ? 0 : high); }  // a NaN stays
    static u32 minimum(u32 v, u32 limit) { return pack(std::fmin(low(v), low(limit)), std::fmin(high(v), high(limit))); }
    static u32 minimum_6(u32 v) { return minimum(v, T::SIX); }
    static float low(u32 v) { return element(v, 0); }
    static float high(u32 v) { return element(v, 1); }
    static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        const u32 b[2] = {b0, b1};
        emulated_mma<T, 16, 2>(d, a, 4, b, 2);
    }
    static void mma_from(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1) {
        d[0] = d[2] = c0, d[1] = d[3] = c1;
        mma(d, a, b0, b1);
    }
    static void mma_from(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
        for (int i = 0; i < 4; i++) d[i] = c[i];
        mma(d, a, b0, b1);
    }
    static void mma_8(float (&d)[4], u32 a0, u32 a1, u32 b) {
        const u32 a[2] = {a0, a1};
        emulated_mma<T, 8, 2>(d, a, 2, &b, 1);
    }
};
struct bf16 : EmulatedHalf<bf16> {
    static constexpr u32 SIX = 0x40c040c0u;
    static float widen(u16 v) { return float_of((u32)v << 16); }
    static u16 narrow(float v) {
        const u32 bits = bits_of(v);
        return std::isnan(v) ? 0x7fff : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};
struct fp16 : EmulatedHalf<fp16> {
    static constexpr u32 SIX = 0x46004600u;
    static float widen(u16 v) {
        _Float16 h;
        memcpy(&h, &v, 2);
        return (float)h;
    }
    static u16 narrow(float v) {
        const _Float16 h = (_Float16)v;
        u16 bits;
        memcpy(&bits, &h, 2);
        return bits;
    }
};
struct tf32 {
    static constexpr int bytes = 4;
    static float element(u32 word, int) { return float_of(word & 0xffffe000u); }
    static u32 round(float v) { return std::isnan(v) ? bits_of(v) : (bits_of(v) + 0x1000) & 0xffffe000u; }
    static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        const u32 b[2] = {b0, b1};
        emulated_mma<tf32, 8, 1>(d, a, 4, b, 2);
    }
    static void mma_from(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1) {
        d[0] = d[2] = c0, d[1] = d[3] = c1;
        mma(d, a, b0, b1);
    }
};
struct fp32 {
    static constexpr int bytes = 4;
};

// Runs a grid, `resident` blocks at a time, warps in ascending order or descending; null, or what went wrong.
inline const char* emulated_launch(void (*kernel)(), int grid, int threads, int bytes, int resident, bool descending) {
    using namespace emulation;
    body = kernel;
    backwards = descending;
    emulation_grid = grid;
    failure.clear();
    char* stacks = (char*)mmap(nullptr, STACK * resident * threads, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int first = 0; first < grid && failure.empty(); first += resident) {
        const int count = std::min(resident, grid - first);
        std::vector<Block> made(count);
        std::vector<Fiber> all(count * threads);
        blocks = &made;
        fibers = &all;
        emulation_first_block = first;
        for (auto& one : made) {
            one.memory.assign(bytes, 0xff);
            one.warps.resize(threads / 32);
            one.threads = threads;
        }
        std::vector<bool> started(all.size(), false);
        size_t left = all.size();
        while (left && failure.empty()) {
            const u64 before_all = progress;
            const int warps = (int)all.size() / 32;
            for (int i = 0; i < warps; i++) {
                const int w = descending ? warps - 1 - i : i;
                for (u64 before = progress - 1; before != progress;) {
                    before = progress;
                    for (int lane = 0; lane < 32 && failure.empty(); lane++) {
                        const int number = w * 32 + lane;
                        Fiber& fiber = all[number];
                        if (fiber.done) continue;
                        me = &fiber;
                        if (!_setjmp(scheduler)) {
                            if (started[number]) _longjmp(fiber.state, 1);
                            started[number] = true;
                            fiber.block = number / threads;
                            fiber.thread = number % threads;
                            prepare(fiber, stacks + STACK * number);
                            setcontext(&fiber.start);
                        }
                        if (all[number].done) left--;
                    }
                }
            }
            if (left && failure.empty() && before_all == progress) failure = "every thread waits: a deadlock";
        }
    }
    munmap(stacks, STACK * resident * threads);
    return failure.empty() ? nullptr : failure.c_str();
}

#define KERNEL(name, threads, blocks)                                                                            \
    static void name(const Arguments& a);                                                                        \
    extern "C" __attribute__((visibility("default"))) const char* emulate_##name(const Arguments* a, int grid, int block, int bytes, int resident, int descending) { \
        static Arguments copy;                                                                                   \
        copy = *a;                                                                                               \
        return emulated_launch([] { name(copy); }, grid, block, bytes, resident, descending != 0);               \
    }                                                                                                            \
    static void name(const Arguments& a)
