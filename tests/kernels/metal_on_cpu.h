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
// Elements of a matrix by lane are where MLX's products have them (steel/gemm/mma.h). A sum is a chain of multiply-adds
// in the order of k, unless a test says that the units of this chip add up in another.
#ifndef OTHER_ORDER
#define OTHER_ORDER false
#endif
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(sizeof(T) == 4 && ROWS == 8 && COLUMNS == 8);
  T elements[2];
  T (&thread_elements())[2] { return elements; }
};
using Matrix = simdgroup_matrix<float, 8, 8>;
inline int line_of(int lane) { return lane / 16 * 4 + lane / 2 % 4; }
inline int pair_of(int lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }
inline void simdgroup_multiply_accumulate(Matrix& made, Matrix& left, Matrix& right, Matrix& before) {
  Warp& warp = *self->warp;
  std::memcpy(&warp.words[self->lane][2], left.elements, 8);  // others may not have read what they shuffle
  std::memcpy(&warp.words[self->lane][4], right.elements, 8);
  __syncwarp();
  float sums[2] = {before.elements[0], before.elements[1]};
  const int row = line_of(self->lane), column = pair_of(self->lane);
  auto element = [&](int matrix, int i, int j) {
    const int lane = i / 4 * 16 + i % 4 * 2 + j / 4 * 8 + j / 2 % 2;
    return __builtin_bit_cast(float, warp.words[lane][2 + 2 * matrix + j % 2]);
  };
  for (int e = 0; e < 2; ++e) {
    for (int i = 0; i < 8; ++i) {
      const int k = (OTHER_ORDER) ? i / 2 + i % 2 * 4 : i;
      sums[e] = std::fma(element(0, row, k), element(1, k, column + e), sums[e]);
    }
  }
  __syncwarp();
  std::memcpy(made.elements, sums, 8);
}

// Matrices in memory, and their products by the lanes of a simdgroup.
template <typename T, int DIMENSIONS>
struct dextents {
  T at[DIMENSIONS];
  dextents(T inner, T outer) : at{inner, outer} {}
};
struct tensor_inline {};
struct execution_simdgroup {};
template <typename T, typename Extents, typename Kind>
struct tensor {
  T* data;
  Extents extents;
  tensor(T* data, Extents extents) : data(data), extents(extents) {}
  float element(int outer, int inner) const {
    if (outer >= extents.at[1] || inner >= extents.at[0]) std::abort();
    return float(data[outer * extents.at[0] + inner]);
  }
};
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

namespace mpp::tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool left_transposed, right_transposed, relaxed;
  mode how;
  constexpr matmul2d_descriptor(int m, int n, int k, bool left, bool right, bool relaxed, mode how)
      : m(m), n(n), k(k), left_transposed(left), right_transposed(right), relaxed(relaxed), how(how) {}
};
// A lane's elements are anywhere, and some are none: not as on any chip.
template <int M, int N>
struct CooperativeTensor {
  static constexpr int COUNT = M * N / 32, CAPACITY = COUNT + 2;
  float elements[CAPACITY];
  CooperativeTensor() { std::memset(elements, 255, sizeof elements); }
  static constexpr int get_capacity() { return CAPACITY; }
  bool is_valid_element(int i) const { return i > 0 && i <= COUNT; }
  struct Index { int at[2]; int operator[](int i) const { return at[i]; } };
  Index get_multidimensional_index(int i) const {
    if (!is_valid_element(i)) std::abort();
    const int place = (i - 1) * 32 + self->lane * 7 % 32;
    return {place / M, place % M};
  }
  float& operator[](int i) { return elements[i]; }
};
template <matmul2d_descriptor D, typename Scope>
struct matmul2d {
  static_assert(!D.left_transposed && D.right_transposed && !D.relaxed);
  template <typename A, typename B, typename C>
  CooperativeTensor<D.m, D.n> get_destination_cooperative_tensor() const { return {}; }
  template <typename A, typename B>
  void run(const A& a, const B& b, CooperativeTensor<D.m, D.n>& made) const {
    for (int i = 0; i < made.get_capacity(); ++i) {
      if (!made.is_valid_element(i)) continue;
      const auto at = made.get_multidimensional_index(i);
      float sum = D.how == matmul2d_descriptor::mode::multiply ? 0.0f : made[i];
      for (int k = 0; k < D.k; ++k) sum = std::fma(a.element(at[1], k), b.element(at[0], k), sum);
      made[i] = sum;
    }
  }
};
}  // namespace mpp::tensor_ops

#define thread_index_in_simdgroup uint(self->lane)
#define thread_index_in_threadgroup uint(self->index.x)
#define simdgroup_index_in_threadgroup uint(self->index.x / 32)
#define threadgroup_position_in_grid (uint3{uint(blockIdx.x), uint(blockIdx.y), uint(blockIdx.z)})
#define thread_position_in_grid (uint3{uint(blockIdx.x * blockDim.x + self->index.x), uint(blockIdx.y), uint(blockIdx.z)})
#define thread_position_in_threadgroup (uint3{uint(self->index.x), uint(self->index.y), uint(self->index.z)})
#define threadgroups_per_grid (uint3{uint(gridDim.x), uint(gridDim.y), uint(gridDim.z)})

#endif
