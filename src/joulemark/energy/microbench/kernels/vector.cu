// Vector, integer, logic and special-function pipes: eight independent chains per thread, no memory in the loop.
//
// x <- x^2 + k. From x in [0.5, 1.8] with k = -1.99 it is chaotic and bounded, so that every operand bit keeps toggling
// (with k = -2 a sixth of the FP16 trajectories stick); from 0 with k = 0 no bit moves; from 1.5 with k = -0.75 it
// stays where it is, exactly.

struct Fp32 {
  using Value = float;
  static constexpr int STEPS = 16;
  static __device__ __forceinline__ void step(float& x, float k, float) {
    asm volatile("fma.rn.f32 %0, %0, %0, %1;" : "+f"(x) : "f"(k));
  }
};

struct Fp64 {
  using Value = double;
  static constexpr int STEPS = 16;
  static __device__ __forceinline__ void step(double& x, double k, double) {
    asm volatile("fma.rn.f64 %0, %0, %0, %1;" : "+d"(x) : "d"(k));
  }
};

struct Fp16x2 {
  using Value = unsigned int;
  static constexpr int STEPS = 16;
  static __device__ __forceinline__ void step(unsigned int& x, unsigned int k, unsigned int) {
    asm volatile("fma.rn.f16x2 %0, %0, %0, %1;" : "+r"(x) : "r"(k));
  }
};

// x <- m x + k: a linear congruential generator for an odd m; m = 1, k = 0 holds a constant.
struct Integer {
  using Value = unsigned int;
  static constexpr int STEPS = 16;
  static __device__ __forceinline__ void step(unsigned int& x, unsigned int k, unsigned int m) {
    asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x) : "r"(m), "r"(k));
  }
};

// Rotation by a byte, then a three-input exclusive or.
struct Logic {
  using Value = unsigned int;
  static constexpr int STEPS = 8;
  static __device__ __forceinline__ void step(unsigned int& x, unsigned int k, unsigned int m) {
    asm volatile("{.reg .u32 t; shf.l.wrap.b32 t, %0, %0, 8; lop3.b32 %0, t, %1, %2, 0x96;}" : "+r"(x) : "r"(m), "r"(k));
  }
};

// Square root, then (mantissa xor k): alone, the root runs into its fixed point 1.
struct Special {
  using Value = unsigned int;
  static constexpr int STEPS = 8;
  static __device__ __forceinline__ void step(unsigned int& x, unsigned int k, unsigned int m) {
    asm volatile(
        "{.reg .f32 t; mov.b32 t, %0; sqrt.approx.ftz.f32 t, t; mov.b32 %0, t; lop3.b32 %0, %0, %1, %2, 0x6a;}"
        : "+r"(x)
        : "r"(m), "r"(k));
  }
};

template <class Op>
__device__ __forceinline__ void chains(PARAMETERS) {
  using Value = typename Op::Value;
  Value x[8];
#pragma unroll
  for (int c = 0; c < 8; c++) x[c] = operand<Value>(operands, c, 8);
  const Value k = static_cast<const Value*>(constants)[threadIdx.x & 31];
  const Value m = static_cast<const Value*>(constants)[32 + (threadIdx.x & 31)];
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int r = 0; r < Op::STEPS; r++) {
#pragma unroll
      for (int c = 0; c < 8; c++) Op::step(x[c], k, m);
    }
    pause(sleep_ns);
  }
  unsigned int z = 0;
#pragma unroll
  for (int c = 0; c < 8; c++) z ^= bits_of(x[c]);
  keep(sink, z);
}

KERNEL(fp32, 1024) { chains<Fp32>(ARGUMENTS); }
KERNEL(fp64, 1024) { chains<Fp64>(ARGUMENTS); }
KERNEL(fp16x2, 1024) { chains<Fp16x2>(ARGUMENTS); }
KERNEL(integer, 1024) { chains<Integer>(ARGUMENTS); }
KERNEL(logic, 1024) { chains<Logic>(ARGUMENTS); }
KERNEL(special, 1024) { chains<Special>(ARGUMENTS); }

