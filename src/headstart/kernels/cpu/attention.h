// Gated attention of a window over keys and values of sequences of different lengths, with everything between its
// projections: norms and rotation of queries and keys, the write into the cache, the output's gate.
//
// A query's scores are summed as in products.h. Softmax and weighted values are computed for SPLIT positions at a time,
// position by position, and what was found is merged from the first split to the query's own: nothing depends on the
// window, on the capacity, on threads or on who is computed beside it.
#pragma once

#include <algorithm>
#include <memory>
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

constexpr long SPLIT = 512;           // positions that share a softmax
constexpr long LINE = SPLIT + LANES;  // between scores of two queries: rows a power of two apart share places in a cache
constexpr long QUERIES = 64;          // at most, of a tile
constexpr long MANY = 16;             // queries for which keys and values are copied
constexpr long AHEAD = 4096;          // bytes, from what is copied to what is prefetched

// Softmax of n scores, not yet divided by the sum → found[0], the largest score, and found[1], the sum.
inline void soften(float* scores, long n, float scale, float* found) {
  long i = 0;
  Lanes mosts = splat(scores[0]);
  for (; i + LANES <= n; i += LANES) mosts = larger(load(scores + i), mosts);
  float parts[LANES];
  store(parts, mosts);
  float most = parts[0];
  for (float part : parts) most = part > most ? part : most;
  for (; i < n; ++i) most = scores[i] > most ? scores[i] : most;
  for (i = 0; i < n; ++i) scores[i] = exponential((scores[i] - most) * scale);
  Lanes sums = splat(0.0f);
  for (i = 0; i + LANES <= n; i += LANES) sums = sums + load(scores + i);
  float rest[LANES] = {};
  std::memcpy(rest, scores + i, (n - i) * sizeof(float));
  found[0] = most, found[1] = sum(sums + load(rest));
}

// Add positions `from` to `to` to the weighted values of R queries, P pairs of elements. Query r sees seen[r] positions;
// values of the first one are at `values`, the next `step` behind it.
template <int R, int P, typename T>
inline void weigh(
    const float* weights, const long* seen, long from, long to, const T* values, long step, float* out, long stride) {
  Lanes sums[R][2 * P];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int p = 0; p < 2 * P; ++p) sums[r][p] = load(out + r * stride + p * LANES);
  auto add = [&](long s, auto sees) {
    Pair value[P];
    UNROLL for (int p = 0; p < P; ++p) value[p] = load_pair(values + (s - from) * step + p * PAIR);
    UNROLL for (int r = 0; r < R; ++r) {
      if (!sees(r)) continue;
      const Lanes weight = splat(weights[r * LINE + s]);
      UNROLL for (int p = 0; p < P; ++p) sums[r][2 * p] = fma(weight, value[p].first, sums[r][2 * p]);
      UNROLL for (int p = 0; p < P; ++p) sums[r][2 * p + 1] = fma(weight, value[p].second, sums[r][2 * p + 1]);
    }
  };
  const long all = std::min(to, *std::min_element(seen, seen + R));
  long s = from;
  for (; s < all; ++s) add(s, [](int) { return true; });
  for (; s < to; ++s) add(s, [&](int r) { return s < seen[r]; });
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int p = 0; p < 2 * P; ++p) store(out + r * stride + p * LANES, sums[r][p]);
}

// `width` elements, P pairs at a time and the rest with fewer.
template <int R, int P, typename T>
inline void weigh_all(
    const float* weights, const long* seen, long from, long to, const T* values, long step, long width, float* out,
    long stride) {
  long d = 0;
  for (; d + P * PAIR <= width; d += P * PAIR) weigh<R, P>(weights, seen, from, to, values + d, step, out + d, stride);
  if constexpr (P > 1)
    if (d < width) weigh_all<R, P / 2>(weights, seen, from, to, values + d, step, width - d, out + d, stride);
}

// Queries of a window that share keys and values: `width` tokens from `first` on, of `heads` heads from `head` on.
template <typename T>
struct QueryTile {
  const Attention<T>& op;
  long b, head, heads, first, width;

  long rows() const {
    return heads * width;
  }
  long seen(long row) const {
    return op.offset[b] + first + row % width + 1;
  }
  long splits() const {
    return (seen(width - 1) + SPLIT - 1) / SPLIT;
  }
  // Of a row's result: its elements in the order of pairs, the largest score, the sum of weights.
  long stride() const {
    return op.D + LANES;
  }

  // What every row finds in a split → out [rows, stride]; nothing where it sees none of it.
  void attend(const float* queries, long split, float* out) const {
    static thread_local FloatLines memory;
    memory.resize(QUERIES * LINE);
    float* scores = memory.data();
    const long start = split * SPLIT, n = std::min(SPLIT, seen(width - 1) - start), D = op.D, count = rows();
    const long at = ((b * op.HKV + head / (op.H / op.HKV)) * op.capacity + start) * D;
    const float* rows[QUERIES];
    long seen_here[QUERIES];
    for (long r = 0; r < count; ++r) {
      rows[r] = queries + ((b * op.H + head + r / width) * op.W + first + r % width) * D;
      seen_here[r] = seen(r) - start;
    }
    blocks(op.keys + at, n, 16, D, [&](long from, long to, const auto* keys, long, long, long) {
      panel(Dense{keys, D}, 0, to - from, count, rows, rows, scores + from, LINE);
    });
    for (long r = 0; r < count; ++r) {
      float* to = out + r * stride();
      std::fill(to, to + D, 0.0f);
      if (seen_here[r] > 0) soften(scores + r * LINE, std::min(n, seen_here[r]), op.scale, to + D);
    }
    constexpr int P = NATIVE == LANES ? 2 : 1;
    blocks(op.values + at, n, 64, P * PAIR, [&](long from, long to, const auto* values, long step, long d, long some) {
      auto weigh_rows = [&]<int R>(long r) {
        float* to_rows = out + r * stride() + d;
        weigh_all<R, ROWS / R * P>(scores + r * LINE, seen_here + r, from, to, values, step, some, to_rows, stride());
      };
      long r = 0;
      for (; r + ROWS <= count; r += ROWS) weigh_rows.template operator()<ROWS>(r);
      for (; r < count; ++r) weigh_rows.template operator()<1>(r);
    });
  }

