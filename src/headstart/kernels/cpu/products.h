// Activations [rows, K] by weights [N, K], dense or quantised, one matrix for all rows or one for each expert.
//
// An output of a row is summed over K in lanes, in an order that depends on the weights' type and on nothing else.
// Weights are read once for every four rows, and stay in the nearest cache for the next four.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "lanes.h"
#include "math.h"
#include "pool.h"

namespace headstart {

// Sums that are made together, of R rows and TILE / R outputs: as many as fit the registers.
constexpr int TILE = NATIVE == LANES ? 16 : 4;
constexpr int ROWS = 4;    // rows that share one reading of a tile
constexpr int STRIP = 32;  // outputs of a part
constexpr long LEAST = 1 << 16;  // multiplications that are worth another thread

// How activations are arranged to meet weights in the order in which these are unpacked.
//
// Codes of 2, 4 and 8 bits are taken out of sixteen words of 32 bits at a time, one to a lane: first the lowest code of
// every word, then the next one. They are masked and not shifted, so the activation is divided by the power of two
// instead. Other codes are unpacked in their order, and dense weights in pairs of lanes.
struct Arrangement {
  int bits = 0, group = 0;  // of the weights; 0: dense
  bool wide = false;        // their scales and biases are float32

  constexpr int per_word() const {
    return bits && 32 % bits == 0 ? 32 / bits : 0;
  }
  // Elements that share a loop: with quantised weights also one scaling.
  long block() const {
    return !bits ? PAIR : per_word() ? LANES * per_word() : group;
  }
  long blocks(long K) const {
    return (K + block() - 1) / block();
  }
};

// Rows of activations as float32, arranged, with zeros up to a whole block. With quantised weights also the sum of every
// group, in pairs: biases are dense weights of these.
template <typename T>
class Activations {
 public:
  Activations(const T* x, long rows, long K, Arrangement order)
      : K_(K), order_(order), padded_(order.blocks(K) * order.block()),
        groups_(order.bits ? (K / order.group + PAIR - 1) / PAIR * PAIR : 0), values_(rows * padded_),
        sums_(rows * groups_) {
    constexpr long SOME = 16;  // rows of a part
    pool().run((rows + SOME - 1) / SOME, [&](uint32_t part) {
      for (long r = part * SOME; r < std::min<long>(rows, (part + 1) * SOME); ++r) {
        if (!order_.bits) in_pairs(x + r * K, row(r));
        else if (order_.per_word()) in_words(x + r * K, row(r));
        else for (long k = 0; k < K; ++k) row(r)[k] = to_float(x[r * K + k]);
        if (order_.bits) add_groups(x + r * K, sums_.data() + r * groups_);
      }
    });
  }

  float* row(long r) {
    return values_.data() + r * padded_;
  }
  const float* sums(long r) const {
    return sums_.data() + r * groups_;
  }

 private:
  void in_pairs(const T* from, float* to) {
    long k = 0;
    for (; k + PAIR <= K_; k += PAIR) {
      const Pair pair = load_pair(from + k);
      store(to + k, pair.first), store(to + k + LANES, pair.second);
    }
    for (; k < K_; ++k) to[place<T>(k)] = to_float(from[k]);
  }

  void in_words(const T* from, float* to) {
    const int per = order_.per_word();
    for (long word = 0; word < K_ / per; ++word) {
      float* block = to + word / LANES * LANES * per + word % LANES;
      float scale = 1.0f;
      for (int j = 0; j < per; ++j, scale /= float(1 << order_.bits)) {
        const float x = to_float(from[word * per + j]);
        block[j * LANES] = j == per - 1 ? x : x * scale;
      }
    }
  }

  void add_groups(const T* from, float* sums) {
    for (long g = 0; g < K_ / order_.group; ++g, from += order_.group) {
      float lanes[LANES] = {};
      for (long k = 0; k < order_.group; ++k) lanes[k % LANES] += to_float(from[k]);
      sums[order_.wide ? place<float>(g) : place<bfloat>(g)] = sum(load(lanes));
    }
  }

  long K_;
  Arrangement order_;
  long padded_, groups_;
  std::vector<float> values_, sums_;
};

// Dense weights: pairs of lanes, as they lie.
template <typename T>
struct Dense {
  static constexpr int SUMS = TILE;
  const T* w;
  long K;

