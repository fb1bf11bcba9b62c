// Tensor pipes by mma.sync with operands in registers. Four A and four B fragments take turns, so that both operands
// change with every instruction: a product of fixed operands repeated toggles far less than real work.

template <class In, class Out, int A, int B, int C>
struct Shape {
  using Input = In;
  using Output = Out;
  static constexpr int NA = A, NB = B, NC = C;
};

#define MMA_4_2_4(struct_name, instruction, Out, reg)                                                                 \
  struct struct_name : Shape<unsigned int, Out, 4, 2, 4> {                                                            \
    static __device__ __forceinline__ void step(Out* c, const unsigned int* a, const unsigned int* b) {               \
      asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                     \
                   : "+" reg(c[0]), "+" reg(c[1]), "+" reg(c[2]), "+" reg(c[3])                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
    }                                                                                                                 \
  };

#if __CUDA_ARCH__ >= 800
MMA_4_2_4(Fp16, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", float, "f")
MMA_4_2_4(Bf16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", float, "f")
MMA_4_2_4(Tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", float, "f")
MMA_4_2_4(Int8, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", int, "r")

struct Fp64 : Shape<double, double, 1, 1, 2> {
  static __device__ __forceinline__ void step(double* c, const double* a, const double* b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a[0]), "d"(b[0]));
  }
};
#else
struct Fp16 : Shape<unsigned int, float, 2, 1, 4> {
  static __device__ __forceinline__ void step(float* c, const unsigned int* a, const unsigned int* b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  }
};

struct Int8 : Shape<unsigned int, int, 1, 1, 2> {
  static __device__ __forceinline__ void step(int* c, const unsigned int* a, const unsigned int* b) {
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(c[0]), "+r"(c[1])
                 : "r"(a[0]), "r"(b[0]));
  }
};
#endif

// On Hopper and sm_100 the FP8 form of mma.sync is emulated by conversions and FP16 products: not offered there.
#define FP8_MMA (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)

#if FP8_MMA
MMA_4_2_4(Fp8, "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", float, "f")
#endif

template <class Op>
__device__ __forceinline__ void products(PARAMETERS) {
  constexpr int SETS = 4, PER_THREAD = SETS * (Op::NA + Op::NB);
  typename Op::Input a[SETS][Op::NA], b[SETS][Op::NB];
  typename Op::Output c[SETS][Op::NC];
#pragma unroll
  for (int s = 0; s < SETS; s++) {
#pragma unroll
    for (int k = 0; k < Op::NA; k++) a[s][k] = operand<typename Op::Input>(operands, s * Op::NA + k, PER_THREAD);
#pragma unroll
    for (int k = 0; k < Op::NB; k++)
      b[s][k] = operand<typename Op::Input>(operands, SETS * Op::NA + s * Op::NB + k, PER_THREAD);
#pragma unroll
    for (int k = 0; k < Op::NC; k++) c[s][k] = 0;
  }
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int r = 0; r < 32; r++) Op::step(c[r % SETS], a[r % SETS], b[(r + r / SETS) % SETS]);
    pause(sleep_ns);
  }
  unsigned int z = 0;
#pragma unroll
  for (int s = 0; s < SETS; s++) {
#pragma unroll
    for (int k = 0; k < Op::NC; k++) z ^= bits_of(c[s][k]);
  }
  keep(sink, z);
}

KERNEL(mma_fp16, 512) { products<Fp16>(ARGUMENTS); }
KERNEL(mma_int8, 512) { products<Int8>(ARGUMENTS); }
#if __CUDA_ARCH__ >= 800
KERNEL(mma_bf16, 512) { products<Bf16>(ARGUMENTS); }
KERNEL(mma_tf32, 512) { products<Tf32>(ARGUMENTS); }
KERNEL(mma_fp64, 512) { products<Fp64>(ARGUMENTS); }
#endif
#if FP8_MMA
KERNEL(mma_fp8, 512) { products<Fp8>(ARGUMENTS); }
#endif
