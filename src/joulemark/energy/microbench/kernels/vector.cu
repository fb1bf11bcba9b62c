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
