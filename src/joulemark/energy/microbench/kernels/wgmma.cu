// Hopper's warpgroup products: 64 x 256 x k with both operands in shared memory, as library kernels use them.
//
// Two warpgroups per block, four k-slices of A each and four of B shared, in the core-matrix layout without swizzle;
// consecutive products take different slices of A and of B.

#define REGISTERS                                                                                                     \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                              \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                              \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                              \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                  \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define IN_OUT_8(reg, k)                                                                                              \
  "+" reg(c[k]), "+" reg(c[k + 1]), "+" reg(c[k + 2]), "+" reg(c[k + 3]), "+" reg(c[k + 4]), "+" reg(c[k + 5]),       \
      "+" reg(c[k + 6]), "+" reg(c[k + 7])
#define IN_OUT_32(reg, k) IN_OUT_8(reg, k), IN_OUT_8(reg, k + 8), IN_OUT_8(reg, k + 16), IN_OUT_8(reg, k + 24)
#define IN_OUT_128(reg) IN_OUT_32(reg, 0), IN_OUT_32(reg, 32), IN_OUT_32(reg, 64), IN_OUT_32(reg, 96)

#define WGMMA(struct_name, instruction, tail, Out, reg)                                                               \
  struct struct_name {                                                                                                \
    using Output = Out;                                                                                               \
    static __device__ __forceinline__ void step(Out* c, unsigned long long a, unsigned long long b) {                 \
      asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." instruction " {" REGISTERS     \
                   "}, %128, %129, p" tail ";}"                                                                       \
                   : IN_OUT_128(reg)                                                                                  \
                   : "l"(a), "l"(b));                                                                                 \
    }                                                                                                                 \
  };

WGMMA(Fp16, "m64n256k16.f32.f16.f16", ", 1, 1, 0, 0", float, "f")
WGMMA(Bf16, "m64n256k16.f32.bf16.bf16", ", 1, 1, 0, 0", float, "f")
WGMMA(Tf32, "m64n256k8.f32.tf32.tf32", ", 1, 1", float, "f")
WGMMA(Fp8, "m64n256k32.f32.e4m3.e4m3", ", 1, 1", float, "f")
WGMMA(Int8, "m64n256k32.s32.s8.s8", "", int, "r")

constexpr unsigned int A_SLICE = 64 * 32, B_SLICE = 256 * 32, SLICES = 4;

__device__ __forceinline__ unsigned long long descriptor(unsigned int address) {
  // PTX ISA, "Matrix descriptor format": address, leading and stride byte offsets, each in units of 16 bytes.
  constexpr unsigned long long layout = (128ull >> 4) << 16 | (256ull >> 4) << 32;
  return layout | (address & 0x3ffff) >> 4;
}

template <class Op>
__device__ __forceinline__ void warpgroup_products(PARAMETERS) {
  __shared__ __align__(1024) uint4 memory[(2 * SLICES * A_SLICE + SLICES * B_SLICE) / 16];
  for (unsigned int i = threadIdx.x; i < sizeof(memory) / 16; i += blockDim.x)
    memory[i] = static_cast<const uint4*>(operands)[(i + blockIdx.x * 331) & (OPERANDS - 1)];
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  typename Op::Output c[128];
#pragma unroll
  for (int k = 0; k < 128; k++) c[k] = 0;
  const unsigned int base = shared_address(memory);
  const unsigned long long a = descriptor(base + (threadIdx.x >> 7) * SLICES * A_SLICE);
  const unsigned long long b = descriptor(base + 2 * SLICES * A_SLICE);
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
    asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
    for (int r = 0; r < 8; r++)
      Op::step(c, a + (r & 3) * (A_SLICE >> 4), b + ((r * 3 + r / 4) & 3) * (B_SLICE >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    pause(sleep_ns);
  }
  unsigned int z = 0;
#pragma unroll
  for (int k = 0; k < 128; k++) z ^= bits_of(c[k]);
  keep(sink, z);
}

#define WGMMA_KERNEL(name, Op)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 1)                                                                \
      name(unsigned int* sink, const void* operands, const void* constants, unsigned int tiles, int iterations,       \
           int sleep_ns) {                                                                                            \
    warpgroup_products<Op>(ARGUMENTS);                                                                                \
  }

WGMMA_KERNEL(wgmma_fp16, Fp16)
WGMMA_KERNEL(wgmma_bf16, Bf16)
WGMMA_KERNEL(wgmma_tf32, Tf32)
WGMMA_KERNEL(wgmma_fp8, Fp8)
WGMMA_KERNEL(wgmma_int8, Int8)

// Products while as many bytes come from the L2 as in a library's product: more power than the limit allows at any
// clock near the highest, which shows how energy falls with the clock. The operand block has 4 MiB.
extern "C" __global__ void __launch_bounds__(256, 1)
    wgmma_fp16_l2(unsigned int* sink, const void* operands, const void* constants, unsigned int tiles, int iterations,
                  int sleep_ns) {
  constexpr int LOADS = 8, STEP = LOADS * 256 * 16, BLOCK = 1 << 22;
  __shared__ __align__(1024) uint4 memory[(2 * SLICES * A_SLICE + SLICES * B_SLICE) / 16];
  for (unsigned int i = threadIdx.x; i < sizeof(memory) / 16; i += blockDim.x)
    memory[i] = static_cast<const uint4*>(operands)[(i + blockIdx.x * 331) & (OPERANDS - 1)];
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  float c[128];
#pragma unroll
  for (int k = 0; k < 128; k++) c[k] = 0;
  const unsigned int base = shared_address(memory);
  const unsigned long long a = descriptor(base + (threadIdx.x >> 7) * SLICES * A_SLICE);
  const unsigned long long b = descriptor(base + 2 * SLICES * A_SLICE);
  const char* own = static_cast<const char*>(operands) + threadIdx.x * 16;
  unsigned int at = blockIdx.x * STEP & (BLOCK - 1), z = 0;
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
    uint4 v[LOADS];
#pragma unroll
    for (int r = 0; r < LOADS; r++)
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[r].x), "=r"(v[r].y), "=r"(v[r].z), "=r"(v[r].w)
                   : "l"(own + at + r * 4096)
                   : "memory");
    asm volatile("wgmma.fence.sync.aligned;");
#pragma unroll
    for (int r = 0; r < 8; r++)
      Fp16::step(c, a + (r & 3) * (A_SLICE >> 4), b + ((r * 3 + r / 4) & 3) * (B_SLICE >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
#pragma unroll
    for (int r = 0; r < LOADS; r++) {
      asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(z) : "r"(v[r].x), "r"(v[r].y));
      asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(z) : "r"(v[r].z), "r"(v[r].w));
    }
    at = (at + gridDim.x * STEP) & (BLOCK - 1);
    pause(sleep_ns);
  }
#pragma unroll
  for (int k = 0; k < 128; k++) z ^= bits_of(c[k]);
  keep(sink, z);
}
