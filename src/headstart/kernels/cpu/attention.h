// Attention of a window over keys and values of sequences of different lengths, with everything between its projections:
// norms and rotation of queries and keys, the write into the cache (heads.h), the output's gate.
//
// S is what the caches hold: T, or whole numbers in eight bits. A query's scores are summed as in products.h. Softmax and weighted values are computed for SPLIT positions at a time,
// position by position, and what was found is merged from the first split to the query's own: nothing depends on the
// window, on the capacity, on threads or on who is computed beside it.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "heads.h"
#include "products.h"

namespace headstart {

constexpr long SPLIT = 512;           // positions that share a softmax
constexpr long LINE = SPLIT + LANES;  // between scores of two queries: rows a power of two apart share places in a cache
constexpr long QUERIES = 64;          // at most, of a tile
constexpr long MANY = 16;             // queries for which keys and values are copied
constexpr long AHEAD = 4096;          // bytes, from what is copied to what is prefetched

// Softmax of n scores, not yet divided by the sum → found[0], the largest score, and found[1], the sum. The first
// `unseen` become zero.
inline void soften(float* scores, long unseen, long n, float scale, float* found) {
  long i = 0;
  std::fill(scores, scores + unseen, -std::numeric_limits<float>::infinity());
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
template <int R, int P, typename V>
inline void weigh(
    const float* weights, const long* seen, long from, long to, V values, long step, float* out, long stride) {
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
template <int R, int P, typename V>
inline void weigh_all(
    const float* weights, const long* seen, long from, long to, V values, long step, long width, float* out,
    long stride) {
  long d = 0;
  for (; d + P * PAIR <= width; d += P * PAIR) weigh<R, P>(weights, seen, from, to, values + d, step, out + d, stride);
  if constexpr (P > 1)
    if (d < width) weigh_all<R, P / 2>(weights, seen, from, to, values + d, step, width - d, out + d, stride);
}

// A position of a cache.
template <typename S, typename T>
inline auto place_of(const Cache<T>& cache, long position) {
  const S* at = static_cast<const S*>(cache.at);
  if constexpr (sizeof(S) > 1) return at + position * cache.D;
  else return Eights<T>{at, cache.scales} + position * cache.D;
}

// Two times sixteen elements of a position, with zeros behind the last one.
template <typename S, typename T>
inline Pair pair_of(const Cache<T>& cache, long position, long d) {
  const auto at = place_of<S>(cache, position) + d;
  __builtin_prefetch(static_cast<const char*>(address(at)) + AHEAD);
  if constexpr (sizeof(S) > 1)
    if (d + PAIR > cache.D) {
      S rest[PAIR] = {};
      std::memcpy(rest, at, (cache.D - d) * sizeof(S));
      return load_pair(rest);
    }
  return load_pair(at);
}

// Queries of a window that share keys and values: `width` tokens from `first` on, of `heads` heads from `head` on.
template <typename S, typename T>
struct QueryTile {
  const Attention<T>& op;
  long b, head, heads, first, width;

  long rows() const {
    return heads * width;
  }
  // The positions that a row sees: from the first one to behind the last one.
  long begin(long row) const {
    return op.window ? std::max(0l, end(row) - op.window) : 0;
  }
  long end(long row) const {
    return op.offset[b] + first + row % width + 1;
  }
  long first_split() const {
    return begin(0) / SPLIT;
  }
  long last_split() const {
    return (end(width - 1) - 1) / SPLIT;
  }
  // Of a row's result: its elements in the order of pairs, the largest score, the sum of weights.
  long size() const {
    return whole_pairs(op.values.D);
  }
  long stride() const {
    return size() + LANES;
  }

  // What every row finds in a split → out [rows, stride]; nothing where it sees none of it.
  void attend(const float* queries, long split, float* out) const {
    static thread_local FloatLines memory;
    memory.resize(QUERIES * LINE);
    float* scores = memory.data();
    // What nobody sees is left out by whole lanes: so the others stay in theirs.
    const long start = split * SPLIT + std::max(0l, begin(0) - split * SPLIT) / LANES * LANES;
    const long n = std::min((split + 1) * SPLIT, end(width - 1)) - start, DK = query_size(op), count = rows();
    const long at = (b * op.HKV + head / (op.H / op.HKV)) * op.capacity + start;
    const float* rows[QUERIES];
    long seen[QUERIES];
    for (long r = 0; r < count; ++r) {
      rows[r] = queries + ((b * op.H + head + r / width) * op.W + first + r % width) * DK;
      seen[r] = end(r) - start;
    }
    blocks(op.keys, op.more_keys, at, n, 16, DK, [&](long from, long to, auto keys, long, long, long) {
      panel(Dense{keys, DK}, 0, to - from, count, rows, rows, scores + from, LINE);
    });
    for (long r = 0; r < count; ++r) {
      float *to = out + r * stride(), *found = to + size(), *mine = scores + r * LINE;
      std::fill(to, found, 0.0f);
      const long unseen = std::max(0l, begin(r) - start), some = std::min(n, seen[r]);
      if (unseen < some) soften(mine, unseen, some, op.scale, found);
      else std::fill(mine, mine + n, 0.0f), found[0] = -std::numeric_limits<float>::infinity(), found[1] = 0.0f;
    }
    constexpr int P = NATIVE == LANES ? 2 : 1;
    blocks(op.values, {}, at, n, 64, P * PAIR, [&](long from, long to, auto values, long step, long d, long some) {
      auto weigh_rows = [&]<int R>(long r) {
        float* to_rows = out + r * stride() + d;
        weigh_all<R, ROWS / R * P>(scores + r * LINE, seen + r, from, to, values, step, some, to_rows, stride());
      };
      long r = 0;
      for (; r + ROWS <= count; r += ROWS) weigh_rows.template operator()<ROWS>(r);
      switch (count - r) {
        case 3: return weigh_rows.template operator()<3>(r);
        case 2: return weigh_rows.template operator()<2>(r);
        case 1: return weigh_rows.template operator()<1>(r);
      }
    });
  }

  // f(from, to, keys or values, how far apart, first element, elements) for `block` of n positions after the other. For
  // many queries, and where they are not whole pairs in one cache, they are copied as float32, at most `width` elements
  // together, to where registers are filled from one cache line.
  template <typename F>
  void blocks(
      const Cache<T>& cache, const Cache<T>& more, long at, long n, long block, long width, const F& f) const {
    static thread_local FloatLines memory;
    const long here = whole_pairs(cache.D), D = here + whole_pairs(more.D);
    memory.resize(block * D);
    for (long s = 0; s < n; s += block) {
      const long to = std::min(s + block, n);
      if (rows() < MANY && D == cache.D) {
        f(s, to, place_of<S>(cache, at + s), D, 0, D);
        continue;
      }
      for (long i = 0; i < to - s; ++i)
        for (long d = 0; d < D; d += width)
          for (long k = 0, some = std::min(width, D - d); k < some; k += PAIR) {
            float* copy = &memory[d * block + i * some + k];
            const Pair pair = d + k < here ? pair_of<S>(cache, at + s + i, d + k) : pair_of<S>(more, at + s + i, d + k - here);
            store(copy, pair.first), store(copy + LANES, pair.second);
          }
      for (long d = 0; d < D; d += width) {
        const long some = std::min(width, D - d);
        f(s, to, static_cast<const float*>(&memory[d * block]), some, d, some);
      }
    }
  }

  // Add what rows found in a later split.
  void merge(float* __restrict all, const float* __restrict found, long split) const {
    const long D = size();
    for (long r = 0; r < rows(); ++r, all += stride(), found += stride()) {
      if (end(r) <= split * SPLIT || begin(r) >= (split + 1) * SPLIT) continue;
      const float most = std::max(all[D], found[D]);
      const float a = exponential((all[D] - most) * op.scale), c = exponential((found[D] - most) * op.scale);
      for (long i = 0; i < D; ++i) all[i] = fused(all[i], a, found[i] * c);
      all[D] = most, all[D + 1] = fused(all[D + 1], a, found[D + 1] * c);
    }
  }

  // Divide by the sums of weights, and apply the gates.
  void finish(const float* found) const {
    const long asked = op.last ? 1 : op.W, DV = op.values.D, D = size();
    for (long r = 0; r < rows(); ++r, found += stride()) {
      const long h = head + r / width, w = first + r % width, query = (b * op.W + w) * op.H + h;
      const T* gate = op.gated ? op.q + (2 * query + 1) * DV : op.gates ? op.gates + query : nullptr;
      T* to = op.out + ((b * asked + (op.last ? 0 : w)) * op.H + h) * DV;
      float part = 1.0f, total = found[D + 1];
      if (op.sinks) {
        const float score = found[D] * op.scale, most = std::max(score, op.sinks[h]);
        part = exponential(score - most), total = fused(total, part, exponential(op.sinks[h] - most));
      }
      for (long i = 0; i < DV; ++i) {
        const float value = found[place<S>(i)] * part / total;
        assign(to[i], gate ? value * sigmoid(to_float(gate[op.gated ? i : 0])) : value);
      }
    }
  }
};

// Attend with queries [B, H, W, query_size] to what the caches hold.
template <typename S, typename T>
void attend(const Attention<T>& op, const float* queries) {
  const long asked = op.last ? 1 : op.W, threads = pool().threads();
  const long group = op.H / op.HKV, heads = std::min(group, QUERIES), groups = op.B * op.HKV;
  // Splits of a few queries are shared by threads, and merged behind that; many queries are shared themselves.
  const bool share = asked * group <= QUERIES && groups < 2 * threads;
  const long width = share ? asked : std::clamp((asked * groups + threads - 1) / threads, 1l, QUERIES / heads);
  std::vector<QueryTile<S, T>> tiles;
  for (long b = 0; b < op.B; ++b)
    for (long h = 0, some; h < op.H; h += some) {
      some = std::min(heads, group - h % group);
      for (long w = 0; w < asked; w += width)
        tiles.push_back({op, b, h, some, op.last ? op.last[b] : w, std::min(width, asked - w)});
    }
  long splits = 1;
  for (const auto& tile : tiles) splits = std::max(splits, tile.last_split() - tile.first_split() + 1);
  const long size = heads * width * tiles[0].stride();  // of what a tile finds
  if (share && splits > 1) {
    std::unique_ptr<float[]> found(new float[tiles.size() * splits * size]);
    pool().run(tiles.size() * splits, [&](uint32_t part) {
      const auto& tile = tiles[part / splits];
      const long split = tile.first_split() + part % splits;
      if (split <= tile.last_split()) tile.attend(queries, split, &found[part * size]);
    });
    pool().run(tiles.size(), [&](uint32_t part) {
      const auto& tile = tiles[part];
      float* all = &found[part * splits * size];
      const long start = tile.first_split();
      for (long split = start + 1; split <= tile.last_split(); ++split)
        tile.merge(all, all + (split - start) * size, split);
      tile.finish(all);
    });
    return;
  }
  pool().run(tiles.size(), [&](uint32_t part) {
    const auto& tile = tiles[part];
    static thread_local FloatLines memory;
    memory.resize(2 * size);
    float *all = memory.data(), *found = all + size;
    tile.attend(queries, tile.first_split(), all);
    for (long split = tile.first_split() + 1; split <= tile.last_split(); ++split) {
      tile.attend(queries, split, found);
      tile.merge(all, found, split);
    }
    tile.finish(all);
  });
}

template <typename T>
void attention(const Attention<T>& op) {
  auto run = [&]<typename S>(S) {
    FloatLines queries(op.B * op.H * op.W * query_size(op));
    pool().run(op.B * op.W, [&](uint32_t part) { arrange<S>(op, part / op.W, part % op.W, queries.data()); });
    attend<S>(op, queries.data());
  };
  if (op.keys.scales) run(eight{});
  else run(T{});
}

}  // namespace headstart
