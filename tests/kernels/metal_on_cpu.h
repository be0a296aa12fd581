// As much of Metal as our kernels use, on the CPU, over the fibers of cuda_on_cpu.h: a threadgroup is a block, a
// simdgroup a warp. Address spaces mean nothing here: `metal_as_opencl.h` has them.

#ifndef METAL_ON_CPU
#define METAL_ON_CPU
#include "cuda_on_cpu.h"

#define device
#define constant
#define threadgroup
using bfloat16_t = __nv_bfloat16;
using float16_t = __half;
#define thread

using uint = uint32_t;
using ushort = uint16_t;
using uchar = uint8_t;
using ulong = uint64_t;
struct uint3 { uint x, y, z; };

template <typename To, typename From>
To as_type(From x) {
  return __builtin_bit_cast(To, x);
}

namespace metal {
struct atomic_uint {
  uint value;
};
constexpr int memory_order_relaxed = 0;
inline uint atomic_load_explicit(const atomic_uint* from, int) { return from->value; }
inline void atomic_store_explicit(atomic_uint* to, uint x, int) { to->value = x; }
inline uint atomic_fetch_add_explicit(atomic_uint* to, uint x, int) { return (to->value += x) - x; }
enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }
// One barrier is enough where the words alternate: two shuffles later, every lane has read them.
template <typename X>
X simd_shuffle_xor(X x, ushort mask) {
  static_assert(sizeof(X) == 4);
  const int slot = self->groups++ % 2;
  std::memcpy(&self->warp->words[self->lane][slot], &x, 4);
  __syncwarp();
  std::memcpy(&x, &self->warp->words[self->lane ^ mask][slot], 4);
  return x;
}
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float abs(float x) { return std::fabs(x); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline int max(int a, int b) { return ::max(a, b); }
inline int min(int a, int b) { return ::min(a, b); }
namespace precise {
inline float sqrt(float x) { return std::sqrt(x); }
inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float log(float x) { return std::log(x); }
inline float sin(float x) { return std::sin(x); }
inline float cos(float x) { return std::cos(x); }
}  // namespace precise
}  // namespace metal

#define thread_index_in_simdgroup uint(self->lane)
#define thread_index_in_threadgroup uint(self->index.x)
#define simdgroup_index_in_threadgroup uint(self->index.x / 32)
#define threadgroup_position_in_grid (uint3{uint(blockIdx.x), uint(blockIdx.y), uint(blockIdx.z)})
#define thread_position_in_grid (uint3{uint(blockIdx.x * blockDim.x + self->index.x), uint(blockIdx.y), uint(blockIdx.z)})
#define thread_position_in_threadgroup (uint3{uint(self->index.x), uint(self->index.y), uint(self->index.z)})
#define threadgroups_per_grid (uint3{uint(gridDim.x), uint(gridDim.y), uint(gridDim.z)})

#endif
