// Activations [rows, K] by weights [N, K], dense or quantised, one matrix for all rows or one for each expert.
//
// Threads share the outputs in strips; a strip is computed tile by tile (tiles.h). Weights are read once for every four
// rows, and stay in a near cache for the next four.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "low_rank.h"
#include "math.h"
#include "tiles.h"

namespace headstart {

constexpr int ROWS = 4;          // rows that share one reading of a tile
constexpr int STRIP = 32;        // outputs of a part
constexpr long LEAST = 1 << 16;  // multiplications that are worth another thread

// At most STRIP outputs from `n` on of R rows at x, their groups' sums at x_sums → out[r · stride + …]; the first `some`
// rows are asked for. At most eight outputs: more streams of weights than that slow each other down. Sums of a tile
// leave the registers only between chunks of K.
template <int R, typename M>
void strip(
    const M& matrix, long n, long count, long some, const float* const (&x)[R], const float* const (&x_sums)[R],
    float* out, long stride) {
  constexpr int C = std::min(M::SUMS / R, 8), S = R * C;
  const long K = matrix.K, chunk = R == 1 ? K : matrix.chunk();
  alignas(64) float held[R * STRIP * LANES];
  for (long k = 0; k < K; k += chunk)
    for (long c = 0; c < count; c += C) {
      Lanes each[S];
      float* mine = held + c * R * LANES;
      const long these = std::min<long>(C, count - c);
      if (k) UNROLL for (int i = 0; i < S; ++i) each[i] = load(mine + i * LANES);
      else UNROLL for (int i = 0; i < S; ++i) each[i] = splat(0.0f);
      matrix.template add<R, C>(x, n + c, these, k, std::min(k + chunk, K), each);
      if (k + chunk < K) {
        UNROLL for (int i = 0; i < S; ++i) store(mine + i * LANES, each[i]);
        continue;
      }
      float made[S];
      matrix.template finish<R, C>(x_sums, n + c, these, each);
      sums(each, made);
      for (long r = 0; r < some; ++r)
        if (these == C) std::memcpy(out + r * stride + c, made + r * C, C * sizeof(float));
        else std::copy_n(made + r * C, these, out + r * stride + c);
    }
}

// `count` outputs from `n` on of any number of rows: row r is at x[r], its sums at x_sums[r] → out + r · stride.
template <typename M>
void panel(
    const M& matrix, long n, long count, long rows, const float* const* x, const float* const* x_sums, float* out,
    long stride) {
  for (long first = 0; first < rows; first += ROWS) {
    const long some = std::min<long>(ROWS, rows - first);
    auto strips = [&]<int R>() {
      const float *xs[R], *sums[R];
      UNROLL for (int r = 0; r < R; ++r) {
        const long row = first + (r < some ? r : some - 1);
        xs[r] = x[row], sums[r] = x_sums[row];
      }
      for (long c = 0; c < count; c += STRIP)
        strip<R>(matrix, n + c, std::min<long>(STRIP, count - c), some, xs, sums, out + first * stride + c, stride);
    };
    if (some == 1) strips.template operator()<1>();
    else if (some == 2) strips.template operator()<2>();
    else strips.template operator()<ROWS>();
  }
}

// f(the matrix of an expert), as the struct that multiplies with it.
template <typename T, typename F>
inline void with(const Matrix& m, long K, long expert, const F& f) {
  if (!m.bits) return f(Dense<const T*>{static_cast<const T*>(m.w) + expert * m.N * K, K});
  auto quantised = [&]<int BITS, bool FLOATS = false>() {
    const long groups = expert * m.N * (K / m.group) * size_of(m.scale);
    const auto* w = static_cast<const uint8_t*>(m.w) + expert * m.N * (K / 8 * BITS);
    const auto *scales = static_cast<const char*>(m.scales) + groups, *biases = static_cast<const char*>(m.biases);
    if (biases) biases += FLOATS ? expert * sizeof(float) : groups;
    f(Quantised<BITS, FLOATS>{w, scales, biases, m.scale, K, m.group, m.N});
  };
  if (scales_floats(m.scale)) {
    if (m.bits == 8) return quantised.template operator()<8, true>();
    return quantised.template operator()<4, true>();
  }
  switch (m.bits) {
    case 1: return quantised.template operator()<1>();
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
  Activations<T> x(op.x, op.rows, op.K, {op.matrices[0].bits, op.matrices[0].group, op.matrices[0].scale});
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
  std::vector<LowRank<T>> added;
  added.reserve(op.count);
  for (int i = 0; i < op.count; ++i) added.emplace_back(op, op.matrices[i].adapters);
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
      float made[2][SOME][STRIP];
      for (int half = 0; half < (op.gated ? 2 : 1); ++half) {
        with<T>(op.matrices[i + half], op.K, group.expert, [&](const auto& matrix) {
          panel(matrix, n, some, these, xs, sums, made[half][0], STRIP);
        });
        if (const float* bias = op.matrices[i + half].bias)
          for (long r = 0; r < these; ++r)
            for (long c = 0; c < some; ++c) made[half][r][c] += bias[group.expert * N + n + c];
        for (long r = 0; r < these; ++r) added[i + half].add(rows[r], n, some, N, made[half][r]);
      }
      for (long r = 0; r < these; ++r) {
        float(&out)[STRIP] = made[0][r];
        if (op.gated)
          for (long c = 0; c < some; ++c) out[c] = silu(out[c]) * made[1][r][c];
        auto write = [&](auto* to) {
          for (long c = 0; c < some; ++c) assign(to[rows[r] * N + n + c], out[c]);
        };
        if (op.wide) write(static_cast<float*>(op.out[i]));
        else write(static_cast<T*>(op.out[i]));
      }
    }
  };
  const uint32_t all = parts * groups.size();
  if (work >= LEAST) return pool().run(all, compute);
  for (uint32_t part = 0; part < all; ++part) compute(part);
}

}  // namespace headstart
