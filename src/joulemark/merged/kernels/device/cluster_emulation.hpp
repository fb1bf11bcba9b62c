// The vocabulary of device/cluster.cuh on a CPU; CLUSTER, the blocks of a cluster, stands in front of this text.
//
// A copy of a stretch lands when somebody waits for it, or at once where warps run in descending order: a missing wait
// shows in the one, a place that is written while it is still read in the other.
#pragma once
#define KERNEL_CLUSTER(name, threads, blocks, cluster) KERNEL(name, threads, blocks)

DEVICE void emulated_land(u32 barrier) {
    auto& bulks = emulation::block().bulks[barrier];
    if (bulks.empty()) return;
    auto& phases = emulated_barrier(barrier);
    for (const auto& one : bulks) {
        for (u32 i = 0; i < one.bytes; i += 16) memcpy(emulation::shared(one.to + i, 16), (const char*)one.from + i, 16);
        phases.pending -= one.bytes;
    }
    bulks.clear();
    if (!phases.pending) phases.pending = phases.expected, phases.ended++, emulation::progress++;
}
DEVICE void barrier_expect(u32 at, u32 bytes) { emulated_barrier(at).pending += bytes - 1; }
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16 || (uintptr_t)from % 16) emulation::fail("copy_bulk takes multiples of 16 bytes");
    emulation::block().bulks[barrier].push_back({to, from, bytes});
    if (emulation::backwards) emulated_land(barrier);
}
DEVICE void barrier_wait_copied(u32 at, u32 parity) {
    emulated_land(at);
    barrier_wait(at, parity);
}
DEVICE void launch_next() {}
DEVICE void wait_previous() {}
DEVICE void cluster_sync() {
    const int first = emulation::me->block / CLUSTER * CLUSTER;
    emulation::meet((*emulation::blocks)[first].cluster, CLUSTER * emulation::block().threads, [] {});
}
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() { cluster_sync(); }
DEVICE uint4 load_cluster_4(u32 at, u32 rank) {
    const int own = emulation::me->block;
    emulation::me->block = own / CLUSTER * CLUSTER + (int)rank;
    const uint4 v = load_shared_4(at);
    emulation::me->block = own;
    return v;
}
DEVICE void store_matrix_4(u32 at, u32 r0, u32 r1, u32 r2, u32 r3) {
    auto& warp = emulation::warp();
    const int me = emulation::lane();
    warp.address[me] = at;
    const u32 words[4] = {r0, r1, r2, r3};
    for (int m = 0; m < 4; m++) warp.words[me][m] = words[m];
    emulated_together([](emulation::Warp& w) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++)
                memcpy(emulation::shared(w.address[8 * m + (lane >> 2)], 16) + 4 * (lane & 3), &w.words[lane][m], 4);
    });
}
DEVICE u32 anew(u32 v) { return v; }