// What library code does: each multiply-add reads three registers, and the values it multiplies change from one to the
// next, as in the inner loop of a matrix product on tiles in registers. x <- a b - x visits new values in every step and
// comes back after two rounds of an odd number of steps, so that the sums neither grow nor settle.
struct ThreeFp32 {
  using Value = float;
  static constexpr int M = 4, N = 4, ROUNDS = 3;
  static __device__ __forceinline__ void step(float& x, float a, float b) {
    asm volatile("{.reg .f32 n; neg.f32 n, %0; fma.rn.f32 %0, %1, %2, n;}" : "+f"(x) : "f"(a), "f"(b));
  }
};

struct ThreeFp64 {
  using Value = double;
  static constexpr int M = 2, N = 2, ROUNDS = 9;
  static __device__ __forceinline__ void step(double& x, double a, double b) {
    asm volatile("{.reg .f64 n; neg.f64 n, %0; fma.rn.f64 %0, %1, %2, n;}" : "+d"(x) : "d"(a), "d"(b));
  }
};

constexpr int DEPTH = 3;  // values of each row and column that take turns

template <class Op>
__device__ __forceinline__ void tile(PARAMETERS) {
  using Value = typename Op::Value;
  constexpr int M = Op::M, N = Op::N, TAKEN = M * N + DEPTH * (M + N);
  Value x[M][N], a[DEPTH][M], b[DEPTH][N];
#pragma unroll
  for (int k = 0; k < TAKEN; k++) {
    const Value v = operand<Value>(operands, k, TAKEN);
    if (k < M * N)
      x[k / N][k % N] = v;
    else if (k < M * N + DEPTH * M)
      a[(k - M * N) / M][(k - M * N) % M] = v;
    else
      b[(k - M * N - DEPTH * M) / N][(k - M * N - DEPTH * M) % N] = v;
  }
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int s = 0; s < Op::ROUNDS * DEPTH; s++) {
#pragma unroll
      for (int r = 0; r < M; r++) {
#pragma unroll
        for (int c = 0; c < N; c++) Op::step(x[r][c], a[s % DEPTH][r], b[s % DEPTH][c]);
      }
    }
    pause(sleep_ns);
  }
  unsigned int z = 0;
#pragma unroll
  for (int k = 0; k < M * N; k++) z ^= bits_of(x[k / N][k % N]);
  keep(sink, z);
}

KERNEL(fp32_tile, 1024) { tile<ThreeFp32>(ARGUMENTS); }
KERNEL(fp64_tile, 1024) { tile<ThreeFp64>(ARGUMENTS); }

// The same product with rows and columns from shared memory in each step.
__device__ __forceinline__ void load_four(float* v, unsigned int address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}

KERNEL(fp32_shared, 1024) {
  constexpr int STEPS = 9;
  __shared__ __align__(16) float memory[8192];
  for (unsigned int i = threadIdx.x; i < 8192; i += blockDim.x)
    memory[i] = static_cast<const float*>(operands)[(i + blockIdx.x * 331) & (OPERANDS - 1)];
  __syncthreads();
  float x[4][4];
#pragma unroll
  for (int k = 0; k < 16; k++) x[k / 4][k % 4] = operand<float>(operands, k, 16);
  const unsigned int own = shared_address(memory) + (threadIdx.x & 31) * 16 + (threadIdx.x >> 5) * 256;
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      float a[4], b[4];
      load_four(a, own + s * 1024);
      load_four(b, own + s * 1024 + 512);
#pragma unroll
      for (int k = 0; k < 16; k++) ThreeFp32::step(x[k / 4][k % 4], a[k / 4], b[k % 4]);
    }
    pause(sleep_ns);
  }
  unsigned int z = 0;
#pragma unroll
  for (int k = 0; k < 16; k++) z ^= bits_of(x[k / 4][k % 4]);
  keep(sink, z);
}
