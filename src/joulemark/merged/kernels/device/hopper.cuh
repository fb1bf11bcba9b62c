// What only compute capability 9.0 has: matrix products of four warps that read one operand from shared memory.
#pragma once
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
DEVICE void group_finish() {
    group_commit();
    group_wait<0>();
}
template <int N> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
DEVICE void store_matrix_4t(u32 at, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
// B: pixels of 32, 64 or 128 bytes, one behind the other, swizzled within eight of them as offset() in rows.cuh does.
template <int PIXEL> DEVICE u64 matrix_descriptor(u32 at) {
    constexpr u64 SWIZZLE = PIXEL == 128 ? 1 : PIXEL == 64 ? 2 : 3;
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(PIXEL * 8 >> 4) << 32 | SWIZZLE << 62;
}

// d[64 × 64] += a[64 × 16] · b[64 × 16]ᵀ. Warp w of the four holds rows 16 w … 16 w + 15 of d and a as in m16n8k16, octet by
// octet of columns. Products run on their own: between fence and wait nobody touches d or a; a wait for all but N commits
// gives the a of the others free. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate".
// After a wait for all: d is what the products have made, and nothing of it is read before.
template <int N> DEVICE void group_settle(float (&d)[N][4]) {
    UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}
// A matrix in shared memory: blocks of 8 rows × 16 bytes, 128 contiguous bytes each; the next 8 rows follow after
// `rows` bytes, the next 16 bytes of all rows after `columns` bytes.
DEVICE u64 plain_matrix(u32 at, u32 columns, u32 rows) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(columns >> 4) << 16 | (u64)(rows >> 4) << 32;
}
DEVICE u64 matrix_behind(u64 matrix, int bytes) { return matrix >> 32 << 32 | (u32)((u32)matrix + (bytes >> 4)); }
#define WARPGROUP_D "{" \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define WARPGROUP_ROW(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WARPGROUP_OUT WARPGROUP_ROW(0), WARPGROUP_ROW(1), WARPGROUP_ROW(2), WARPGROUP_ROW(3), \
    WARPGROUP_ROW(4), WARPGROUP_ROW(5), WARPGROUP_ROW(6), WARPGROUP_ROW(7)
#define WARPGROUP_PRODUCTS(type) \
    template <> DEVICE void warpgroup_multiply<type>(float (&d)[8][4], const u32 (&a)[4], u64 b, bool add) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." WARPGROUP_##type \
                     " " WARPGROUP_D ", {%32,%33,%34,%35}, %36, p, 1, 1, 0;}" \
                     : WARPGROUP_OUT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add)); \
    } \
    template <> DEVICE void warpgroup_multiply<type>(float (&d)[8][4], u64 a, u64 b, bool add) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." WARPGROUP_##type \
                     " " WARPGROUP_D ", %32, %33, p, 1, 1, 0, 0;}" : WARPGROUP_OUT : "l"(a), "l"(b), "r"((int)add)); \
    }
#define WARPGROUP_bf16 "bf16.bf16"
#define WARPGROUP_fp16 "f16.f16"
template <class T> DEVICE void warpgroup_multiply(float (&d)[8][4], const u32 (&a)[4], u64 b, bool add);
template <class T> DEVICE void warpgroup_multiply(float (&d)[8][4], u64 a, u64 b, bool add);
WARPGROUP_PRODUCTS(bf16)
WARPGROUP_PRODUCTS(fp16)
