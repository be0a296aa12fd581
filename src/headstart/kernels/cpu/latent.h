// Latent attention: what stands around `attend`, whose keys are here latents with a rotated part, and its values latents.
#pragma once

#include "attention.h"

namespace headstart {

// One token: its queries to [B, H, W, query_size], in the order of pairs; its latent and rotated key into the caches.
template <typename S, typename T>
inline void arrange_latent(const LatentAttention<T>& latent, long b, long w, float* queries) {
  static thread_local std::vector<float> memory, turns;
  const Attention<T>& op = latent.op;
  const long R = op.keys.D, rotated = op.more_keys.D, token = b * op.W + w, position = op.offset[b] + w;
  memory.resize(std::max(R, rotated)), turns.resize(op.rotation.rotated);
  float* row = memory.data();
  find_turns(op, b, w, turns.data());
  auto prepare = [&](const T* x, float scale) {
    for (long i = 0; i < rotated; ++i) row[i] = to_float(x[i]) * scale;
    rotate(op.rotation, turns.data(), row);
  };
  for (long h = 0; h < op.H; ++h) {
    const long query = token * op.H + h;
    float* to = queries + ((b * op.H + h) * op.W + w) * query_size(op);
    for (long i = 0; i < R; ++i) to[place<S>(i)] = to_float(op.q[query * R + i]);
    prepare(latent.queries + query * (latent.plain + rotated) + latent.plain, latent.query_scale);
    for (long i = 0; i < rotated; ++i) to[whole_pairs(R) + place<S>(i)] = row[i];
  }
  const T* from = latent.compressed + token * (R + rotated);
  prepare(from + R, 1.0f);
  keep<S>(op.more_keys, b * op.capacity + position, row);
  for (long i = 0; i < R; ++i) row[i] = to_float(from[i]);
  norm_row(row, R, op.k_weight, op.eps);
  for (long i = 0; i < R; ++i) row[i] *= op.value_scale;
  keep<S>(op.keys, b * op.capacity + position, row);
}

template <typename T>
void latent_attention(const LatentAttention<T>& latent) {
  const Attention<T>& op = latent.op;
  auto run = [&]<typename S>(S) {
    FloatLines queries(op.B * op.H * op.W * query_size(op));
    pool().run(
        op.B * op.W, [&](uint32_t part) { arrange_latent<S>(latent, part / op.W, part % op.W, queries.data()); });
    attend<S>(op, queries.data());
  };
  if (op.keys.scales) run(eight{});
  else run(T{});
}

template <typename T>
void first_elements(const T* x, long rows, long D, long some, float scale, T* out) {
  for (long r = 0; r < rows; ++r)
    for (long i = 0; i < some; ++i) assign(out[r * some + i], to_float(x[r * D + i]) * scale);
}

}  // namespace headstart
