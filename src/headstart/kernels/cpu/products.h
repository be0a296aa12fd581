// x [rows, K] by weights [N, K], in float32 sums.
//
// An output of a row is summed over K in lanes, a pair of sixteen at a time, whatever rows and outputs are computed
// beside it. A tile of outputs is read once for all rows.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "math.h"
#include "pool.h"

namespace headstart {

// Rows and outputs that are computed together: their sums must fit the registers (32 of 16 lanes with AVX-512, 16 of
// 8 with AVX2, 32 of 4 with NEON).
constexpr int TILE_ROWS = NATIVE == 16 ? 4 : 2;
constexpr int TILE_OUTPUTS = NATIVE == 16 ? 4 : 2;
constexpr int STRIP = 32;  // outputs of a part

template <int R, int C, typename T>
inline void add_pairs(const T* const (&x)[R], const T* const (&w)[C], long from, Lanes (&sums)[R][C]) {
  Pair rows[R];
  for (int r = 0; r < R; ++r) rows[r] = load_pair(x[r] + from);
  for (int c = 0; c < C; ++c) {
    Pair weights = load_pair(w[c] + from);
    for (int r = 0; r < R; ++r) sums[r][c] = fma(rows[r].first, weights.first, sums[r][c]);
    for (int r = 0; r < R; ++r) sums[r][c] = fma(rows[r].second, weights.second, sums[r][c]);
  }
}

template <int R, int C, typename T, typename O>
inline void tile(const T* x, const T* w, long K, O* out, long N) {
  const T *xs[R], *ws[C];
  Lanes sums[R][C];
  for (int r = 0; r < R; ++r) xs[r] = x + r * K;
  for (int c = 0; c < C; ++c) ws[c] = w + c * K;
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = splat(0.0f);
  long k = 0;
  for (; k + PAIR <= K; k += PAIR) add_pairs(xs, ws, k, sums);
  if (k < K) {  // the rest, with zeros behind it
    T rest[R + C][PAIR] = {};
    for (int r = 0; r < R; ++r) std::memcpy(rest[r], xs[r] + k, (K - k) * sizeof(T)), xs[r] = rest[r];
    for (int c = 0; c < C; ++c) std::memcpy(rest[R + c], ws[c] + k, (K - k) * sizeof(T)), ws[c] = rest[R + c];
    add_pairs(xs, ws, 0, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) assign(out[r * N + c], sum(sums[r][c]));
}

// `count` outputs of every row.
template <int R, typename T, typename O>
inline void strip(const T* x, const T* w, long K, O* out, long N, long count) {
  constexpr int C = R == 1 ? 2 * TILE_OUTPUTS : TILE_OUTPUTS;
  long n = 0;
  for (; n + C <= count; n += C) tile<R, C>(x, w + n * K, K, out + n, N);
  for (; n < count; ++n) tile<R, 1>(x, w + n * K, K, out + n, N);
}

// `count` outputs of any number of rows.
template <typename T, typename O>
inline void panel(const T* x, long rows, const T* w, long K, O* out, long N, long count) {
  long r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) strip<TILE_ROWS>(x + r * K, w, K, out + r * N, N, count);
  if constexpr (TILE_ROWS > 2)
    if (r + 2 <= rows) strip<2>(x + r * K, w, K, out + r * N, N, count), r += 2;
  if (r < rows) strip<1>(x + r * K, w, K, out + r * N, N, count);
}

template <typename T>
void products(const T* x, long rows, long K, int count, const T* const* w, T* const* out, const long* outputs) {
  long strips = 0;
  for (int i = 0; i < count; ++i) strips += (outputs[i] + STRIP - 1) / STRIP;
  pool().run(strips, [&](uint32_t part) {
    int i = 0;
    long s = part;
    for (; s >= (outputs[i] + STRIP - 1) / STRIP; ++i) s -= (outputs[i] + STRIP - 1) / STRIP;
    const long N = outputs[i], first = s * STRIP, some = std::min<long>(STRIP, N - first);
    panel(x, rows, w[i] + first * K, K, out[i] + first, N, some);
  });
}

template <typename T>
void swiglu(const T* x, long rows, long K, const T* gate, const T* up, long N, T* out) {
  pool().run((N + STRIP - 1) / STRIP, [&](uint32_t part) {
    constexpr long SOME = 16;  // rows
    const long first = part * STRIP, some = std::min<long>(STRIP, N - first);
    float gates[SOME * STRIP] = {}, ups[SOME * STRIP] = {};
    for (long r = 0; r < rows; r += SOME) {
      const long these = std::min<long>(SOME, rows - r);
      panel(x + r * K, these, gate + first * K, K, gates, STRIP, some);
      panel(x + r * K, these, up + first * K, K, ups, STRIP, some);
      for (long i = 0; i < these * STRIP; ++i) gates[i] = silu(gates[i]) * ups[i];
      for (long i = 0; i < these; ++i)
        for (long n = 0; n < some; ++n) assign(out[(r + i) * N + first + n], gates[i * STRIP + n]);
    }
  });
}

}  // namespace headstart
