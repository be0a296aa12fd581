// Tiles of a product: R rows of activations by C rows of weights, R · C sums that stay in registers.
//
// A sum runs over K in sixteen lanes, in an order that depends on the weights' type and on nothing else; neither R nor C
// nor where a loop over K is cut changes it. Every weight is loaded and unpacked once for all R rows, and every
// activation is loaded once for all C outputs. While a tile is computed, the weights of the next one are fetched into
// the nearest cache: rows of a few hundred bytes are too short for the CPU to see that coming.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "floats.h"

namespace headstart {

// Sums of a tile of dense weights. AVX-512 has 32 registers: 16 sums, 8 of activations, 2 of weights.
constexpr int TILE = NATIVE == LANES ? 16 : 4;

// How far behind a row of weights to prefetch: to the next tile, if both fit into the nearest cache, else along the row.
inline long prefetch_distance(long row_bytes, long chunk_bytes, long outputs) {
  return outputs * chunk_bytes <= 32 << 10 ? outputs * row_bytes : 512;
}

// Dense weights: pairs of lanes, as they lie where W points.
template <typename W>
struct Dense {
  static constexpr int SUMS = TILE, SIZE = std::is_pointer_v<W> ? sizeof(std::remove_pointer_t<W>) : 1;
  W w;
  long K;

  // Inputs that are added in a row: all, since their weights are read for longer than it takes to multiply them.
  long chunk() const {
    return K;
  }

  // Inputs from `from` to `to` of rows x, by C outputs from `n` on; where there are fewer than C, the last one again.
  template <int R, int C>
  [[gnu::always_inline]] void add(
      const float* const (&x)[R], long n, long count, long from, long to, Lanes (&sums)[R * C]) const {
    W ws[C];
    UNROLL for (int c = 0; c < C; ++c) ws[c] = w + (n + (c < count ? c : count - 1)) * K;
    const long ahead = prefetch_distance(K * SIZE, (to - from) * SIZE, C);
    long k = from;
    for (; k + PAIR <= to; k += PAIR) {
      UNROLL for (int c = 0; c < C; ++c) __builtin_prefetch(static_cast<const char*>(address(ws[c] + k)) + ahead);
      add_pair(x, ws, k, k, sums);
    }
    if constexpr (std::is_pointer_v<W>)
      if (k < to) {  // the rest, with zeros behind it
        std::remove_const_t<std::remove_pointer_t<W>> rest[C][PAIR] = {};
        UNROLL for (int c = 0; c < C; ++c) std::memcpy(rest[c], ws[c] + k, (to - k) * SIZE), ws[c] = rest[c];
        add_pair(x, ws, k, 0, sums);
      }
  }

  template <int R, int C>
  void finish(const float* const (&)[R], long, long, Lanes (&)[R * C]) const {}

 private:
  template <int R, int C>
  [[gnu::always_inline]] static void add_pair(
      const float* const (&x)[R], const W (&w)[C], long k, long at, Lanes (&sums)[R * C]) {
    UNROLL for (int c = 0; c < C; ++c) {
      const Pair weights = load_pair(w[c] + at);
      UNROLL for (int r = 0; r < R; ++r) sums[r * C + c] = fma(load(x[r] + k), weights.first, sums[r * C + c]);
      UNROLL for (int r = 0; r < R; ++r) sums[r * C + c] = fma(load(x[r] + k + LANES), weights.second, sums[r * C + c]);
    }
  }
};

// Where each of the sixteen lanes finds the scale of the group that its codes are of, when so many lanes share a group:
// in which of eight words, and where there. A bfloat16 is the upper half of a float32.
struct Places {
  alignas(64) uint32_t words[LANES] = {}, shifts[LANES] = {}, masks[LANES] = {};

