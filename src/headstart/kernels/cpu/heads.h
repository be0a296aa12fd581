// Heads of a window before attention: norms and rotation of queries and keys, and the write into the caches.
#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"
#include "math.h"

namespace headstart {

// Elements of a head with zeros up to a whole pair.
constexpr long whole_pairs(long D) {
  return (D + PAIR - 1) / PAIR * PAIR;
}

// Of a query as it is multiplied with keys.
template <typename T>
long query_size(const Attention<T>& op) {
  return whole_pairs(op.keys.D) + whole_pairs(op.more_keys.D);
}

// A sine and a cosine for every pair of elements that turn at a token.
template <typename T>
inline void find_turns(const Attention<T>& op, long b, long w, float* turns) {
  const Rotation& rotation = op.rotation;
  const long half = rotation.rotated / 2;
  for (long i = 0; i < half; ++i) {
    const float* given = rotation.angles ? rotation.angles + (b * op.W + w) * half : nullptr;
    sine_and_cosine(
        given ? given[i] : float(op.offset[b] + w) * rotation.frequencies[i], turns[2 * i], turns[2 * i + 1]);
    turns[2 * i] *= rotation.scale, turns[2 * i + 1] *= rotation.scale;
  }
}

inline void rotate(const Rotation& rotation, const float* turns, float* row) {
  const long half = rotation.rotated / 2, step = rotation.interleaved ? 2 : 1, partner = rotation.interleaved ? 1 : half;
  for (long i = 0; i < half; ++i) {
    float &one = row[i * step], &other = row[i * step + partner];
    const float a = one, b = other, sine = turns[2 * i], cosine = turns[2 * i + 1];
    one = a * cosine - b * sine;
    other = a * sine + b * cosine;
  }
}

inline void norm_row(float* row, long D, const float* weight, float eps) {
  const float scale = 1.0f / std::sqrt(dot(row, row, D) / float(D) + eps);
  for (long i = 0; i < D; ++i) row[i] = (row[i] * scale) * weight[i];
}

// A row to a position of a cache. In eight bits it is rounded to T before, as it would be kept otherwise.
template <typename S, typename T>
inline void keep(const Cache<T>& cache, long position, const float* row) {
  S* to = static_cast<S*>(cache.at) + position * cache.D;
  if constexpr (sizeof(S) > 1) {
    for (long i = 0; i < cache.D; ++i) assign(to[i], row[i]);
  } else {
    for (long d = 0; d < cache.D; d += PAIR) {
      T held[PAIR], &scale = cache.scales[(position * cache.D + d) / PAIR];
      float most = 0.0f, odd = 0.0f;  // NaN where a number is not finite
      for (long i = 0; i < PAIR; ++i) {
        assign(held[i], row[d + i]);
        most = std::max(most, std::abs(to_float(held[i]))), odd += row[d + i] - row[d + i];
      }
      assign(scale, most / 127.0f + odd);
      const float by = std::max(to_float(scale), 1e-30f), magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds
      for (long i = 0; i < PAIR; ++i)
        to[d + i].code = std::clamp((to_float(held[i]) / by + magic) - magic, -127.0f, 127.0f);
    }
  }
}

// One token: its queries to [B, H, W, whole_pairs(DK)], in the order of pairs; its keys and values into the caches.
template <typename S, typename T>
inline void arrange(const Attention<T>& op, long b, long w, float* queries) {
  static thread_local std::vector<float> memory, turns;
  const long DK = op.keys.D, DV = op.values.D, token = b * op.W + w, position = op.offset[b] + w;
  memory.resize(std::max(DK, DV)), turns.resize(op.rotation.rotated);
  float* row = memory.data();
  find_turns(op, b, w, turns.data());
  auto prepare = [&](const T* x, const float* weight) {
    for (long i = 0; i < DK; ++i) row[i] = to_float(x[i]);
    if (weight) norm_row(row, DK, weight, op.eps);
    rotate(op.rotation, turns.data(), row);
  };
  const float scale = op.query_scales ? op.query_scales[std::min(position / op.period, op.periods - 1)] : 1.0f;
  for (long h = 0; h < op.H; ++h) {
    float* to = queries + ((b * op.H + h) * op.W + w) * whole_pairs(DK);
    prepare(op.q + (token * op.H + h) * (op.gated ? 2 : 1) * DK, op.q_weight);
    for (long i = 0; i < DK; ++i) to[place<S>(i)] = row[i] * scale;
  }
  for (long h = 0; h < op.HKV; ++h) {
    const long from = token * op.HKV + h, to = (b * op.HKV + h) * op.capacity + position;
    prepare(op.k + from * DK, op.k_weight);
    keep<S>(op.keys, to, row);
    for (long i = 0; i < DV; ++i) row[i] = to_float(op.v[from * DV + i]) * op.value_scale;
    keep<S>(op.values, to, row);
  }
}

}  // namespace headstart