  // Rows `x` by the outputs from `n` on, C = SUMS / R of them; where there are fewer, the last one again.
  template <int R>
  void tile(const float* const (&x)[R], const float* const (&)[R], long n, long count, float* out) const {
    constexpr int C = SUMS / R;
    const T* ws[C];
    Lanes each[SUMS];
    UNROLL for (int c = 0; c < C; ++c) ws[c] = w + (n + (c < count ? c : count - 1)) * K;
    UNROLL for (int i = 0; i < SUMS; ++i) each[i] = splat(0.0f);
    add_rows(x, ws, each);
    sums(each, out);
  }

  template <int R, int C>
  void add_rows(const float* const (&x)[R], const T* (&ws)[C], Lanes (&each)[R * C]) const {
    long k = 0;
    for (; k + PAIR <= K; k += PAIR) add(x, ws, k, k, each);
    if (k < K) {  // the rest, with zeros behind it
      T rest[C][PAIR] = {};
      UNROLL for (int c = 0; c < C; ++c) std::memcpy(rest[c], ws[c] + k, (K - k) * sizeof(T)), ws[c] = rest[c];
      add(x, ws, k, 0, each);
    }
  }

 private:
  template <int R, int C>
  static void add(const float* const (&x)[R], const T* const (&w)[C], long k, long at, Lanes (&sums)[R * C]) {
    UNROLL for (int c = 0; c < C; ++c) {
      const Pair weights = load_pair(w[c] + at);
      UNROLL for (int r = 0; r < R; ++r) sums[r * C + c] = fma(load(x[r] + k), weights.first, sums[r * C + c]);
      UNROLL for (int r = 0; r < R; ++r) sums[r * C + c] = fma(load(x[r] + k + LANES), weights.second, sums[r * C + c]);
    }
  }
};

// Affine weights s · q + b with one s and b for a group; codes q are a stream of BITS each, the lowest bits first. The
// sum of q · x over a block is scaled at its end.
template <int BITS>
struct Quantised {
  static constexpr int SUMS = NATIVE == LANES ? 8 : 4;
  static constexpr int PER_WORD = 32 % BITS == 0 ? 32 / BITS : 0;
  // Where a lane finds the scale of the group that its codes are of: in which of eight words, and where there.
  struct Places {
    Bits words[LANES / NATIVE], shifts[LANES / NATIVE], mask;

    Places(long group, bool wide) {
      const int lanes = PER_WORD && group < LANES * PER_WORD ? group / PER_WORD : LANES;  // of a group: a power of two
      const int shift = __builtin_ctz(lanes);
      UNROLL for (int i = 0; i < LANES; ++i) {
        const uint32_t place = i >> shift;
        words[i / NATIVE][i % NATIVE] = wide ? place : place >> 1;
        shifts[i / NATIVE][i % NATIVE] = wide || place & 1 ? 0 : 16;  // a bfloat16 is the upper half of a float32
      }
      mask = Bits{} + (wide ? 0xffffffffu : 0xffff0000u);
    }
  };

  const uint8_t* w;
  const char *scales, *biases;
  bool wide;
  long K, group, N;
  Places places = Places(group, wide);
  int shift = __builtin_ctzl(group);  // groups are powers of two, and divisions slow
  long groups = K / group, block = Arrangement{BITS, int(group)}.block(), blocks = (K + block - 1) / block;

  template <int R>
  void tile(const float* const (&x)[R], const float* const (&x_sums)[R], long n, long count, float* out) const {
    constexpr int C = SUMS / R;
    const long row = K / 8 * BITS, size = wide ? 4 : 2, scales_row = groups * size;
    static thread_local std::vector<char> memory;
    const uint8_t* ws[C];
    const char *ss[C], *bs[C];
    Lanes each[SUMS], part[SUMS];
    UNROLL for (int c = 0; c < C; ++c) {
      const long at = n + (c < count ? c : count - 1);
      ws[c] = w + at * row, ss[c] = scales + at * scales_row, bs[c] = biases + at * scales_row;
    }
    if ((n + C) * scales_row + 32 > N * scales_row) {  // `spread` reads 32 bytes, some of them behind a row
      memory.assign(C * (scales_row + 32), 0);
      UNROLL for (int c = 0; c < C; ++c) {
        char* copy = &memory[c * (scales_row + 32)];
        std::memcpy(copy, ss[c], scales_row), ss[c] = copy;
      }
    }
    UNROLL for (int i = 0; i < SUMS; ++i) each[i] = splat(0.0f);
    for (long b = 0; b < blocks; ++b) {
      UNROLL for (int i = 0; i < SUMS; ++i) part[i] = splat(0.0f);
      const long k = b * block;
      if constexpr (PER_WORD) add_words(x, ws, k, part);
      else add_stream(x, ws, k, k + block == K, part);
      UNROLL for (int c = 0; c < C; ++c) {
        const Lanes scale = spread(ss[c] + (k >> shift) * size, places);
        UNROLL for (int r = 0; r < R; ++r) each[r * C + c] = fma(scale, part[r * C + c], each[r * C + c]);
      }
    }
    if (wide) add_biases<float>(x_sums, bs, groups, each);
    else add_biases<bfloat>(x_sums, bs, groups, each);
    sums(each, out);
  }