  constexpr Places(int lanes, bool wide) {
    for (int i = 0; i < LANES; ++i) {
      const uint32_t group = i / lanes;
      words[i] = wide ? group : group / 2;
      shifts[i] = wide || group % 2 ? 0 : 16;
      masks[i] = wide ? 0xffffffffu : 0xffff0000u;
    }
  }
};
inline constexpr Places PLACES[2][5] = {
    {{1, false}, {2, false}, {4, false}, {8, false}, {16, false}}, {{1, true}, {2, true}, {4, true}, {8, true}, {16, true}}};

// Affine weights s · q + b with one s and b for a group; codes q are a stream of BITS each, the lowest bits first. Or
// FLOATS: weights s · q, where codes are floating-point numbers.
//
// The sum of q · x over a block is scaled at its end. Biases are the weights of the groups' sums, and added at last.
template <int BITS, bool FLOATS = false>
struct Quantised {
  // As many again hold the sums of a block.
  static constexpr int SUMS = NATIVE == LANES ? 8 : 4;
  static constexpr int PER_WORD = Arrangement{BITS, 32, FLOATS ? Number::E8M0 : Number::BFLOAT}.per_word();

  const uint8_t* w;
  const char *scales, *biases;
  Number scale;
  long K, group, N;
  int shift = __builtin_ctzl(group);  // groups are powers of two, and divisions slow
  const Places& places = PLACES[scale != Number::BFLOAT][PER_WORD && group < LANES * PER_WORD ? __builtin_ctzl(group / PER_WORD) : 4];
  long size = size_of(scale), groups = K / group, row = K / 8 * BITS, scales_row = groups * size;
  long block = Arrangement{BITS, int(group), scale}.block();

  // Inputs that are added in a row, while the activations of all rows of a tile stay in the nearest cache.
  long chunk() const {
    return std::max(1024l, block);
  }

  template <int R, int C>
  [[gnu::always_inline]] void add(
      const float* const (&x)[R], long n, long count, long from, long to, Lanes (&each)[R * C]) const {
    const uint8_t* ws[C];
    const char* ss[C];
    UNROLL for (int c = 0; c < C; ++c) ws[c] = w + (n + (c < count ? c : count - 1)) * row;
    safe_rows(scales, n, count, ss);
    const long ahead = prefetch_distance(row, (to - from) / 8 * BITS, C);
    const bool ends = n + C >= N;
    for (long k = from; k < to; k += block) {
      Lanes part[R * C];
      UNROLL for (int i = 0; i < R * C; ++i) part[i] = splat(0.0f);
      UNROLL for (int c = 0; c < C; ++c) __builtin_prefetch(ws[c] + k / 8 * BITS + ahead);
      if constexpr (FLOATS && BITS == 8) add_bytes(x, ws, k, part);
      else if constexpr (PER_WORD) add_words(x, ws, k, ends && K - k < block, part);
      else add_stream(x, ws, k, k + block == K, part);
      UNROLL for (int c = 0; c < C; ++c) {
        const Lanes by = spread(ss[c] + (k >> shift) * size);
        UNROLL for (int r = 0; r < R; ++r) each[r * C + c] = fma(by, part[r * C + c], each[r * C + c]);
      }
    }
  }

  // The biases, or the factor of the matrix. What was read as a float16 is as much smaller as its exponent is.
  template <int R, int C>
  [[gnu::always_inline]] void finish(const float* const (&x_sums)[R], long n, long count, Lanes (&each)[R * C]) const {
    if constexpr (FLOATS) {
      float factor = BITS == 8 || scale == Number::E4M3 ? 256.0f : 1.0f;
      if (biases) factor *= *reinterpret_cast<const float*>(biases);
      UNROLL for (int i = 0; i < R * C; ++i) each[i] = each[i] * splat(factor);
    } else if (scale == Number::HALF) add_biases<half, R, C>(x_sums, n, count, each);
    else if (scale == Number::FLOAT) add_biases<float, R, C>(x_sums, n, count, each);
    else add_biases<bfloat, R, C>(x_sums, n, count, each);
  }

 private:
  typedef int32_t Ints __attribute__((vector_size(4 * NATIVE)));
  static constexpr long BEHIND = FLOATS ? 8 : 4 * PAIR;  // bytes that may be read behind a row of scales or biases

  // C rows of scales or biases. The last ones of a matrix are copied, for what is read behind them.
  template <int C>
  void safe_rows(const char* from, long n, long count, const char* (&rows)[C]) const {
    UNROLL for (int c = 0; c < C; ++c) rows[c] = from + (n + (c < count ? c : count - 1)) * scales_row;
    if ((n + C) * scales_row + BEHIND <= N * scales_row) return;
    static thread_local std::vector<char> memory;
    memory.assign(C * (scales_row + BEHIND), 0);
    for (int c = 0; c < C; ++c) {
      char* copy = &memory[c * (scales_row + BEHIND)];
      std::memcpy(copy, rows[c], scales_row), rows[c] = copy;
    }
  }

