// As much of CUDA as our kernels use, on the CPU: a block's threads are fibers that take turns at every barrier. Blocks
// run one after the other, or, where they wait for each other, each in a thread of this machine.
// Arithmetic is IEEE single precision with the same roundings, so bits that do not depend on the width of a window
// here do not depend on it there; only expf and its like may differ in the last bit.
//
// Every kernel is compiled with this: few and small headers. What can be compiled once is in cuda_on_cpu.cpp.
#ifndef CUDA_ON_CPU
#define CUDA_ON_CPU

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

template <typename X>
X max(X a, X b) {
  return a < b ? b : a;
}
template <typename X>
X min(X a, X b) {
  return b < a ? b : a;
}

struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
namespace cuda { namespace std = ::std; }
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 { unsigned x = 0, y = 0, z = 0; };
struct Shape { int32_t at[10]; int32_t operator[](int i) const { return at[i]; } };

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    bits = std::isnan(x) ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
};
using __half = _Float16;

struct Barrier {
  int size, arrived = 0, generation = 0;
};
struct Warp {
  Barrier barrier;
  uint32_t words[32][8];
  const void* pointers[32];
};
struct Copy {
  void* to;
  const void* from;
  int bytes, group;
};
struct Product {
  int group;
  void (*run)(void*);  // and delete
  void* what;
};
struct Thread {
  dim3 index;
  Warp* warp;
  int lane;
  std::vector<Copy> copies;
  int groups = 0;
  std::vector<Product> products;
  int product_groups = 0;
};
constexpr int ROOM = 232448 + 2048;
extern constinit thread_local Thread* self;
extern constinit thread_local dim3 blockIdx;
extern constinit dim3 blockDim, gridDim;
// Aligned as the kernel declares it, and no better: what relies on more shows.
extern constinit thread_local unsigned char shared_room[ROOM] __align__(2048);
#define dynamic_shared (shared_room + SHARED_ALIGNMENT)
#define threadIdx (self->index)

void meet(Barrier& barrier);
void land_copies(int pending);
void run_products(int pending);
void give_way();
void __syncthreads();
void launch_threads(dim3 grid, dim3 block, bool together, void (*kernel)(const void*), const void* what);

// Run `kernel` in every thread of every block, one block after the other or all of them together.
template <typename Kernel>
void launch(dim3 grid, dim3 block, bool together, const Kernel& kernel) {
  launch_threads(
      grid, block, together, [](const void* what) { (*static_cast<const Kernel*>(what))(); }, &kernel);
}
template <typename Run>
void run_later(const Run& run) {
  auto once = [](void* what) {
    (*static_cast<Run*>(what))();
    delete static_cast<Run*>(what);
  };
  self->products.push_back({self->product_groups, once, new Run(run)});
}

inline void __syncwarp() { meet(self->warp->barrier); }

template <typename X>
X __shfl_xor_sync(unsigned, X x, int mask) {
  static_assert(sizeof(X) == 4);
  Warp& warp = *self->warp;
  std::memcpy(&warp.words[self->lane][0], &x, 4);
  __syncwarp();
  std::memcpy(&x, &warp.words[self->lane ^ mask][0], 4);
  __syncwarp();
  return x;
}

template <typename X>
X __shfl_sync(unsigned, X x, int from) {
  static_assert(sizeof(X) == 4);
  Warp& warp = *self->warp;
  std::memcpy(&warp.words[self->lane][0], &x, 4);
  __syncwarp();
  std::memcpy(&x, &warp.words[from][0], 4);
  __syncwarp();
  return x;
}

inline uint32_t __ballot_sync(unsigned, bool vote) {
  Warp& warp = *self->warp;
  warp.words[self->lane][0] = vote;
  __syncwarp();
  uint32_t all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= warp.words[lane][0] << lane;
  __syncwarp();
  return all;
}
template <typename Reduce>
uint32_t reduced(uint32_t x, Reduce reduce) {
  Warp& warp = *self->warp;
  warp.words[self->lane][0] = x;
  __syncwarp();
  for (int lane = 0; lane < 32; ++lane) x = reduce(x, warp.words[lane][0]);
  __syncwarp();
  return x;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
  return reduced(x, [](uint32_t a, uint32_t b) { return max(a, b); });
}
inline int __reduce_min_sync(unsigned, int x) {  // of numbers that are not negative
  return reduced(x, [](uint32_t a, uint32_t b) { return min(a, b); });
}
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) made |= uint32_t(bytes >> 8 * (which >> 4 * i & 7) & 0xFF) << 8 * i;
  return made;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline int __popc(uint32_t word) { return __builtin_popcount(word); }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <typename T>
