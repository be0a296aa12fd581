// The few instructions that CUDA C++ has no words for, one function each. Fragments are laid out as the PTX manual
// says for m16n8k16: a lane has rows lane/4 and +8, columns 2·(lane%4), +1, and those + 8.

namespace headstart {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read anew: what is derived from it here is not kept in registers, or spilled, from one phase of a kernel
// to the next.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

#ifdef HEADSTART_CACHE_HINTS // by compiler.py
constexpr bool CACHE_HINTS = true;
#else
constexpr bool CACHE_HINTS = false;
#endif

// `pointer` + `offset` in shared memory. `pointer` must be aligned to a power of two greater than `offset`.
__device__ __forceinline__ uint32_t offset_address(const void* pointer, int offset) {
  return shared_address(pointer) ^ offset;
}

__device__ __forceinline__ uint32_t address_of(const void* pointer, int offset) { return shared_address(pointer) + offset; }

// Into shared memory, without waiting. What is not `there` is not read, and zero. What it STREAMS is the first to leave
// the L2 cache, where the code of kernels has to stay.
template <bool STREAMS = false>
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, int there = 16) {
  if constexpr (STREAMS && CACHE_HINTS)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                 ::"r"(to), "l"(from), "r"(there), "l"(0x12F0000000000000ull)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(there)
                 : "memory");
}

__device__ __forceinline__ void copy_16_bytes(void* to, const void* from, int there = 16) {
  copy_16_bytes(shared_address(to), from, there);
}

// Likewise 4, 8 or 16 bytes, through the L1 cache if fewer than 16.
template <int BYTES>
__device__ __forceinline__ void copy_bytes(void* to, const void* from) {
  if constexpr (BYTES == 16)
    copy_16_bytes(to, from);
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but the last N groups of copies have arrived; other threads' only after a barrier.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Into the L2 cache, without waiting: `bytes` from an address, line by line, with an instruction that all cards have.
__device__ __forceinline__ void prefetch(const void* from, unsigned bytes) {
#pragma unroll 1
  for (unsigned at = 0; at < bytes; at += 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + at) : "memory");
}

// Into the L1 cache, without waiting.
__device__ __forceinline__ void load_and_forget(const void* from) {
  unsigned forgotten;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(forgotten) : "l"(from));
}

// A barrier of `threads` of the block, whole warps; number 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// What another block released before it wrote this, is seen by what is read after it.
__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// A thread that sees this with `load_acquire` also sees what this thread wrote before, and what other threads of its
// block wrote before a barrier. `__threadfence` would order more, and take longer.
__device__ __forceinline__ void add_release(unsigned long long* to, unsigned long long x) {
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// 8×8 matrices of two-byte elements; lane 8·m + r points to row r of matrix m.
__device__ __forceinline__ void load_matrices_4(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_matrices_2(uint32_t (&out)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_matrices_2_transposed(uint32_t (&out)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_matrices_4_transposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// An 8×8 matrix of two-byte elements, of which a lane has row lane/4, columns 2·(lane%4) and +1, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
}

// c [16, 8] += a [16, 16] · b [16, 8], for elements of type T.
template <typename T>
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(
    float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void multiply<__half>(
    float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^x, to two units in the last place; of 0 it is 1, and below 2^-126 it is 0.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Two numbers, the first in the low half, rounded to type T.
template <typename T>
__device__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 made = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&made);
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  __half2 made = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&made);
}

// Of two pairs, both low or both high halves.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// a · b of two pairs of type T.
template <typename T>
__device__ uint32_t multiply_pairs(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t multiply_pairs<__nv_bfloat16>(uint32_t a, uint32_t b) {
  __nv_bfloat162 made = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<uint32_t*>(&made);
}

// a · b + c of two pairs of type T, rounded once.
template <typename T>
__device__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c);

template <>
__device__ __forceinline__ uint32_t fma_pairs<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a) : "r"(a), "r"(b), "r"(c));
  return a;
}

template <>
__device__ __forceinline__ uint32_t fma_pairs<__half>(uint32_t a, uint32_t b, uint32_t c) {
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(a) : "r"(a), "r"(b), "r"(c));
  return a;
}

// Two numbers, rounded to type T.
template <typename T>
__device__ uint32_t round_pair(float low, float high);

template <>
__device__ __forceinline__ uint32_t round_pair<__nv_bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint32_t round_pair<__half>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace headstart