  template <typename T, int R, int C>
  [[gnu::always_inline]] void add_biases(
      const float* const (&x)[R], long n, long count, Lanes (&each)[R * C]) const {
    const char* rows[C];
    safe_rows(biases, n, count, rows);
    for (long g = 0; g < groups; g += PAIR) {
      UNROLL for (int c = 0; c < C; ++c) {
        Pair b = load_pair(reinterpret_cast<const T*>(rows[c]) + g);
        if (groups - g < PAIR) b = first_of<T>(b, groups - g);  // behind them are those of the next row
        UNROLL for (int r = 0; r < R; ++r) each[r * C + c] = fma(load(x[r] + g), b.first, each[r * C + c]);
        UNROLL for (int r = 0; r < R; ++r) each[r * C + c] = fma(load(x[r] + g + LANES), b.second, each[r * C + c]);
      }
    }
  }

#if !defined(HEADSTART_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
  static __m256 eight_halves(const char* from) {
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    float made[8];
    for (int i = 0; i < 8; ++i) made[i] = to_float(reinterpret_cast<const half*>(from)[i]);
    return _mm256_loadu_ps(made);
#endif
  }
#endif

  // To every lane its scale, from that of a block's first group on.
  template <int V = LANES>
  [[gnu::always_inline]] Vec<V> spread(const char* from, int lane = 0) const {
    if constexpr (FLOATS && BITS == 8) {
      return splat<V>(to_float(*reinterpret_cast<const e8m0*>(from)));
    } else if (BITS == 1 && group == PER_WORD && scale != Number::BFLOAT) {  // more than eight words
      if (scale == Number::HALF) return load_halves<V>(reinterpret_cast<const half*>(from) + lane);
      return load<V>(reinterpret_cast<const float*>(from) + lane);
    } else if constexpr (V == NATIVE) {
      Bits words, shifts, masks, found;
      std::memcpy(&words, places.words + lane, sizeof words);
      std::memcpy(&shifts, places.shifts + lane, sizeof shifts);
      std::memcpy(&masks, places.masks + lane, sizeof masks);
#if !defined(HEADSTART_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
      __m256i eight;
      if constexpr (FLOATS) eight = (__m256i)(scale == Number::E4M3 ? eight_e4m3(from) : eight_e8m0(from));
      else if (scale == Number::HALF) eight = (__m256i)eight_halves(from);
      else eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
#if defined(__AVX512F__)
      found = (Bits)_mm512_permutexvar_epi32((__m512i)words, _mm512_castsi256_si512(eight));
#else
      found = (Bits)_mm256_permutevar8x32_epi32(eight, (__m256i)words);
#endif
#else
      UNROLL for (int i = 0; i < V; ++i) {
        uint32_t word;
        if (FLOATS || scale == Number::HALF) {
          const float wide = scale == Number::HALF   ? to_float(reinterpret_cast<const half*>(from)[words[i]])
                             : scale == Number::E4M3 ? to_float(reinterpret_cast<const e4m3*>(from)[words[i]])
                                                     : to_float(reinterpret_cast<const e8m0*>(from)[words[i]]);
          std::memcpy(&word, &wide, 4);
        } else {
          std::memcpy(&word, from + 4 * words[i], 4);
        }
        found[i] = word;
      }
#endif
      return {(Floats)((found << shifts) & masks)};
    } else {
      return {spread<V / 2>(from, lane), spread<V / 2>(from, lane + V / 2)};
    }
  }

  // Sixteen words of every output. Where a row ends before, activations are zero; where it `ends` the matrix, nothing
  // is read behind it.
  template <int R, int C>
  [[gnu::always_inline]] void add_words(
      const float* const (&x)[R], const uint8_t* const (&ws)[C], long k, bool ends, Lanes (&part)[R * C]) const {
    constexpr long BLOCK = LANES * PER_WORD;
    Lanes words[C];
    UNROLL for (int c = 0; c < C; ++c) {
      const uint8_t* from = ws[c] + k / 8 * BITS;
      if (!ends) {
        words[c] = load(from);
      } else {
        uint8_t rest[4 * LANES] = {};
        std::memcpy(rest, from, std::min(BLOCK, K - k) / 8 * BITS);
        words[c] = load(rest);
      }
    }
    UNROLL for (int j = 0; j < PER_WORD; ++j)
      UNROLL for (int c = 0; c < C; ++c) {
        const Lanes codes = map([j](Floats word) { return code(word, j); }, words[c]);
        UNROLL for (int r = 0; r < R; ++r) part[r * C + c] = fma(load(x[r] + k + j * LANES), codes, part[r * C + c]);
      }
  }