  // f(from, to, keys or values, how far apart, first element, elements) for `size` of n positions after the other. For many
  // queries they are copied as float32, at most `width` elements together, to where registers are filled from one
  // cache line.
  template <typename F>
  void blocks(const T* from, long n, long size, long width, const F& f) const {
    static thread_local FloatLines memory;
    memory.resize(size * op.D);
    for (long s = 0; s < n; s += size) {
      const long to = std::min(s + size, n), D = op.D;
      if (rows() < MANY) {
        f(s, to, from + s * D, D, 0, D);
        continue;
      }
      for (long i = 0; i < to - s; ++i)
        for (long d = 0; d < D; d += width)
          for (long k = 0, some = std::min(width, D - d); k < some; k += PAIR) {
            const T* at = from + (s + i) * D + d + k;
            float* copy = &memory[d * size + i * some + k];
            const Pair pair = load_pair(at);
            __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD);
            store(copy, pair.first), store(copy + LANES, pair.second);
          }
      for (long d = 0; d < D; d += width) {
        const long some = std::min(width, D - d);
        f(s, to, static_cast<const float*>(&memory[d * size]), some, d, some);
      }
    }
  }

  // Add what rows found in a later split.
  void merge(float* __restrict all, const float* __restrict found, long split) const {
    const long D = op.D;
    for (long r = 0; r < rows(); ++r, all += stride(), found += stride()) {
      if (seen(r) <= split * SPLIT) continue;
      const float most = std::max(all[D], found[D]);
      const float a = exponential((all[D] - most) * op.scale), c = exponential((found[D] - most) * op.scale);
      for (long i = 0; i < D; ++i) all[i] = fused(all[i], a, found[i] * c);
      all[D] = most, all[D + 1] = fused(all[D + 1], a, found[D + 1] * c);
    }
  }

  // Divide by the sums of weights, and apply the gates.
  void finish(const float* found) const {
    const long asked = op.last ? 1 : op.W, D = op.D;
    for (long r = 0; r < rows(); ++r, found += stride()) {
      const long h = head + r / width, w = first + r % width;
      const T* gate = op.both + ((b * op.W + w) * op.H + h) * 2 * D + D;
      T* to = op.out + ((b * asked + (op.last ? 0 : w)) * op.H + h) * D;
      for (long i = 0; i < D; ++i) assign(to[i], found[place<T>(i)] / found[D + 1] * sigmoid(to_float(gate[i])));
    }
  }
};

template <typename T>
void attention(const Attention<T>& op) {
  FloatLines queries(op.B * op.H * op.W * op.D);
  pool().run(op.B * op.W, [&](uint32_t part) { arrange(op, part / op.W, part % op.W, queries.data()); });
  const long asked = op.last ? 1 : op.W, threads = pool().threads(), stride = op.D + LANES;
  const long group = op.H / op.HKV, heads = std::min(group, QUERIES), groups = op.B * op.HKV;
  // Splits of a few queries are shared by threads, and merged behind that; many queries are shared themselves.
  const bool share = asked * group <= QUERIES && groups < 2 * threads;
  const long width = share ? asked : std::clamp((asked * groups + threads - 1) / threads, 1l, QUERIES / heads);
  std::vector<QueryTile<T>> tiles;
  for (long b = 0; b < op.B; ++b)
    for (long h = 0, some; h < op.H; h += some) {
      some = std::min(heads, group - h % group);
      for (long w = 0; w < asked; w += width)
        tiles.push_back({op, b, h, some, op.last ? op.last[b] : w, std::min(width, asked - w)});
    }
  long splits = 1;
  for (const QueryTile<T>& tile : tiles) splits = std::max(splits, tile.splits());
  const long size = heads * width * stride;  // of what a tile finds
  if (share && splits > 1) {
    std::unique_ptr<float[]> found(new float[tiles.size() * splits * size]);
    pool().run(tiles.size() * splits, [&](uint32_t part) {
      const long split = part % splits;
      const QueryTile<T>& tile = tiles[part / splits];
      if (split < tile.splits()) tile.attend(queries.data(), split, &found[part * size]);
    });
    pool().run(tiles.size(), [&](uint32_t part) {
      float* all = &found[part * splits * size];
      for (long split = 1; split < tiles[part].splits(); ++split) tiles[part].merge(all, all + split * size, split);
      tiles[part].finish(all);
    });
    return;
  }
  pool().run(tiles.size(), [&](uint32_t part) {
    const QueryTile<T>& tile = tiles[part];
    static thread_local FloatLines memory;
    memory.resize(2 * size);
    float *all = memory.data(), *found = all + size;
    tile.attend(queries.data(), 0, all);
    for (long split = 1; split < tile.splits(); ++split) {
      tile.attend(queries.data(), split, found);
      tile.merge(all, found, split);
    }
    tile.finish(all);
  });
}

}  // namespace headstart
