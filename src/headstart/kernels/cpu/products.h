// x [rows, K] by weights [N, K], in float32 sums.
//
// An output of a row is summed over K in lanes, a pair of sixteen at a time, whatever rows and outputs are computed
// beside it. Weights are read once for every four rows, and stay in the nearest cache for the next four.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "math.h"
#include "pool.h"

namespace headstart {

// Sums that are made together, of R rows and TILE / R outputs: as many as fit the registers.
constexpr int TILE = NATIVE == LANES ? 16 : 4;
constexpr int ROWS = 4;      // rows that share one reading of a tile
constexpr int STRIP = 32;    // outputs of a part

// Rows of activations as float32, in the order of the weights' pairs, with zeros up to a whole pair.
template <typename T>
class Activations {
 public:
  Activations(const T* x, long rows, long K) : padded_((K + PAIR - 1) / PAIR * PAIR), values_(rows * padded_) {
    constexpr long SOME = 16;  // rows of a part
    pool().run((rows + SOME - 1) / SOME, [&](uint32_t part) {
      for (long r = part * SOME; r < std::min<long>(rows, (part + 1) * SOME); ++r) fill(x + r * K, K, row(r));
    });
  }

  static void fill(const T* from, long K, float* to) {
    long k = 0;
    for (; k + PAIR <= K; k += PAIR) {
      const Pair pair = load_pair(from + k);
      store(to + k, pair.first), store(to + k + LANES, pair.second);
    }
    for (; k < K; ++k) to[place<T>(k)] = to_float(from[k]);
  }

  float* row(long r) {
    return values_.data() + r * padded_;
  }
  long stride() const {
    return padded_;
  }

 private:
  long padded_;
  std::vector<float> values_;
};

template <int R, int C, typename T>
inline void add_pair(const float* const (&x)[R], const T* const (&w)[C], long k, long at, Lanes (&sums)[TILE]) {
  UNROLL for (int c = 0; c < C; ++c) {
    const Pair weights = load_pair(w[c] + at);
    UNROLL for (int r = 0; r < R; ++r) sums[r * C + c] = fma(load(x[r] + k), weights.first, sums[r * C + c]);
    UNROLL for (int r = 0; r < R; ++r) sums[r * C + c] = fma(load(x[r] + k + LANES), weights.second, sums[r * C + c]);
  }
}

// `rows` of R rows, `count` of TILE / R outputs. Where there are fewer, the last one is computed again.
template <int R, typename T, typename O>
inline void tile(const float* x, long stride, long rows, const T* w, long K, long count, O* out, long N) {
  constexpr int C = TILE / R;
  const float* xs[R];
  const T* ws[C];
  Lanes each[TILE];
  UNROLL for (int r = 0; r < R; ++r) xs[r] = x + (r < rows ? r : rows - 1) * stride;
  UNROLL for (int c = 0; c < C; ++c) ws[c] = w + (c < count ? c : count - 1) * K;
  UNROLL for (int i = 0; i < TILE; ++i) each[i] = splat(0.0f);
  long k = 0;
  for (; k + PAIR <= K; k += PAIR) add_pair(xs, ws, k, k, each);
  if (k < K) {  // the rest, with zeros behind it
    T rest[C][PAIR] = {};
    UNROLL for (int c = 0; c < C; ++c) std::memcpy(rest[c], ws[c] + k, (K - k) * sizeof(T)), ws[c] = rest[c];
    add_pair(xs, ws, k, 0, each);
  }
  float made[TILE];
  O rounded[TILE];
  sums(each, made);
  UNROLL for (int i = 0; i < TILE; ++i) assign(rounded[i], made[i]);
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < count; ++c) out[r * N + c] = rounded[r * C + c];
}

// `count` outputs of any number of rows.
template <typename T, typename O>
inline void panel(const float* x, long stride, long rows, const T* w, long K, long count, O* out, long N) {
  for (long r = 0; r < rows; r += ROWS) {
    const long some = std::min<long>(ROWS, rows - r);
    auto tiles = [&]<int R>() {
      for (long n = 0; n < count; n += TILE / R)
        tile<R>(x + r * stride, stride, some, w + n * K, K, std::min<long>(TILE / R, count - n), out + r * N + n, N);
    };
    if (some == 1) tiles.template operator()<1>();
    else if (some == 2) tiles.template operator()<2>();
    else tiles.template operator()<ROWS>();
  }
}

template <typename T>
void products(const T* x, long rows, long K, int count, const T* const* w, T* const* out, const long* outputs) {
  Activations<T> rows_of(x, rows, K);
  long strips = 0;
  for (int i = 0; i < count; ++i) strips += (outputs[i] + STRIP - 1) / STRIP;
  pool().run(strips, [&](uint32_t part) {
    int i = 0;
    long s = part;
    for (; s >= (outputs[i] + STRIP - 1) / STRIP; ++i) s -= (outputs[i] + STRIP - 1) / STRIP;
    const long N = outputs[i], first = s * STRIP, some = std::min<long>(STRIP, N - first);
    panel(rows_of.row(0), rows_of.stride(), rows, w[i] + first * K, K, some, out[i] + first, N);
  });
}

template <typename T>
void swiglu(const T* x, long rows, long K, const T* gate, const T* up, long N, T* out) {
  Activations<T> rows_of(x, rows, K);
  pool().run((N + STRIP - 1) / STRIP, [&](uint32_t part) {
    constexpr long SOME = 16;  // rows
    const long first = part * STRIP, some = std::min<long>(STRIP, N - first);
    float gates[SOME * STRIP] = {}, ups[SOME * STRIP] = {};
    for (long r = 0; r < rows; r += SOME) {
      const long these = std::min<long>(SOME, rows - r);
      panel(rows_of.row(r), rows_of.stride(), these, gate + first * K, K, some, gates, STRIP);
      panel(rows_of.row(r), rows_of.stride(), these, up + first * K, K, some, ups, STRIP);
      for (long i = 0; i < these * STRIP; ++i) gates[i] = silu(gates[i]) * ups[i];
      for (long i = 0; i < these; ++i)
        for (long n = 0; n < some; ++n) assign(out[(r + i) * N + first + n], gates[i * STRIP + n]);
    }
  });
}

}  // namespace headstart
