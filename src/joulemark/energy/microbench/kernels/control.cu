// Static power and instruction issue: warps that sleep, grids without work, instructions that a predicate switches off.

KERNEL(empty, 1024) {}

KERNEL(sleep, 1024) {
#pragma unroll 1
  for (int i = 0; i < iterations; i++) __nanosleep(1000);
  if (tiles == NEVER) sink[0] = tiles;
}

// An FMA whose predicate is false is fetched, decoded and issued; its operands are not used and its pipe does nothing.
KERNEL(issue, 1024) {
  float x[8];
  const float k = constant<float>(constants);
#pragma unroll
  for (int c = 0; c < 8; c++) x[c] = operand<float>(operands, c, 8);
  const unsigned int on = tiles == NEVER;
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int r = 0; r < 16; r++) {
#pragma unroll
      for (int c = 0; c < 8; c++)
        asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p fma.rn.f32 %0, %0, %0, %1;}" : "+f"(x[c]) : "f"(k), "r"(on));
    }
    pause(sleep_ns);
  }
  unsigned int z = 0;
#pragma unroll
  for (int c = 0; c < 8; c++) z ^= bits_of(x[c]);
  keep(sink, z);
}

// Pointer chase: operands hold one cycle through all lines of a footprint, as byte offsets; sink gets the clock cycles
// of all steps and the last offset (Saavedra and Smith, "Measuring Cache and TLB Performance", IEEE ToC 1995).
extern "C" __global__ void chase(unsigned int* sink, const void* operands, const void* constants, unsigned int tiles,
                                 int iterations, int sleep_ns) {
  const char* base = static_cast<const char*>(operands);
  unsigned int at = 0;
  for (unsigned int i = 0; i < tiles; i++)  // one round to warm the caches
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(at) : "l"(base + at) : "memory");
  const long long begin = clock64();
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
#pragma unroll
    for (int r = 0; r < 16; r++) asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(at) : "l"(base + at) : "memory");
  }
  const long long cycles = clock64() - begin;
  sink[0] = static_cast<unsigned int>(cycles);
  sink[1] = static_cast<unsigned int>(cycles >> 32);
  sink[2] = at;
}

// Fills a buffer of tiles x 16 bytes with copies of the operand block.
extern "C" __global__ void fill(unsigned int* sink, const void* operands, const void* constants, unsigned int tiles,
                                int iterations, int sleep_ns) {
  const uint4* from = static_cast<const uint4*>(operands);
  uint4* to = reinterpret_cast<uint4*>(sink);
  for (unsigned int i = thread_index(); i < tiles; i += gridDim.x * blockDim.x) to[i] = from[i & (OPERANDS - 1)];
}
