// Gated attention of a window over keys and values of sequences of different lengths, with everything between its
// projections: norms and rotation of queries and keys, the write into the cache, the output's gate.
//
// A query's scores are summed as in products.h, its weights and their values position by position from the first to
// its own: nothing depends on the window, on the capacity or on who is computed beside it.
#pragma once

#include <vector>

#include "math.h"
#include "products.h"

namespace headstart {

template <typename T>
inline void norm_and_rotate(const Attention<T>& op, const T* x, const float* weight, const float* turns, float* row) {
  for (long i = 0; i < op.D; ++i) row[i] = to_float(x[i]);
  const float scale = 1.0f / std::sqrt(dot(row, row, op.D) / float(op.D) + op.eps);
  for (long i = 0; i < op.D; ++i) row[i] = (row[i] * scale) * weight[i];
  const long half = op.rotated / 2;
  for (long i = 0; i < half; ++i) {
    const float a = row[i], b = row[half + i], sine = turns[2 * i], cosine = turns[2 * i + 1];
    row[i] = a * cosine - b * sine;
    row[half + i] = a * sine + b * cosine;
  }
}

// One token: its queries to [B, H, W, D], in the order of pairs; its key and value into the cache.
template <typename T>
inline void arrange(const Attention<T>& op, long b, long w, float* queries) {
  static thread_local std::vector<float> memory, turns;
  memory.resize(op.D), turns.resize(op.rotated);
  float* row = memory.data();
  const long token = b * op.W + w, half = op.rotated / 2;
  for (long i = 0; i < half; ++i) {
    const float angle = op.angles ? op.angles[token * half + i] : float(op.offset[b] + w) * op.frequencies[i];
    sine_and_cosine(angle, turns[2 * i], turns[2 * i + 1]);
  }
  for (long h = 0; h < op.H; ++h) {
    float* to = queries + ((b * op.H + h) * op.W + w) * op.D;
    norm_and_rotate(op, op.both + (token * op.H + h) * 2 * op.D, op.q_weight, turns.data(), row);
    for (long i = 0; i < op.D; ++i) to[place<T>(i)] = row[i];
  }
  for (long h = 0; h < op.HKV; ++h) {
    const long from = (token * op.HKV + h) * op.D;
    const long to = ((b * op.HKV + h) * op.capacity + op.offset[b] + w) * op.D;
    norm_and_rotate(op, op.k + from, op.k_weight, turns.data(), row);
    for (long i = 0; i < op.D; ++i) assign(op.keys[to + i], row[i]);
    std::memcpy(op.values + to, op.v + from, op.D * sizeof(T));
  }
}

// Softmax of n scores, not yet divided by the sum, which is returned.
inline float soften(float* scores, long n, float scale) {
  long i = 0;
  Lanes mosts = splat(scores[0]);
  for (; i + LANES <= n; i += LANES) mosts = larger(load(scores + i), mosts);
  float parts[LANES];
  store(parts, mosts);
  float most = parts[0];
  for (float part : parts) most = part > most ? part : most;
  for (; i < n; ++i) most = scores[i] > most ? scores[i] : most;
  for (i = 0; i < n; ++i) scores[i] = exponential((scores[i] - most) * scale);
  Lanes total = splat(0.0f);
  for (i = 0; i + LANES <= n; i += LANES) total = total + load(scores + i);
  float rest[LANES] = {};
  std::memcpy(rest, scores + i, (n - i) * sizeof(float));
  return sum(total + load(rest));
}

// Weighted values of R queries, P pairs of elements from `values` on, in their order; query r sees `seen + r` positions.
template <int R, int P, typename T>
inline void weigh(const float* weights, long stride, const T* values, long D, long seen, float* out) {
  Lanes sums[R][P][2];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = splat(0.0f);
  for (long s = 0; s < seen + R - 1; ++s) {
    Pair value[P];
    UNROLL for (int p = 0; p < P; ++p) value[p] = load_pair(values + s * D + p * PAIR);
    UNROLL for (int r = 0; r < R; ++r) {
      if (s >= seen + r) continue;
      const Lanes weight = splat(weights[r * stride + s]);
      UNROLL for (int p = 0; p < P; ++p) sums[r][p][0] = fma(weight, value[p].first, sums[r][p][0]);
      UNROLL for (int p = 0; p < P; ++p) sums[r][p][1] = fma(weight, value[p].second, sums[r][p][1]);
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int p = 0; p < P; ++p) {
      store(out + r * D + p * PAIR, sums[r][p][0]);
      store(out + r * D + p * PAIR + LANES, sums[r][p][1]);
    }
}

// R consecutive queries of one head; the first sees `seen` positions.
template <int R, typename T>
inline void attend(const Attention<T>& op, const float* queries, const T* keys, const T* values, long seen, float* out) {
  static thread_local std::vector<float> memory;
  const long most = seen + R - 1;
  memory.resize(R * most);
  float* scores = memory.data();
  float sums[R];
  const float* rows[R];
  UNROLL for (int r = 0; r < R; ++r) rows[r] = queries + r * op.D;
  panel(Dense<T>{keys, op.D}, 0, most, R, rows, rows, scores, most);
  UNROLL for (int r = 0; r < R; ++r) sums[r] = soften(scores + r * most, seen + r, op.scale);
  long d = 0;
  for (; d + 2 * PAIR <= op.D; d += 2 * PAIR) weigh<R, 2>(scores, most, values + d, op.D, seen, out + d);
  for (; d < op.D; d += PAIR) weigh<R, 1>(scores, most, values + d, op.D, seen, out + d);
  UNROLL for (int r = 0; r < R; ++r)
    for (long i = 0; i < op.D; ++i) out[r * op.D + i] /= sums[r];
}

template <typename T>
void attention(const Attention<T>& op) {
  constexpr int R = 4;  // queries that are computed together
  std::vector<float> queries(op.B * op.H * op.W * op.D);
  pool().run(op.B * op.W, [&](uint32_t part) { arrange(op, part / op.W, part % op.W, queries.data()); });
  const long asked = op.last ? 1 : op.W, blocks = (asked + R - 1) / R;
  pool().run(op.B * op.H * blocks, [&](uint32_t part) {
    const long block = part % blocks, h = part / blocks % op.H, b = part / blocks / op.H;
    const long first = op.last ? op.last[b] : block * R, count = std::min<long>(R, asked - block * R);
    const long kv = (b * op.HKV + h / (op.H / op.HKV)) * op.capacity * op.D;
    static thread_local std::vector<float> memory;
    memory.resize(R * op.D);
    for (long done = 0; done < count;) {
      const float* q = queries.data() + ((b * op.H + h) * op.W + first + done) * op.D;
      const long seen = op.offset[b] + first + done + 1;
      float* out = memory.data() + done * op.D;
      if (count - done == R) attend<R>(op, q, op.keys + kv, op.values + kv, seen, out), done += R;
      else attend<1>(op, q, op.keys + kv, op.values + kv, seen, out), ++done;
    }
    for (long w = 0; w < count; ++w) {
      const T* gate = op.both + ((b * op.W + first + w) * op.H + h) * 2 * op.D + op.D;
      T* to = op.out + ((b * asked + (op.last ? 0 : first + w)) * op.H + h) * op.D;
      for (long i = 0; i < op.D; ++i) assign(to[i], memory[w * op.D + place<T>(i)] * sigmoid(to_float(gate[i])));
    }
  });
}

}  // namespace headstart