T __hfma(T a, T b, T c) {
  return T(std::fma(float(a), float(b), float(c)));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float rsqrtf(float a) { return 1 / std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename X>
X atomicAdd(X* to, X x) {
  return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST);
}
template <typename X>
X atomicMin(X* to, X x) {
  const X before = *to;
  *to = min(before, x);
  return before;
}
template <typename X>
X atomicMax(X* to, X x) {
  const X before = *to;
  *to = max(before, x);
  return before;
}
inline unsigned atomicExch(unsigned* to, unsigned x) { return __atomic_exchange_n(to, x, __ATOMIC_SEQ_CST); }
long long clock64();  // a slow one: what takes a card 100 ms may take this machine minutes

// What src/headstart/kernels/tensor_core.cu says in PTX, by the fragment layouts of the PTX manual.
namespace headstart {
inline void prefetch(const void*, unsigned) {}
inline void add_release(unsigned long long* to, unsigned long long x) {
  __atomic_fetch_add(to, x, __ATOMIC_RELEASE);
}
inline int thread_again() { return int(threadIdx.x); }
inline void load_and_forget(const void*) {}
void named_barrier(int number, int threads);
template <typename X>
X load_acquire(const X* from) {
  give_way();
  return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}

inline unsigned char* offset_address(void* pointer, int offset) {
  return reinterpret_cast<unsigned char*>(reinterpret_cast<uintptr_t>(pointer) ^ offset);
}

inline unsigned char* address_of(void* pointer, int offset) { return static_cast<unsigned char*>(pointer) + offset; }

// Copies land as late as they may, so that a missing wait shows.
template <bool = false>
void copy_16_bytes(void* to, const void* from, int there = 16) {
  std::memset(to, 0, 16);
  self->copies.push_back({to, from, there, self->groups});
}
template <int BYTES>
void copy_bytes(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % BYTES || reinterpret_cast<uintptr_t>(to) % BYTES) std::abort();
  std::memset(to, 0, BYTES);
  self->copies.push_back({to, from, BYTES, self->groups});
}
inline void commit_copies() { ++self->groups; }
template <int N>
void wait_for_copies() {
  land_copies(N);
}

inline uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xFFFF) | b << 16; }
inline uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xFFFF0000); }
template <typename T>
uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  T left[2], right[2];
  std::memcpy(left, &a, 4), std::memcpy(right, &b, 4);
  T made[2] = {T(float(left[0]) * float(right[0])), T(float(left[1]) * float(right[1]))};
  std::memcpy(&a, made, 4);
  return a;
}

template <typename T>
uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  T x[2], y[2], z[2];
  std::memcpy(x, &a, 4), std::memcpy(y, &b, 4), std::memcpy(z, &c, 4);
  for (int i = 0; i < 2; ++i) x[i] = T(std::fma(float(x[i]), float(y[i]), float(z[i])));
  std::memcpy(&a, x, 4);
  return a;
}
template <typename T>
uint32_t round_pair(float low, float high) {
  T pair[2] = {T(low), T(high)};
  uint32_t word;
  std::memcpy(&word, pair, 4);
  return word;
}
inline uint32_t transpose_matrix(uint32_t pair) {
  Warp& warp = *self->warp;
  warp.words[self->lane][0] = pair;
  __syncwarp();
  auto element = [&](int r, int c) { return warp.words[4 * r + c / 2][0] >> (16 * (c % 2)) & 0xFFFF; };
  const int group = self->lane / 4, column = 2 * (self->lane % 4);
  pair = element(column, group) | element(column + 1, group) << 16;
  __syncwarp();
  return pair;
}

// Matrix m of a load is 8×8 of two bytes, its row r starts where lane 8·m + r points. A lane gets the pair
// (row lane/4, columns 2·(lane%4) and +1), transposed: (rows 2·(lane%4) and +1, column lane/4).
template <int COUNT, bool TRANSPOSED>
void load_matrices(uint32_t (&out)[COUNT], const void* row) {
  Warp& warp = *self->warp;
  warp.pointers[self->lane] = row;
  __syncwarp();
  for (int m = 0; m < COUNT; ++m) {
    auto element = [&](int r, int c) { return uint32_t(static_cast<const uint16_t*>(warp.pointers[8 * m + r])[c]); };
    const int group = self->lane / 4, pair = 2 * (self->lane % 4);
    out[m] = TRANSPOSED ? element(pair, group) | element(pair + 1, group) << 16
                        : element(group, pair) | element(group, pair + 1) << 16;
  }
  __syncwarp();
}
inline void load_matrices_4(uint32_t (&out)[4], const void* row) { load_matrices<4, false>(out, row); }
inline void load_matrices_2(uint32_t (&out)[2], const void* row) { load_matrices<2, false>(out, row); }
inline void load_matrices_4_transposed(uint32_t (&out)[4], const void* row) { load_matrices<4, true>(out, row); }
inline void load_matrices_2_transposed(uint32_t (&out)[2], const void* row) { load_matrices<2, true>(out, row); }

inline float power_of_two(float x) { return x < -126 ? 0.0f : std::exp2(x); }
template <typename T>
uint32_t pack(float low, float high) {
  const T made[2] = {T(low), T(high)};
  uint32_t word;
  std::memcpy(&word, made, 4);
  return word;
}

template <typename T>
double half_of(uint32_t word, int high) {
  uint16_t bits = word >> (16 * high);
  if (std::is_same_v<T, __nv_bfloat16> && bits < 256) return bits * 0x1p-133;  // fast: no float is so small
  T x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

// c [16, 8] += a [16, 16] · b [16, 8]
template <typename T>
void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Warp& warp = *self->warp;
  for (int i = 0; i < 4; ++i) warp.words[self->lane][i] = a[i];
  for (int i = 0; i < 2; ++i) warp.words[self->lane][4 + i] = b[i];
  __syncwarp();
  auto A = [&](int i, int k) {
    return half_of<T>(warp.words[4 * (i % 8) + (k % 8) / 2][i / 8 + 2 * (k / 8)], k % 2);
  };
  auto B = [&](int k, int j) { return half_of<T>(warp.words[4 * j + (k % 8) / 2][4 + k / 8], k % 2); };
  for (int e = 0; e < 4; ++e) {
    const int i = self->lane / 4 + 8 * (e / 2), j = 2 * (self->lane % 4) + e % 2;
    for (int k = 0; k < 16; ++k) c[e] = float(A(i, k) * B(k, j) + c[e]);
  }
  __syncwarp();
}
}  // namespace headstart
#include "warpgroup_on_cpu.h"

#endif
