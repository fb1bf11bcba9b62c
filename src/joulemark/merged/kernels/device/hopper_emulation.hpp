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
template <int PIXEL> u64 matrix_descriptor(u32 at) { return (u64)PIXEL << 32 | at; }
// D[64, N] += A[64, 16] · B[N, 16]ᵀ: a warp holds 16 rows of A and D.
template <class T, int N> void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 descriptor) {
    auto& warp = emulation::warp();
    const int me = emulation::lane(), g = me >> 2, t = me & 3;
    for (int i = 0; i < 4; i++) warp.words[me][i] = a[i];
    warp_sync();
    const u32 start = (u32)descriptor, pixel = (u32)(descriptor >> 32);
    float rows[2][16];
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++) rows[r][k] = T::element(warp.words[g * 4 + k % 8 / 2][r + k / 8 * 2], k % 2);
    for (int j = 0; j < N / 8; j++)
        for (int c = 0; c < 2; c++)
            for (int k = 0; k < 16; k++) {
                u32 at = start + (8 * j + 2 * t + c) * pixel + k * 2;
                at ^= (at >> 7 & (pixel / 16 - 1)) << 4;
                const float b = T::widen(emulated_load<u16>(at));
                for (int r = 0; r < 2; r++) d[4 * j + 2 * r + c] += rows[r][k] * b;
            }
    warp_sync();
}

// Products of a warpgroup: each warp makes its rows when it comes to them.
DEVICE void group_commit() {}
template <int N> void group_wait() {}
template <int N> void group_settle(float (&)[N][4]) {}
DEVICE u64 plain_matrix(u32 at, u32 columns, u32 rows) { return (u64)at | (u64)(columns >> 4) << 32 | (u64)(rows >> 4) << 48; }
DEVICE u64 matrix_behind(u64 matrix, int bytes) { return matrix + bytes; }
template <class T> float emulated_element(u64 matrix, int row, int column) {
    const u32 columns = (u32)(matrix >> 32 & 0xffff) << 4, rows = (u32)(matrix >> 48) << 4;
    const u32 at = (u32)matrix + column / 8 * columns + row / 8 * rows + row % 8 * 16 + column % 8 * 2;
    return T::widen(emulated_load<u16>(at));
}
template <class T, int N> void warpgroup_multiply(float (&d)[N][4], const u32 (&a)[4], u64 b, bool add) {
    auto& warp = emulation::warp();
    const int me = emulation::lane(), pair = me & 3;
    for (int i = 0; i < 4; i++) warp.words[me][i] = a[i];
    emulated_together([](emulation::Warp& w) { for (auto& one : w.words) for (int i = 0; i < 4; i++) one[4 + i] = one[i]; });
    u32 row[8][4];  // of both rows of this lane, from the lanes that hold them
    for (int lane = 0; lane < 4; lane++) memcpy(row[lane], &warp.words[(me & ~3) + lane][4], 16);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 4; i++) {
            float sum = add ? d[n][i] : 0;
            for (int k = 0; k < 16; k++)
                sum += T::element(row[k % 8 / 2][(i >> 1) + k / 8 * 2], k % 2) * emulated_element<T>(b, 8 * n + 2 * pair + i % 2, k);
            d[n][i] = sum;
        }
    warp_sync();
}
template <class T, int N> void warpgroup_multiply(float (&d)[N][4], u64 a, u64 b, bool add) {
    const int me = emulation::lane(), first = (emulation::me->thread >> 5 & 3) * 16 + (me >> 2);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 4; i++) {
            float sum = add ? d[n][i] : 0;
            for (int k = 0; k < 16; k++)
                sum += emulated_element<T>(a, first + (i >> 1) * 8, k) * emulated_element<T>(b, 8 * n + 2 * (me & 3) + i % 2, k);
            d[n][i] = sum;
        }
}
