// Sixteen virtual float32 lanes, with the same bits on every CPU.
//
// Lanes are halved until a half fits the CPU's registers: one of AVX-512, two of AVX2, four of NEON. All arithmetic is
// IEEE, lane by lane; a multiply-add is fused everywhere (in software where the CPU cannot), and nothing else is: the
// sources are compiled with -ffp-contract=off. A sum over lanes always adds the upper half to the lower one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

#if defined(HEADSTART_PORTABLE)
#define HEADSTART_ISA "portable"
#elif defined(__AVX512F__)
#include <immintrin.h>
#define HEADSTART_ISA "avx512"
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define HEADSTART_ISA "avx2"
#elif defined(__aarch64__)
#include <arm_neon.h>
#define HEADSTART_ISA "neon"
#else
#define HEADSTART_PORTABLE
#define HEADSTART_ISA "portable"
#endif

namespace headstart {

#if defined(HEADSTART_PORTABLE)
constexpr int NATIVE = 4;
#elif defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int LANES = 16;

// Sums that a loop over a handful of them keeps in registers, and not in memory.
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * NATIVE)));
typedef uint32_t Bits __attribute__((vector_size(4 * NATIVE)));

template <int N>
struct Vec {
  Vec<N / 2> lo, hi;
};
template <>
struct Vec<NATIVE> {
  Floats v;
};
using Lanes = Vec<LANES>;