 private:
  typedef int32_t Ints __attribute__((vector_size(4 * NATIVE)));

  template <typename T, int R, int C>
  static void add_biases(const float* const (&x)[R], const char* const (&biases)[C], long groups, Lanes (&each)[R * C]) {
    const T* rows[C];
    UNROLL for (int c = 0; c < C; ++c) rows[c] = reinterpret_cast<const T*>(biases[c]);
    Dense<T>{nullptr, groups}.add_rows(x, rows, each);
  }

  // To every lane its scale, from that of a block's first group on.
  template <int V = LANES, int PIECE = 0>
  static Vec<V> spread(const char* from, const Places& places) {
    if constexpr (V == NATIVE) {
      Bits found;
#if !defined(HEADSTART_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
#if defined(__AVX512F__)
      found = (Bits)_mm512_permutexvar_epi32((__m512i)places.words[PIECE], _mm512_castsi256_si512(words));
#else
      found = (Bits)_mm256_permutevar8x32_epi32(words, (__m256i)places.words[PIECE]);
#endif
#else
      UNROLL for (int i = 0; i < V; ++i) {
        uint32_t word;
        std::memcpy(&word, from + 4 * places.words[PIECE][i], 4);
        found[i] = word;
      }
#endif
      return {(Floats)((found << places.shifts[PIECE]) & places.mask)};
    } else {
      return {
          spread<V / 2, PIECE>(from, places), spread<V / 2, PIECE + V / 2 / NATIVE>(from, places)};
    }
  }

  // Sixteen words of every output. Where a row ends before, zeros stand for the rest.
  template <int R, int C>
  void add_words(const float* const (&x)[R], const uint8_t* const (&ws)[C], long k, Lanes (&part)[R * C]) const {
    constexpr long BLOCK = LANES * PER_WORD;
    Lanes words[C];
    const long here = std::min(BLOCK, K - k) / 8 * BITS;
    UNROLL for (int c = 0; c < C; ++c) {
      const uint8_t* from = ws[c] + k / 8 * BITS;
      if (here == BLOCK / 8 * BITS) {
        words[c] = load(from);
      } else {
        uint8_t rest[4 * LANES] = {};
        std::memcpy(rest, from, here);
        words[c] = load(rest);
      }
    }
    UNROLL for (int j = 0; j < PER_WORD; ++j)
      UNROLL for (int c = 0; c < C; ++c) {
        const Lanes codes = map([j](Floats word) { return code(word, j); }, words[c]);
        UNROLL for (int r = 0; r < R; ++r) part[r * C + c] = fma(load(x[r] + k + j * LANES), codes, part[r * C + c]);
      }
  }

  // Code j of every word, times 2^(BITS · j); the last one as it is, since there it would be a sign.
  static Floats code(Floats words, int j) {
    const Bits bits = (Bits)words;
    const Bits found = j == PER_WORD - 1 ? bits >> (32 - BITS) : bits & (((1u << BITS) - 1) << (BITS * j));
    return __builtin_convertvector((Ints)found, Floats);
  }

