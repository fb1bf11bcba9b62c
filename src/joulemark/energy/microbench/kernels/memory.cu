// Shared memory, L1, L2 and HBM: loads and stores whose footprint fits one level and no level above it.
//
// Accesses in groups of eight at constant offsets from one moving address. Every loaded word is used, two by one logic
// instruction: the assembler deletes loads and narrows vectors whose words nobody reads, volatile or not.

constexpr int ACCESSES = 8;
constexpr int GROUPS = 4;  // per iteration, where the address need not move in between: shared memory and L1

#define LOAD_128(space, v, address, reg)                                                                              \
  asm volatile("ld." space ".v4.u32 {%0, %1, %2, %3}, [%4];"                                                          \
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                                           \
               : reg(address)                                                                                         \
               : "memory")
#define LOAD_32(space, v, address, reg)                                                                               \
  asm volatile("ld." space ".u32 %0, [%1];" : "=r"(v.x) : reg(address) : "memory")
#define STORE_128(space, v, address, reg)                                                                             \
  asm volatile("st." space ".v4.u32 [%0], {%1, %2, %3, %4};" ::reg(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)   \
               : "memory")
#define STORE_32(space, v, address, reg) asm volatile("st." space ".u32 [%0], %1;" ::reg(address), "r"(v.x) : "memory")

__device__ __forceinline__ unsigned int three_way(unsigned int z, unsigned int a, unsigned int b) {
  asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(z) : "r"(a), "r"(b));
  return z;
}

__device__ __forceinline__ void use_128(uint2& z, const uint4* v) {
#pragma unroll
  for (int r = 0; r < ACCESSES; r++) {
    z.x = three_way(z.x, v[r].x, v[r].y);
    z.y = three_way(z.y, v[r].z, v[r].w);
  }
}

__device__ __forceinline__ void use_32(uint2& z, const uint4* v) {
#pragma unroll
  for (int r = 0; r < ACCESSES; r += 2) z.x = three_way(z.x, v[r].x, v[r + 1].x);
}

__device__ __forceinline__ void four_operands(uint4* v, const void* operands) {
#pragma unroll
  for (int s = 0; s < 4; s++)
    v[s] = static_cast<const uint4*>(operands)[(thread_index() * 4 + s) & (OPERANDS - 1)];
}

// Shared memory. LANE_BYTES apart: 16 or 4 sequential; 8 with words of 4 is a stride of two words, a two-way conflict.
// Narrow accesses move a quarter of the bytes per instruction: they tell the energy of an access from that of its bytes.
constexpr unsigned int SHARED_BYTES = 32768;

#define SHARED_READ(name, WIDTH, LANE_BYTES, STEP)                                                                    \
  KERNEL(name, 1024) {                                                                                                \
    __shared__ __align__(16) uint4 memory[SHARED_BYTES / 16];                                                         \
    for (unsigned int i = threadIdx.x; i < SHARED_BYTES / 16; i += blockDim.x)                                        \
      memory[i] = static_cast<const uint4*>(operands)[(i + blockIdx.x * 331) & (OPERANDS - 1)];                       \
    __syncthreads();                                                                                                  \
    const unsigned int own = shared_address(memory) + threadIdx.x * LANE_BYTES;                                       \
    uint2 z = {0, 0};                                                                                                 \
    _Pragma("unroll 1") for (int i = 0; i < iterations; i++) {                                                        \
      const unsigned int at = own + (i & 1) * (STEP / 8);                                                             \
      _Pragma("unroll") for (int g = 0; g < GROUPS; g++) {                                                            \
        uint4 v[ACCESSES];                                                                                            \
        _Pragma("unroll") for (int r = 0; r < ACCESSES; r++)                                                          \
            LOAD_##WIDTH("shared", v[r], at + r * STEP + g * (STEP / 4), "r");                                        \
        use_##WIDTH(z, v);                                                                                            \
      }                                                                                                               \
      pause(sleep_ns);                                                                                                \
    }                                                                                                                 \
    keep(sink, z.x ^ z.y);                                                                                            \
  }

SHARED_READ(shared_read, 128, 16, 1024)
SHARED_READ(shared_read_narrow, 32, 4, 1024)
SHARED_READ(shared_read_strided, 32, 8, 2048)

#define SHARED_WRITE(name, WIDTH, LANE_BYTES, STEP)                                                                   \
  KERNEL(name, 1024) {                                                                                                \
    __shared__ __align__(16) uint4 memory[SHARED_BYTES / 16];                                                         \
    uint4 v[4];                                                                                                       \
    four_operands(v, operands);                                                                                       \
    const unsigned int own = shared_address(memory) + threadIdx.x * LANE_BYTES;                                       \
    _Pragma("unroll 1") for (int i = 0; i < iterations; i++) {                                                        \
      const unsigned int at = own + (i & 1) * (STEP / 8);                                                             \
      _Pragma("unroll") for (int r = 0; r < ACCESSES * GROUPS; r++)                                                   \
          STORE_##WIDTH("shared", v[r & 3], at + r * (STEP / 4), "r");                                                \
      pause(sleep_ns);                                                                                                \
    }                                                                                                                 \
    __syncthreads();                                                                                                  \
    keep(sink, memory[threadIdx.x].x);                                                                                \
  }

SHARED_WRITE(shared_write, 128, 16, 1024)
SHARED_WRITE(shared_write_strided, 32, 8, 2048)

// Global memory. A tile is what a block touches in one iteration: 128 KiB sequential, 256 KiB where each lane has a
// sector (32 bytes) of its own. Blocks walk over all tiles together, so that the grid's footprint is tiles x tile; with
// as many tiles as SMs no two blocks read the same line at a time, which an L2 in front of them might serve once for
// both. With .ca each block stays inside its own 64 KiB, which its L1 holds.
#define SEQUENTIAL 16
#define SECTOR 32
#define LINE 128