inline Floats native_fma(Floats a, Floats b, Floats c) {
#if defined(HEADSTART_PORTABLE)
  for (int i = 0; i < NATIVE; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#elif defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return vfmaq_f32(c, a, b);
#endif
}

inline float native_sum(Floats x) {
#if !defined(HEADSTART_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
#if defined(__AVX512F__)
  __m256 eight = _mm256_add_ps(
      _mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
  __m256 eight = x;
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

template <int N, typename F>
inline Vec<N> map(const F& f, Vec<N> a) {
  if constexpr (N == NATIVE) return {f(a.v)};
  else return {map(f, a.lo), map(f, a.hi)};
}
template <int N, typename F>
inline Vec<N> map(const F& f, Vec<N> a, Vec<N> b) {
  if constexpr (N == NATIVE) return {f(a.v, b.v)};
  else return {map(f, a.lo, b.lo), map(f, a.hi, b.hi)};
}

template <int N>
inline Vec<N> operator+(Vec<N> a, Vec<N> b) {
  return map([](Floats a, Floats b) { return a + b; }, a, b);
}
template <int N>
inline Vec<N> operator*(Vec<N> a, Vec<N> b) {
  return map([](Floats a, Floats b) { return a * b; }, a, b);
}

template <int N>
inline Vec<N> larger(Vec<N> a, Vec<N> b) {
  return map([](Floats a, Floats b) { return a > b ? a : b; }, a, b);
}

// a · b + c, rounded once.
template <int N>
inline Vec<N> fma(Vec<N> a, Vec<N> b, Vec<N> c) {
  if constexpr (N == NATIVE) return {native_fma(a.v, b.v, c.v)};
  else return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}

template <int N>
inline float sum(Vec<N> x) {
  if constexpr (N == NATIVE) return native_sum(x.v);
  else return sum(x.lo + x.hi);
}

#if !defined(HEADSTART_PORTABLE) && defined(__AVX512F__)
// The sum of every one, in the order of `sum`, all at once.
inline void sums(const Lanes (&x)[LANES], float* out) {
  __m512 quarters[4];
  UNROLL for (int i = 0; i < 4; ++i) {
    __m512 halves[2];
    UNROLL for (int j = 0; j < 2; ++j) {
      const __m512 a = x[8 * j + i].v, b = x[8 * j + 4 + i].v;
      halves[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quarters[i] = _mm512_add_ps(
        _mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
  }
  __m512 eighths[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    const __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
    eighths[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  const __m512 even = _mm512_shuffle_ps(eighths[0], eighths[1], 0x88);
  _mm512_storeu_ps(out, _mm512_add_ps(even, _mm512_shuffle_ps(eighths[0], eighths[1], 0xdd)));
}
inline void sums(const Lanes (&x)[8], float* out) {
  __m512 quarters[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    __m512 halves[2];
    UNROLL for (int j = 0; j < 2; ++j) {
      const __m512 a = x[4 * i + 2 * j].v, b = x[4 * i + 2 * j + 1].v;
      halves[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quarters[i] = _mm512_add_ps(
        _mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
  }
  const __m512 eighths = _mm512_add_ps(
      _mm512_shuffle_ps(quarters[0], quarters[1], 0x44), _mm512_shuffle_ps(quarters[0], quarters[1], 0xee));
  const __m512 all = _mm512_add_ps(eighths, _mm512_shuffle_ps(eighths, eighths, 0xf5));  // at even places
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
}
#endif
template <int N>
inline void sums(const Lanes (&x)[N], float* out) {
  UNROLL for (int i = 0; i < N; ++i) out[i] = sum(x[i]);
}

template <int N = LANES>
inline Vec<N> splat(float x) {
  if constexpr (N == NATIVE) return {x - Floats{}};
  else return {splat<N / 2>(x), splat<N / 2>(x)};
}

template <int N = LANES>
inline Vec<N> load(const void* from) {
  if constexpr (N == NATIVE) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return {x};
  } else {
    return {load<N / 2>(from), load<N / 2>(static_cast<const float*>(from) + N / 2)};
  }
}
template <int N>
inline void store(float* to, Vec<N> x) {
  if constexpr (N == NATIVE) std::memcpy(to, &x.v, sizeof x.v);
  else store(to, x.lo), store(to + N / 2, x.hi);
}

inline float to_float(half x) {
  // The exponent of a float16 as that of a float32 is 112 too small, and of what is infinite or no number twice that.
  const uint32_t bits = x.bits, narrow = (bits & 0x7fff) << 13;
  float small;
  std::memcpy(&small, &narrow, 4);
  small *= 0x1p112f;
  uint32_t wide;
  std::memcpy(&wide, &small, 4);
  wide |= (bits & 0x8000) << 16 | ((bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
  std::memcpy(&small, &wide, 4);
  return small;
}
template <int N = LANES>
inline Vec<N> load_halves(const half* from) {
  if constexpr (N == NATIVE) {
#if !defined(HEADSTART_PORTABLE) && defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
#elif !defined(HEADSTART_PORTABLE) && defined(__F16C__)
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
#else
    Floats made;
    UNROLL for (int i = 0; i < N; ++i) made[i] = to_float(from[i]);
    return {made};
#endif
  } else {
    return {load_halves<N / 2>(from), load_halves<N / 2>(from + N / 2)};
  }
}

// Two times sixteen consecutive elements, in the order in which their type is cheapest to take apart: of bfloat16 the
// even ones and the odd ones.
struct Pair {
  Lanes first, second;
};
constexpr int PAIR = 2 * LANES;
template <typename T>
constexpr bool in_order = !std::is_same_v<std::remove_const_t<T>, bfloat>;

inline Pair load_pair(const float* from) {
  return {load(from), load(from + LANES)};
}
inline Pair load_pair(const bfloat* from) {
  Lanes both = load(from);
#if !defined(HEADSTART_PORTABLE) && defined(__x86_64__)
  // Otherwise compilers load it twice, as an operand of each of the two: most loads of weights are of two cache lines.
  both = map([](Floats x) { asm("" : "+v"(x)); return x; }, both);
#endif
  return {
      map([](Floats x) { return (Floats)((Bits)x << 16); }, both),
      map([](Floats x) { return (Floats)((Bits)x & 0xffff0000u); }, both),
  };
}

inline Pair load_pair(const half* from) {
  return {load_halves(from), load_halves(from + LANES)};
}

struct eight {
  int8_t code;  // a whole number
};

template <int N = LANES>
inline Vec<N> load_codes(const eight* from) {
  if constexpr (N == NATIVE) {
    typedef int32_t Ints __attribute__((vector_size(4 * NATIVE)));
    Ints codes;
#if !defined(HEADSTART_PORTABLE) && defined(__AVX512F__)
    codes = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif !defined(HEADSTART_PORTABLE) && defined(__AVX2__)
    codes = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    UNROLL for (int i = 0; i < N; ++i) codes[i] = from[i].code;
#endif
    return {__builtin_convertvector(codes, Floats)};
  } else {
    return {load_codes<N / 2>(from), load_codes<N / 2>(from + N / 2)};
  }
}
// Bits of ones in the first n lanes, and zeros in the others.
inline Lanes first_lanes(long n) {
  static constexpr uint32_t ONES[2 * LANES] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u,
                                               ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
  return load(ONES + LANES - n);
}

// The first n elements of a pair, and zeros for the others.
template <typename T>
inline Pair first_of(Pair x, long n) {
  auto both = [](Floats a, Floats b) { return (Floats)((Bits)a & (Bits)b); };
  const long first = in_order<T> ? (n < LANES ? n : LANES) : (n + 1) / 2;
  return {map(both, x.first, first_lanes(first)), map(both, x.second, first_lanes(n - first))};
}

// The place, in a pair's order, of element i.
template <typename T>
constexpr long place(long i) {
  if (in_order<T>) return i;
  return i / PAIR * PAIR + i % 2 * LANES + i % PAIR / 2;
}

inline float to_float(float x) {
  return x;
}
inline float to_float(bfloat x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
// To the nearest, ties to even; a NaN stays one.
inline void assign(bfloat& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}
inline void assign(float& to, float x) {
  to = x;
}

// A pointer to whole numbers in eight bits, of which every 32 share a scale. It moves by 32 at a time.
template <typename T>
struct Eights {
  const eight* at;
  const T* scales;
  Eights operator+(unsigned long n) const {
    return {at + n, scales + n / PAIR};
  }
};
template <typename T>
inline Pair load_pair(Eights<T> from) {
  const Lanes scale = splat(to_float(*from.scales));
  return {load_codes(from.at) * scale, load_codes(from.at + LANES) * scale};
}

inline const void* address(const void* at) {
  return at;
}
template <typename T>
inline const void* address(Eights<T> from) {
  return from.at;
}

// The sum of x · y over n elements: lane i has those at i, i + 16, …
inline float dot(const float* x, const float* y, long n) {
  Lanes total = splat(0.0f);
  long i = 0;
  for (; i + LANES <= n; i += LANES) total = fma(load(x + i), load(y + i), total);
  if (i < n) {
    float rest[2][LANES] = {};
    std::memcpy(rest[0], x + i, (n - i) * sizeof *x);
    std::memcpy(rest[1], y + i, (n - i) * sizeof *y);
    total = fma(load(rest[0]), load(rest[1]), total);
  }
  return sum(total);
}

}  // namespace headstart
