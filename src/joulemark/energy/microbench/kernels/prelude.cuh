// What all kernels share. Compiled in front of each family by NVRTC, which brings no headers: words are unsigned int.
//
// sink        written only on a value that never comes out, so that nothing above it is dead code
// operands    native values of the kernel's own number format, OPERANDS of them
// constants   32 values of the same format: addends and multipliers, read by lane, so that they live in registers
// tiles       footprint of a global access in tiles
// iterations  of the measured loop
// sleep_ns    pause after each iteration: the duty
#define KERNEL(name, threads)                                                                                         \
  extern "C" __global__ void __launch_bounds__(threads)                                                               \
      name(unsigned int* sink, const void* operands, const void* constants, unsigned int tiles, int iterations,       \
           int sleep_ns)
#define ARGUMENTS sink, operands, constants, tiles, iterations, sleep_ns
#define PARAMETERS                                                                                                    \
  unsigned int *sink, const void *operands, const void *constants, unsigned int tiles, int iterations, int sleep_ns

constexpr unsigned int OPERANDS = 1u << 18;
constexpr unsigned int NEVER = 0x2545f491u;

__device__ __forceinline__ unsigned int thread_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

template <class T>
__device__ __forceinline__ T operand(const void* operands, unsigned int k, unsigned int per_thread) {
  return static_cast<const T*>(operands)[(thread_index() * per_thread + k) & (OPERANDS - 1)];
}

template <class T>
__device__ __forceinline__ T constant(const void* constants) {
  return static_cast<const T*>(constants)[threadIdx.x & 31];
}

__device__ __forceinline__ void pause(int sleep_ns) {
  if (sleep_ns) __nanosleep(sleep_ns);
}

__device__ __forceinline__ void keep(unsigned int* sink, unsigned int bits) {
  if (bits == NEVER) sink[thread_index()] = bits;
}

__device__ __forceinline__ unsigned int shared_address(const void* p) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ unsigned int bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned int bits_of(double x) { return __double2hiint(x) ^ __double2loint(x); }
__device__ __forceinline__ unsigned int bits_of(unsigned int x) { return x; }
__device__ __forceinline__ unsigned int bits_of(int x) { return static_cast<unsigned int>(x); }
