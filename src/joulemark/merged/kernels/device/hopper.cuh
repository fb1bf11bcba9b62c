// What only compute capability 9.0 has: matrix products of four warps (a warpgroup) with operands in shared memory. What
// stands here is the same on a CPU; warpgroup.py adds the instructions, or their emulation.
//
// d[64 × N] += a[64 × 16] · b[N × 16]ᵀ. Warp w of the four holds rows 16 w … 16 w + 15 of d, and of a where that is in
// registers, as in m16n8k16, octet by octet of columns. Products run on their own: between group_fence and a wait nobody
// touches d or a; a wait for all but N commits gives the a of the others free. PTX ISA, "Asynchronous Warpgroup Level
// Matrix Multiply-Accumulate".
//
// A matrix in shared memory is named by 64 bits (there, "Matrix Descriptor Format"): 0–13 its address / 16, 16–29 and
// 32–45 two distances / 16, 49–51 the offset of its pattern (0: patterns begin at multiples of their own size), 62–63 the
// swizzle (0 none, 1 128, 2 64, 3 32 bytes). Rows hold their 16 numbers one behind the other.
#pragma once

// The number of a thread's warp, as the compiler sees that all lanes have the same: what follows from it, above all the
// descriptors of matrices, is then worked out once for a warp, in registers of its own.
DEVICE int own_warp() { return (int)shuffle(threadIdx.x >> 5, 0); }

template <class T, int N> DEVICE void wgmma(float (&d)[N / 8][4], const u32 (&a)[4], u64 b);
template <class T, int N> DEVICE void wgmma(float (&d)[N / 8][4], u64 a, u64 b);

// Rows of 32, 64 or 128 bytes, one behind the other, swizzled within eight of them as offset() in rows.cuh does: bits 4–6
// of an address are changed by its bits 7–9, so a matrix may begin at any row, and 32 bytes on for the next 16 numbers.
// The next eight rows follow after `eights` bytes.
template <int ROW> DEVICE u64 matrix_descriptor(u32 at, u32 eights = 8 * ROW) {
    constexpr u64 SWIZZLE = ROW == 128 ? 1 : ROW == 64 ? 2 : 3;
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(eights >> 4) << 32 | SWIZZLE << 62;
}
// Blocks of 8 rows × 16 bytes, 128 contiguous bytes each; the next 16 bytes of all rows follow after `columns` bytes, the
// next 8 rows after `rows` bytes.
DEVICE u64 plain_matrix(u32 at, u32 columns, u32 rows) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(columns >> 4) << 16 | (u64)(rows >> 4) << 32;
}
DEVICE u64 matrix_behind(u64 matrix, int bytes) { return matrix & ~0xffffffffull | (u32)matrix + (bytes >> 4); }  // no carry
