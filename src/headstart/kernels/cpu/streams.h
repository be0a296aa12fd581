// Residual streams that a hyper-connection mixes: see `kernels/streams.py`.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "math.h"
#include "pool.h"

namespace headstart {

template <typename T>
void norm_streams(const T* x, float eps, long rows, long D, float* out) {
  pool().run(rows, [&](uint32_t r) {
    float* row = out + r * D;
    for (long i = 0; i < D; ++i) row[i] = to_float(x[r * D + i]);
    const float scale = 1.0f / std::sqrt(dot(row, row, D) / float(D) + eps);
    for (long i = 0; i < D; ++i) row[i] *= scale;
  });
}

// Of one row's products: the weights of the mean [S], the shares [S], and the mixture [S, S], whose rows and columns sum
// to 1 when they have been divided by their sums often enough.
inline void stream_weights(
    const float* products, const float* scale, const float* base, int S, int iterations, float eps, float* mean,
    float* shares, float* mixture) {
  for (int s = 0; s < S; ++s) {
    mean[s] = sigmoid(products[s] * scale[0] + base[s]) + eps;
    shares[s] = 2.0f * sigmoid(products[S + s] * scale[1] + base[S + s]);
  }
  for (int s = 0; s < S; ++s) {
    float* row = mixture + s * S;
    float most = -INFINITY, sum = 0.0f;
    for (int t = 0; t < S; ++t) {
      const int at = (2 + s) * S + t;
      row[t] = products[at] * scale[2] + base[at], most = std::max(most, row[t]);
    }
    for (int t = 0; t < S; ++t) row[t] = exponential(row[t] - most), sum += row[t];
    for (int t = 0; t < S; ++t) row[t] = row[t] / sum + eps;
  }
  for (int n = 0; n < 2 * iterations - 1; ++n) {
    const int along = n % 2 ? 1 : S, across = n % 2 ? S : 1;  // columns first
    for (int s = 0; s < S; ++s) {
      float sum = 0.0f;
      for (int t = 0; t < S; ++t) sum += mixture[s * across + t * along];
      for (int t = 0; t < S; ++t) mixture[s * across + t * along] /= sum + eps;
    }
  }
}

template <typename T>
void mix_streams(const StreamMix<T>& op) {
  const int S = op.S;
  const long H = op.H, N = (2 + S) * S;
  pool().run(op.rows, [&](uint32_t r) {
    static thread_local std::vector<float> memory;
    memory.resize(S + S * S + (S + 1) * H);
    float *mean = memory.data(), *mixture = mean + S, *wide = mixture + S * S, *total = wide + S * H;
    stream_weights(op.products + r * N, op.scale, op.base, S, op.iterations, op.eps, mean, op.shares + r * S, mixture);
    for (long i = 0; i < S * H; ++i) wide[i] = to_float(op.x[r * S * H + i]);
    std::fill(total, total + H, 0.0f);
    for (int s = 0; s < S; ++s)
      for (long i = 0; i < H; ++i) total[i] += mean[s] * wide[s * H + i];
    for (long i = 0; i < H; ++i) assign(op.mean[r * H + i], total[i]);
    for (int t = 0; t < S; ++t) {
      float* to = op.streams + (r * S + t) * H;
      std::fill(to, to + H, 0.0f);
      for (int s = 0; s < S; ++s)
        for (long i = 0; i < H; ++i) to[i] += mixture[s * S + t] * wide[s * H + i];
    }
  });
}

template <typename T>
void inject(const float* streams, const float* shares, const T* made, long rows, int S, long H, T* out) {
  pool().run(rows, [&](uint32_t r) {
    for (int s = 0; s < S; ++s)
      for (long i = 0, at = (r * S + s) * H; i < H; ++i)
        assign(out[at + i], streams[at + i] + shares[r * S + s] * to_float(made[r * H + i]));
  });
}

}  // namespace headstart
