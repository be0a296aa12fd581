// What surrounds the products of a mixture of experts: the choice of experts and the sum of what they make.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "lanes.h"
#include "math.h"
#include "pool.h"

namespace headstart {

constexpr long ROWS_OF_A_PART = 16;

// The largest `top` of E logits, the first of equals first, and their softmax: over all experts, or over the chosen
// ones where `normed`.
template <typename T>
inline void route_row(const T* logits, long E, long top, bool normed, uint32_t* indices, float* scores) {
  static thread_local std::vector<float> memory;
  memory.resize(E);
  for (long e = 0; e < E; ++e) memory[e] = to_float(logits[e]);
  float most = 0.0f, total = 0.0f;
  for (long t = 0; t < top; ++t) {
    long best = 0;
    for (long e = 1; e < E; ++e) best = memory[e] > memory[best] ? e : best;
    if (t == 0) most = memory[best];
    indices[t] = best;
    scores[t] = exponential(memory[best] - most);
    memory[best] = -std::numeric_limits<float>::infinity();
  }
  if (normed)
    for (long t = 0; t < top; ++t) total += scores[t];
  else
    for (long e = 0; e < E; ++e) total += exponential(to_float(logits[e]) - most);
  for (long t = 0; t < top; ++t) scores[t] /= total;
}

template <typename T>
void route(const T* logits, long rows, long E, long top, bool normed, uint32_t* indices, float* scores) {
  pool().run((rows + ROWS_OF_A_PART - 1) / ROWS_OF_A_PART, [&](uint32_t part) {
    for (long r = part * ROWS_OF_A_PART; r < std::min(rows, (part + 1) * ROWS_OF_A_PART); ++r)
      route_row(logits + r * E, E, top, normed, indices + r * top, scores + r * top);
  });
}

template <typename T>
void combine(
    const T* parts, const float* scores, const T* shared, const T* gate, long rows, long top, long N, T* out) {
  pool().run((rows + ROWS_OF_A_PART - 1) / ROWS_OF_A_PART, [&](uint32_t part) {
    static thread_local std::vector<float> memory;
    memory.resize(N);
    float* sums = memory.data();
    for (long r = part * ROWS_OF_A_PART; r < std::min(rows, (part + 1) * ROWS_OF_A_PART); ++r) {
      std::fill(sums, sums + N, 0.0f);
      for (long t = r * top; t < (r + 1) * top; ++t)
        for (long i = 0; i < N; ++i) sums[i] = fused(to_float(parts[t * N + i]), scores[t], sums[i]);
      const float weight = sigmoid(to_float(gate[r]));
      for (long i = 0; i < N; ++i) assign(out[r * N + i], fused(weight, to_float(shared[r * N + i]), sums[i]));
    }
  });
}

}  // namespace headstart
