// The vocabulary of device/hopper.cuh on a CPU. Each warp makes its rows of a product when it comes to it.
#pragma once
DEVICE void fence_async() {}
DEVICE void group_fence() {}
DEVICE void group_commit() {}
template <int N> void group_wait() {}
template <int N> void group_settle(float (&)[N][4]) {}
template <int N> void group_finish(float (&)[N][4]) {}
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

// Row `row` of a matrix of 16 columns, by the bits of its descriptor.
template <class T> void emulated_row(u64 matrix, int row, float (&numbers)[16]) {
    const u32 start = (matrix & 0x3fff) << 4, columns = (matrix >> 16 & 0x3fff) << 4, rows = (matrix >> 32 & 0x3fff) << 4;
    const int swizzle = (int)(matrix >> 62), width = swizzle ? 256 >> swizzle : 16;
    for (int c = 0; c < 2; c++) {
        u32 at = start + row / 8 * rows + row % 8 * width + c * (swizzle ? 16 : columns);
        if (swizzle) at ^= (at >> 7 & (width / 16 - 1)) << 4;
        const u8* from = emulation::shared(at, 16);
        for (int i = 0; i < 8; i++) {
            u16 v;
            memcpy(&v, from + 2 * i, 2);
            numbers[8 * c + i] = T::widen(v);
        }
    }
}
// Both rows of a that a lane has in d, times b.
template <class T, int N> void emulated_products(float (&d)[N / 8][4], const float (&a)[2][16], u64 b) {
    for (int n = 0; n < N / 8; n++)
        for (int e = 0; e < 2; e++) {
            float column[16];
            emulated_row<T>(b, 8 * n + 2 * (emulation::lane() & 3) + e, column);
            for (int h = 0; h < 2; h++) {
                float sum = d[n][2 * h + e];
                for (int k = 0; k < 16; k++) sum += a[h][k] * column[k];
                d[n][2 * h + e] = sum;
            }
        }
}
template <class T, int N> void wgmma(float (&d)[N / 8][4], u64 a, u64 b) {
    float rows[2][16];
    for (int h = 0; h < 2; h++) emulated_row<T>(a, (emulation::me->thread >> 5 & 3) * 16 + (emulation::lane() >> 2) + 8 * h, rows[h]);
    emulated_products<T, N>(d, rows, b);
}
template <class T, int N> void wgmma(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) {
    auto& warp = emulation::warp();
    const int me = emulation::lane();
    for (int i = 0; i < 4; i++) warp.words[me][i] = a[i];
    warp_sync();
    float rows[2][16];
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 16; k++) rows[h][k] = T::element(warp.words[(me & ~3) + k % 8 / 2][h + k / 8 * 2], k % 2);
    warp_sync();
    emulated_products<T, N>(d, rows, b);
}