  // 32 codes of every output.
  template <int R, int C>
  [[gnu::always_inline]] static void add_bytes(
      const float* const (&x)[R], const uint8_t* const (&ws)[C], long k, Lanes (&part)[R * C]) {
    UNROLL for (int c = 0; c < C; ++c) {
      const Pair codes = load_pair(reinterpret_cast<const e4m3*>(ws[c] + k));
      UNROLL for (int r = 0; r < R; ++r) part[r * C + c] = fma(load(x[r] + k), codes.first, part[r * C + c]);
      UNROLL for (int r = 0; r < R; ++r) part[r * C + c] = fma(load(x[r] + k + LANES), codes.second, part[r * C + c]);
    }
  }

  // Code j of every word, times 2^(BITS · j); the last one as it is, since there it would be a sign. Floating-point codes
  // are what they stand for.
  static Floats code(Floats words, int j) {
    const Bits bits = (Bits)words;
    if constexpr (FLOATS) return e2m1(bits >> (BITS * j));
    const Bits found = j == PER_WORD - 1 ? bits >> (32 - BITS) : bits & (((1u << BITS) - 1) << (BITS * j));
    return __builtin_convertvector((Ints)found, Floats);
  }

  // A group of codes that do not fill words: sixteen at a time are taken out of windows of 32 bits. The last ones of a
  // row are copied first, where a window reaches beyond them.
  template <int R, int C>
  [[gnu::always_inline]] void add_stream(
      const float* const (&x)[R], const uint8_t* const (&ws)[C], long k, bool ends, Lanes (&part)[R * C]) const {
    for (long i = k; i < k + group; i += LANES)
      UNROLL for (int c = 0; c < C; ++c) {
        const Lanes codes = unpack(ws[c] + i / 8 * BITS, ends && i + LANES == k + group);
        UNROLL for (int r = 0; r < R; ++r) part[r * C + c] = fma(load(x[r] + i), codes, part[r * C + c]);
      }
  }

  static constexpr int PER = BITS <= 4 ? 8 : 4;  // codes of a window

  static Lanes unpack(const uint8_t* from, bool last) {
    uint8_t safe[2 * BITS + 4];
    if (last) std::memcpy(safe, from, 2 * BITS), from = safe;
    uint32_t windows[4] = {};
    UNROLL for (int q = 0; q < LANES / PER; ++q) std::memcpy(&windows[q], from + q * PER * BITS / 8, 4);
    return codes<LANES>(windows, 0);
  }

  template <int N>
  static Vec<N> codes(const uint32_t (&windows)[4], int lane) {
    if constexpr (N == NATIVE) {
      Bits spread, shifts, places;
      UNROLL for (int i = 0; i < N; ++i) {
        const int q = (lane + i) / PER;
        places[i] = q, shifts[i] = (lane + i) * BITS - q * PER * BITS / 8 * 8;
      }
#if !defined(HEADSTART_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
      const __m128i four = _mm_set_epi32(windows[3], windows[2], windows[1], windows[0]);
#if defined(__AVX512F__)
      spread = (Bits)_mm512_permutexvar_epi32((__m512i)places, _mm512_castsi128_si512(four));
#else
      spread = (Bits)_mm256_permutevar8x32_epi32(_mm256_castsi128_si256(four), (__m256i)places);
#endif
#else
      UNROLL for (int i = 0; i < N; ++i) spread[i] = windows[places[i]];
#endif
      return {__builtin_convertvector((Ints)((spread >> shifts) & ((1u << BITS) - 1)), Floats)};
    } else {
      return {codes<N / 2>(windows, lane), codes<N / 2>(windows, lane + N / 2)};
    }
  }
};

}  // namespace headstart
