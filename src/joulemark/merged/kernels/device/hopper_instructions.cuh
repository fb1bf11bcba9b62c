// The vocabulary of device/hopper.cuh on a GPU.
#pragma once
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// After a wait for all: d is what the products have made, and nothing of it is read before.
template <int N> DEVICE void group_settle(float (&d)[N][4]) {
    UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}
template <int N> DEVICE void group_finish(float (&d)[N][4]) {
    group_wait<0>();
    group_settle(d);
}
template <int N> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
DEVICE void store_matrix_4t(u32 at, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