struct Walk {
  unsigned int tile, step, tiles;
  __device__ __forceinline__ explicit Walk(unsigned int n) : tile(blockIdx.x % n), step(gridDim.x % n), tiles(n) {}
  __device__ __forceinline__ unsigned long long next() {
    const unsigned int now = tile;
    tile += step;
    if (tile >= tiles) tile -= tiles;
    return now;
  }
};

#define GLOBAL_READ(name, WIDTH, LANE_BYTES)                                                                          \
  KERNEL(name, 1024) {                                                                                                \
    const char* own = static_cast<const char*>(operands) + threadIdx.x * LANE_BYTES;                                  \
    uint2 z = {0, 0};                                                                                                 \
    Walk walk(tiles);                                                                                                 \
    _Pragma("unroll 1") for (int i = 0; i < iterations; i++) {                                                        \
      const char* at = own + walk.next() * (ACCESSES * 1024 * LANE_BYTES);                                            \
      uint4 v[ACCESSES];                                                                                              \
      _Pragma("unroll") for (int r = 0; r < ACCESSES; r++)                                                            \
          LOAD_##WIDTH("global.cg", v[r], at + r * 1024 * LANE_BYTES, "l");                                           \
      use_##WIDTH(z, v);                                                                                              \
      pause(sleep_ns);                                                                                                \
    }                                                                                                                 \
    keep(sink, z.x ^ z.y);                                                                                            \
  }

GLOBAL_READ(global_read, 128, SEQUENTIAL)
GLOBAL_READ(global_read_strided, 32, SECTOR)

// Each lane has a line of its own, of which an access takes one sector: 32 requests per access to the L2 instead of 4.
// The four sectors of a line are read by four accesses, so that the footprint is that of the strided kernel.
KERNEL(global_read_scattered, 1024) {
  const char* own = static_cast<const char*>(operands) + threadIdx.x * LINE;
  uint2 z = {0, 0};
  Walk walk(tiles);
#pragma unroll 1
  for (int i = 0; i < iterations; i++) {
    const char* at = own + walk.next() * (ACCESSES * 1024 * SECTOR);
    uint4 v[ACCESSES];
#pragma unroll
    for (int r = 0; r < ACCESSES; r++)
      LOAD_32("global.cg", v[r], at + (r & 1) * 1024 * LINE + (r >> 1) * SECTOR, "l");
    use_32(z, v);
    pause(sleep_ns);
  }
  keep(sink, z.x ^ z.y);
}

#define L1_READ(name, WIDTH, LANE_BYTES, STEP)                                                                        \
  KERNEL(name, 1024) {                                                                                                \
    const char* own = static_cast<const char*>(operands) + (blockIdx.x & (tiles - 1)) * 65536ull +                    \
                      threadIdx.x * LANE_BYTES;                                                                       \
    uint2 z = {0, 0};                                                                                                 \
    _Pragma("unroll 1") for (int i = 0; i < iterations; i++) {                                                        \
      const char* at = own + (i & 1) * (STEP / 8);                                                                    \
      _Pragma("unroll") for (int g = 0; g < GROUPS; g++) {                                                            \
        uint4 v[ACCESSES];                                                                                            \
        _Pragma("unroll") for (int r = 0; r < ACCESSES; r++)                                                          \
            LOAD_##WIDTH("global.ca", v[r], at + r * STEP + g * (STEP / 4), "l");                                     \
        use_##WIDTH(z, v);                                                                                            \
      }                                                                                                               \
      pause(sleep_ns);                                                                                                \
    }                                                                                                                 \
    keep(sink, z.x ^ z.y);                                                                                            \
  }

L1_READ(l1_read, 128, SEQUENTIAL, 2048)
L1_READ(l1_read_narrow, 32, 4, 2048)
L1_READ(l1_read_strided, 32, SECTOR, 1024)

#define GLOBAL_WRITE(name, STORE_BOTH, LANE_BYTES)                                                                    \
  KERNEL(name, 1024) {                                                                                                \
    char* own = reinterpret_cast<char*>(sink) + threadIdx.x * LANE_BYTES;                                             \
    uint4 v[4];                                                                                                       \
    four_operands(v, operands);                                                                                       \
    Walk walk(tiles);                                                                                                 \
    _Pragma("unroll 1") for (int i = 0; i < iterations; i++) {                                                        \
      char* at = own + walk.next() * (ACCESSES * 1024 * SEQUENTIAL);                                                  \
      STORE_BOTH;                                                                                                     \
      pause(sleep_ns);                                                                                                \
    }                                                                                                                 \
  }

#define ROWS                                                                                                          \
  _Pragma("unroll") for (int r = 0; r < ACCESSES; r++)                                                                \
      STORE_128("global", v[r & 3], at + r * 1024 * SEQUENTIAL, "l")
// Each sector is written by two instructions, half by half.
#define HALVES                                                                                                        \
  _Pragma("unroll") for (int r = 0; r < ACCESSES; r++)                                                                \
      STORE_128("global", v[r & 3], at + (r >> 1) * 1024 * SECTOR + (r & 1) * 16, "l")

GLOBAL_WRITE(global_write, ROWS, SEQUENTIAL)
GLOBAL_WRITE(global_write_strided, HALVES, SECTOR)
// Each lane writes one word of a sector of its own; eight instructions fill the sector.
#define WORDS                                                                                                         \
  _Pragma("unroll") for (int r = 0; r < ACCESSES; r++) STORE_32("global", v[r & 3], at + r * 4, "l")
GLOBAL_WRITE(global_write_scattered, WORDS, SECTOR)
