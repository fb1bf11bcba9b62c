// The vocabulary of device/hopper.cuh on a CPU.
#pragma once
DEVICE void fence_async() {}
DEVICE void group_fence() {}
DEVICE void group_finish() { named_sync(12 + (threadIdx.x >> 7), 128); }
template <int N> void registers_down() {}
template <int N> void registers_up() {}
DEVICE void store_matrix_4t(u32 at, u32 r0, u32 r1, u32 r2, u32 r3) {
    auto& warp = emulation::warp();
    const int me = emulation::lane();
    warp.address[me] = at;
    const u32 words[4] = {r0, r1, r2, r3};
    for (int m = 0; m < 4; m++) warp.words[me][m] = words[m];
    emulated_together([](emulation::Warp& w) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++)
                for (int h = 0; h < 2; h++) {
                    const u16 v = (u16)(w.words[lane][m] >> (16 * h));
                    memcpy(emulation::shared(w.address[8 * m + 2 * (lane & 3) + h], 16) + 2 * (lane >> 2), &v, 2);
                }
    });
}
DEVICE u64 matrix_descriptor(u32 at) { return at; }
// D[64, N] += A[64, 16] · B[N, 16]ᵀ: a warp holds 16 rows of A and D.
template <class T, int N> void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 descriptor) {
    auto& warp = emulation::warp();
    const int me = emulation::lane(), g = me >> 2, t = me & 3;
    for (int i = 0; i < 4; i++) warp.words[me][i] = a[i];
    warp_sync();
    float rows[2][16];
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++) rows[r][k] = T::element(warp.words[g * 4 + k % 8 / 2][r + k / 8 * 2], k % 2);
    for (int j = 0; j < N / 8; j++)
        for (int c = 0; c < 2; c++)
            for (int k = 0; k < 16; k++) {
                u32 at = (u32)descriptor + (8 * j + 2 * t + c) * 128 + k * 2;
                at ^= (at >> 7 & 7) << 4;
                const float b = T::widen(emulated_load<u16>(at));
                for (int r = 0; r < 2; r++) d[4 * j + 2 * r + c] += rows[r][k] * b;
            }
    warp_sync();
}
