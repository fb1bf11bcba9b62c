// More of what compute capability 9.0 has: clusters of blocks that read each other's shared memory, copies of whole
// stretches that arrive at a barrier, and matrices stored from registers.
#pragma once
#define KERNEL_CLUSTER(name, threads, blocks, cluster) \
    extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, blocks) \
        name(const __grid_constant__ Arguments a)

// One thread arrives and says how many bytes copies will bring in the present phase: it ends when they have landed.
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(at), "r"(bytes) : "memory");
}
// Copies global → shared, a multiple of 16 bytes, announced by barrier_expect.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void barrier_wait_copied(u32 at, u32 parity) { barrier_wait(at, parity); }

// Lets the next kernel of the stream begin, as soon as all blocks have said so or ended, where it was launched for that.
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the kernel before this one has ended and all that it has written is seen: nothing of its is read or overwritten
// before. It has waited so for its own.
DEVICE void wait_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// All threads of all blocks of the cluster; what was written to shared memory before is seen behind it.
DEVICE void cluster_sync() {
    warp_sync();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two halves, for a thread whose reads have come: it orders no memory, so nothing of it is waited for. Between
// them a thread does what the others need not wait for; only then may it end.
DEVICE void cluster_arrive() {
    warp_sync();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    warp_sync();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// From the shared memory of the block with this rank, at the address that it has there.
DEVICE uint4 load_cluster_4(u32 at, u32 rank) {
    uint4 v;
    asm volatile("{.reg .b32 t; mapa.shared::cluster.u32 t, %4, %5; ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [t];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at), "r"(rank) : "memory");
    return v;
}

// Four 8×8 matrices of 16-bit numbers, as load_matrix_4 reads them: lane 8 m + i says where row i of matrix m goes.
DEVICE void store_matrix_4(u32 at, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// The same value, which the compiler takes for another one: what follows from it is not kept in registers over a loop.
DEVICE u32 anew(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