  // A group of codes that do not fill words: sixteen at a time are taken out of windows of 32 bits. The last ones of a
  // row are copied first, where a window reaches beyond them.
  template <int R, int C>
  void add_stream(
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

// `count` outputs from `n` on of any number of rows: row r is at x[r], its sums at x_sums[r] → out + r · stride.
template <typename M>
void panel(
    const M& matrix, long n, long count, long rows, const float* const* x, const float* const* x_sums, float* out,
    long stride) {
  for (long first = 0; first < rows; first += ROWS) {
    const long some = std::min<long>(ROWS, rows - first);
    auto tiles = [&]<int R>() {
      constexpr long C = M::SUMS / R;
      const float *xs[R], *sums[R];
      UNROLL for (int r = 0; r < R; ++r) {
        const long row = first + (r < some ? r : some - 1);
        xs[r] = x[row], sums[r] = x_sums[row];
      }
      for (long c = 0; c < count; c += C) {
        float made[M::SUMS];
        const long these = std::min(C, count - c);
        matrix.template tile<R>(xs, sums, n + c, these, made);
        for (long r = 0; r < some; ++r)
          for (long i = 0; i < these; ++i) out[(first + r) * stride + c + i] = made[r * C + i];
      }
    };
    if (some == 1) tiles.template operator()<1>();
    else if (some == 2) tiles.template operator()<2>();
    else tiles.template operator()<ROWS>();
  }
}

// f(the matrix of an expert), as the struct that multiplies with it.
template <typename T, typename F>
inline void with(const Matrix& m, long K, long expert, const F& f) {
  if (!m.bits) return f(Dense<T>{static_cast<const T*>(m.w) + expert * m.N * K, K});
  auto quantised = [&]<int BITS>() {
    const long groups = expert * m.N * (K / m.group) * (m.wide ? 4 : 2);
    const auto* w = static_cast<const uint8_t*>(m.w) + expert * m.N * (K / 8 * BITS);
    f(Quantised<BITS>{w, (const char*)m.scales + groups, (const char*)m.biases + groups, m.wide, K, m.group, m.N});
  };
  switch (m.bits) {
    case 2: return quantised.template operator()<2>();
    case 3: return quantised.template operator()<3>();
    case 4: return quantised.template operator()<4>();
    case 5: return quantised.template operator()<5>();
    case 6: return quantised.template operator()<6>();
    default: return quantised.template operator()<8>();
  }
}

// Rows that are multiplied with the same matrix: all of them, or those that chose an expert.
struct Group {
  long expert, first, count;
};

template <typename T>
void products(const Product<T>& op) {
  Activations<T> x(op.x, op.rows, op.K, {op.matrices[0].bits, op.matrices[0].group, op.matrices[0].wide});
  // Row by row of the output: which rows of it, expert after expert.
  const long rows = op.experts ? op.rows * op.top : op.rows;
  std::vector<long> order(rows);
  std::iota(order.begin(), order.end(), 0);
  std::vector<Group> groups;
  if (op.experts) {
    std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return op.experts[a] < op.experts[b]; });
    for (long i = 0; i < rows; ++i) {
      if (!i || op.experts[order[i]] != op.experts[order[i - 1]]) groups.push_back({op.experts[order[i]], i, 0});
      ++groups.back().count;
    }
  } else {
    groups.push_back({0, 0, rows});
  }
  auto strips = [](long N) { return (N + STRIP - 1) / STRIP; };
  long parts = 0, work = 0;
  for (int i = 0; i < op.count; ++i) work += rows * op.K * op.matrices[i].N;
  for (int i = 0; i < (op.gated ? 1 : op.count); ++i) parts += strips(op.matrices[i].N);
  auto compute = [&](uint32_t part) {
    const Group& group = groups[part / parts];
    long s = part % parts;
    int i = 0;
    for (; s >= strips(op.matrices[i].N); ++i) s -= strips(op.matrices[i].N);
    const long N = op.matrices[i].N, n = s * STRIP, some = std::min<long>(STRIP, N - n);
    constexpr long SOME = 16;  // rows
    for (long first = 0; first < group.count; first += SOME) {
      const long these = std::min<long>(SOME, group.count - first);
      const long* rows = order.data() + group.first + first;
      const float *xs[SOME], *sums[SOME];
      for (long r = 0; r < these; ++r) xs[r] = x.row(rows[r] / op.top), sums[r] = x.sums(rows[r] / op.top);
      float made[2][SOME][STRIP] = {};
      for (int half = 0; half < (op.gated ? 2 : 1); ++half)
        with<T>(op.matrices[i + half], op.K, group.expert, [&](const auto& matrix) {
          panel(matrix, n, some, these, xs, sums, made[half][0], STRIP);
        });
      for (long r = 0; r < these; ++r) {
        float(&out)[STRIP] = made[0][r];
        if (op.gated)
          for (int c = 0; c < STRIP; ++c) out[c] = silu(out[c]) * made[1][r][c];
        T* to = op.out[i] + rows[r] * N + n;
        for (long c = 0; c < some; ++c) assign(to[c], out[c]);
      }
    }
  };
  const uint32_t all = parts * groups.size();
  if (work >= LEAST) return pool().run(all, compute);
  for (uint32_t part = 0; part < all; ++part) compute(part);
}

}  // namespace headstart
