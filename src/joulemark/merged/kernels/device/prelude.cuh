// The vocabulary of the kernels on a GPU: one function for each PTX instruction that they use.
// device/emulation.hpp defines the same names on a CPU. Fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define KERNEL(name, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Arguments a)

// Shared memory. Addresses are 32-bit offsets in its window.
extern __shared__ __align__(1024) char shared_window[];
DEVICE u32 shared_base() { return (u32)__cvta_generic_to_shared(shared_window); }
DEVICE u32 load_shared(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
DEVICE uint2 load_shared_2(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
DEVICE uint4 load_shared_4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE void store_shared(u32 at, u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE void store_shared_2(u32 at, u32 x, u32 y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
DEVICE void store_shared_4(u32 at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Asynchronous copies global → shared, 16 bytes each; zeros where `there` is false (nothing is read).
DEVICE void copy_async(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Global memory.
DEVICE u32 load_global(const void* p) { return __ldg((const u32*)p); }
DEVICE uint4 load_global_4(const void* p) { return __ldg((const uint4*)p); }
DEVICE uint4 load_again_4(const void* p) {  // not hoisted out of a loop to be kept in registers
    uint4 v;
    asm volatile("ld.global.ca.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE float load_float(const void* p) { return __ldg((const float*)p); }
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE u32 add_release(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
DEVICE u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEVICE void fence_gpu() { __threadfence(); }
DEVICE void spin() { __nanosleep(32); }

// Threads.
DEVICE int block_index() {  // read anew at each call: what follows from it need not stay in registers
    int v;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
    return v;
}
DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void named_sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE u32 shuffle(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

// Barriers in shared memory (mbarrier, 8 bytes each): a phase ends when `expected` arrivals have come.
DEVICE void barrier_start(u32 at, u32 expected) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(expected) : "memory");
}
DEVICE void barrier_arrive(u32 at) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(at) : "memory"); }
// Arrives when the thread's copies so far have landed.
DEVICE void barrier_arrive_copied(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}
#if __CUDA_ARCH__ >= 900
#define BARRIER_LOOK "try_wait"  // which sleeps for a while
#else
#define BARRIER_LOOK "test_wait"
#endif
DEVICE void barrier_wait(u32 at, u32 parity) {  // until the phase of this parity has ended
    u32 over;
    do {
        asm volatile("{.reg .pred p; mbarrier." BARRIER_LOOK ".parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(over) : "r"(at), "r"(parity) : "memory");
    } while (!over);
}

// Matrix fragments.
DEVICE void load_matrix_4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
DEVICE float tanh_fast(float v) {  // to 11 bits
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// Element types: what is stored, how two of them travel in 32 bits, and the matrix instruction for them.
//
// d += a · b, or d = c + a · b, where c is one number for each of a lane's two columns, or four numbers.
#define PRODUCT(shape, type, c) \
    "mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " c ";"
#define PRODUCT_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)
#define PRODUCTS(shape, type) \
    DEVICE static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
        asm volatile(PRODUCT(shape, type, "{%0,%1,%2,%3}") \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : PRODUCT_OPERANDS); \
    } \
    DEVICE static void mma_from(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1) { \
        asm volatile(PRODUCT(shape, type, "{%10,%11,%10,%11}") \
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : PRODUCT_OPERANDS, "f"(c0), "f"(c1)); \
    } \
    DEVICE static void mma_from(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) { \
        asm volatile(PRODUCT(shape, type, "{%10,%11,%12,%13}") \
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) \
                     : PRODUCT_OPERANDS, "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3])); \
    }
// What types of 16 bits have in common; `six` is two of that number.
#define HALF(type, six) \
    static constexpr int bytes = 2; \
    static constexpr u32 SIX = six; \
    DEVICE static u32 pack(float low, float high) { \
        u32 r; \
        asm("cvt.rn." type "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); \
        return r; \
    } \
    DEVICE static u32 pack_relu(float low, float high) { \
        u32 r; \
        asm("cvt.rn.relu." type "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); \
        return r; \
    } \
    DEVICE static u32 minimum(u32 v, u32 limit) { \
        asm("min." type "x2 %0, %0, %1;" : "+r"(v) : "r"(limit)); \
        return v; \
    } \
    DEVICE static u32 minimum_6(u32 v) { return minimum(v, SIX); } \
    PRODUCTS("m16n8k16", type) \
    DEVICE static void mma_8(float (&d)[4], u32 a0, u32 a1, u32 b) { \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};" \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b)); \
    }
struct bf16 {
    HALF("bf16", 0x40c040c0u)
    DEVICE static float low(u32 v) { return __uint_as_float(v << 16); }
    DEVICE static float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
};
struct fp16 {
    HALF("f16", 0x46004600u)
    DEVICE static float low(u32 v) {
        float f;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v));
        return f;
    }
    DEVICE static float high(u32 v) {
        float f;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(v));
        return f;
    }
};
// TF32: 32 bits stored, of which the instruction reads the upper 19; m16n8k8.
struct tf32 {
    static constexpr int bytes = 4;
    DEVICE static u32 round(float v) {
        u32 r;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
        return r;
    }
    PRODUCTS("m16n8k8", "tf32")
};
struct fp32 {
    static constexpr int bytes = 4;
};
