// Draw tokens from rows of logits as the reference does (sampling/distribution.py), without sorting the vocabulary and
// with noise for those tokens only that can win.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "lanes.h"
#include "math.h"
#include "mlx/backend/cpu/simd/simd.h"
#include "noise.h"
#include "pool.h"

namespace headstart {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// e^x as MLX rounds it: what lies on the edge of top_p is kept as there.
inline float mlx_exp(float x) {
  return mlx::core::simd::exp(mlx::core::simd::Simd<float, 1>(x)).value;
}

// A token in the order of sampling: the larger logit first, of equal ones the lower id.
struct Candidate {
  float x;
  uint32_t id;

  bool operator<(const Candidate& other) const {
    return x != other.x ? x > other.x : id < other.id;
  }
};

// One row, and what threads need to draw from it.
struct Row {
  std::vector<float> x, mass;        // logits; e^(x - most)
  std::vector<Candidate> best;       // in order
  std::vector<float> scores;         // of the tokens that can be drawn
  std::vector<uint32_t> ids;         // their ids; empty: all in order
  float most, normalizer;            // the largest logit, and the sum of `mass` where it was asked for
  long at;                           // where the largest is

  template <typename T>
  void read(const T* logits, long V) {
    x.resize(V);
    float largest[LANES];
    std::fill(largest, largest + LANES, -INFINITE);
    bool odd = false;
    long i = 0;
    for (; i + LANES <= V; i += LANES)
      for (long j = 0; j < LANES; ++j) {
        x[i + j] = to_float(logits[i + j]);
        odd |= x[i + j] != x[i + j];
        largest[j] = x[i + j] > largest[j] ? x[i + j] : largest[j];
      }
    for (; i < V; ++i) x[i] = to_float(logits[i]), odd |= x[i] != x[i], largest[0] = std::max(largest[0], x[i]);
    most = *std::max_element(largest, largest + LANES);
    at = odd ? 0 : std::find(x.begin(), x.end(), most) - x.begin();
    if (odd) most = std::numeric_limits<float>::quiet_NaN();
  }

  bool finite() const {
    return most > -INFINITE && most < INFINITE;
  }

  void add_up() {
    mass.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) mass[i] = mlx_exp(x[i] - most);
    normalizer = 0;
    for (float each : mass) normalizer += each;
  }

  // Put the best tokens in order: as many as have `share` of the mass, and `count` or more.
  void sort_best(float share, long count) {
    constexpr int BINS = 1024;  // by distance from the largest logit
    constexpr float BINS_PER_NAT = 32;
    static thread_local std::vector<uint16_t> bins;
    bins.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const float distance = (most - x[i]) * BINS_PER_NAT;
      bins[i] = uint16_t(distance < BINS - 1 ? distance : BINS - 1);
    }
    long counts[BINS] = {}, found = 0;
    float masses[BINS] = {}, there = 0;
    for (size_t i = 0; i < x.size(); ++i) ++counts[bins[i]], masses[bins[i]] += share > 0 ? mass[i] : 0.0f;
    int last = 0;
    for (;; ++last) {
      found += counts[last], there += masses[last];
      if (last == BINS - 1 || (found >= count && there >= share * normalizer)) break;
    }
    best.clear();
    for (size_t i = 0; i < x.size(); ++i)
      if (bins[i] <= last) best.push_back({x[i], uint32_t(i)});
    std::sort(best.begin(), best.end());
  }

  // The logarithm of the sum of e^score.
  float total(float top) const {
    float sums[LANES] = {};
    size_t i = 0;
    for (; i + LANES <= scores.size(); i += LANES)
      for (int j = 0; j < LANES; ++j) sums[j] += exponential(scores[i + j] - top);
    for (; i < scores.size(); ++i) sums[0] += exponential(scores[i] - top);
    return top + std::log(sum(load(sums)));
  }

  // Which of the scores is the largest with its noise; of equal ones that with the lowest id. Begins with `first`.
  long race(Keys keys, long first) const {
    constexpr long BLOCK = 256;
    auto id = [&](long i) { return ids.empty() ? uint32_t(i) : ids[i]; };
    auto value = [&](long i) { return scores[i] + gumbel(unit(keys, id(i))); };
    long winner = first, size = scores.size();
    float record = value(first);
    uint8_t can_win[BLOCK];
    for (long begin = 0; begin < size; begin += BLOCK) {
      const long n = std::min(BLOCK, size - begin);
      // Noise is at most -log(unit). What rounding may add is allowed for.
      const float floor = record - 1e-4f - std::abs(record) * 0x1p-21f;
      uint8_t any = 0;
      auto test = [&](long i, uint32_t id) {
        can_win[i] = unit(keys, id) <= exponential(scores[begin + i] - floor);
        any |= can_win[i];
      };
      if (ids.empty())
        for (long i = 0; i < n; ++i) test(i, uint32_t(begin + i));
      else
        for (long i = 0; i < n; ++i) test(i, ids[begin + i]);
      for (long i = begin; any && i < begin + n; ++i) {
        if (!can_win[i - begin]) continue;
        const float here = value(i);
        if (here > record || (here == record && id(i) < id(winner))) record = here, winner = i;
      }
    }
    return winner;
  }
};

// The first and the last token that a row can draw.
struct Range {
  Candidate first = {INFINITE, 0}, last = {-INFINITE, ~0u};

  bool holds(Candidate token) const {
    return !(token < first) && !(last < token);
  }
};

// Keep of a row what top_p, min_p, XTC (where it `excludes` here) and top_k leave, in this order.
inline Range truncate(Row& row, const DrawParams& params, const Exclusion& xtc, bool excludes) {
  const long V = row.x.size(), top_k = std::min(long(params.top_k), V);
  const bool by_mass = params.top_p < 1, by_ratio = params.log_min_p > -INFINITE;
  float total = 0, share = 0;
  if (by_mass || by_ratio || excludes) row.add_up(), total = std::log(row.normalizer) + row.most;
  if (!by_mass && !by_ratio) excludes = excludes && 1.001f > xtc.threshold * row.normalizer;  // of all, one is likely
  long count = V;
  if (by_ratio) {
    const float least = row.most + params.log_min_p - 1e-3f;
    count = std::count_if(row.x.begin(), row.x.end(), [&](float x) { return x >= least; }) + 1;
    count = std::max(count, std::min(long(params.min_keep) + 1, V));
  }
  if (top_k < V && !excludes) count = std::min(count, top_k);
  if (count == V && (by_mass || excludes)) count = 1, share = by_mass ? params.top_p + 1e-5f : 1 - 1e-6f;
  for (;; count = 4 * row.best.size(), share = 0) {
    row.sort_best(share, std::min(count, V));
    const bool complete = long(row.best.size()) == V;
    bool cut = false;
    long kept = 0;
    float cumulative = 0;
    for (; kept < long(row.best.size()) && !cut; ++kept) {
      const float logp = row.best[kept].x - total, p = by_mass || excludes ? mlx_exp(logp) : 0.0f;
      cumulative += p;
      cut = (by_mass && kept && !(cumulative - p < params.top_p)) ||
            (by_ratio && !(logp >= row.best[0].x - total + params.log_min_p) && kept >= params.min_keep);
      if (cut) {
        cumulative -= p;
        break;
      }
      if (!excludes && kept + 1 == top_k) cut = true;
    }
    const bool rest = !by_mass && !by_ratio;  // nothing but top_k ends the range
    if (!cut && !complete && !(excludes && rest)) continue;
    Range range;
    long begin = 0;
    if (excludes) {
      float sum = 0;
      for (long i = 0; i < kept; ++i) sum += mlx_exp(row.best[i].x - total);
      long above = 0;
      while (above < kept && mlx_exp(row.best[above].x - total) / sum > xtc.threshold) ++above;
      begin = std::max(above - 1, 0l);
      if (begin) range.first = row.best[begin];
      if (top_k < V) {
        long taken = 0, i = 0;
        for (; i < kept && taken < top_k; ++i) taken += i >= begin || xtc.is_special(row.best[i].id);
        if (taken < top_k && !cut && !complete) continue;
        kept = i, cut = true;
      }
    }
    if (cut || complete) range.last = row.best[kept - 1];
    return range;
  }
}

// Tokens from rows of logits [B, W, V], and what they were drawn from.
template <typename T>
void draw_row(const Draws<T>& op, long r) {
  static thread_local Row row;
  const long b = r / op.W, position = op.lengths[b] + 1 + op.first + r % op.W;
  const DrawParams& params = op.params[b];
  Drawn& cut = op.drawn[r];
  row.read(op.logits + r * op.V, op.V);
  const Candidate best = {row.most, uint32_t(row.at)};
  op.tokens[r] = row.at, op.finite[r] = row.finite();
  cut = {best.x, best.id, best.x, best.id, best.x, -1};
  if (!row.finite() || params.temperature == 0) return;
  const NoiseWords& words = op.words[b];
  const Keys of_round = fold({words.first, words.second}, words.ratio ? op.rounds[b] + 1 : 0);
  auto keys = [&](uint32_t purpose) { return fold(fold(of_round, purpose), uint32_t(position)); };
  Exclusion xtc = op.exclusion(b);
  const bool excludes = xtc.probability > 0 && unit(keys(XTC), 0) <= xtc.probability;
  Range range;
  if (params.top_k < op.V || params.top_p < 1 || params.log_min_p > -INFINITE || excludes)
    range = truncate(row, params, xtc, excludes);
  row.ids.clear(), row.scores.clear();
  long first = 0;  // a token to begin with
  if (range.last.x > -INFINITE) {
    for (const Candidate& each : row.best)
      if (!(range.last < each) && (!(each < range.first) || xtc.is_special(each.id)))
        row.ids.push_back(each.id), row.scores.push_back(each.x / params.temperature);
  } else {
    row.scores.resize(op.V);
    for (long i = 0; i < op.V; ++i) row.scores[i] = row.x[i] / params.temperature;
    first = row.at;
    if (range.first.x < INFINITE) {
      for (const Candidate& each : row.best)
        if (each < range.first && !xtc.is_special(each.id)) row.scores[each.id] = -INFINITE;
      first = range.first.id;
    }
  }
  float total = 0;
  if (words.ratio) total = row.total(row.scores[first]);
  cut = {range.first.x, range.first.id, range.last.x, range.last.id, total, -1};
  if (words.ratio && op.purpose == NEXT && op.W > 1) return;  // drawn when it is known what is accepted
  const uint32_t purpose = op.purpose == NEXT ? words.next : words.draft;
  const long won = row.race(keys(purpose), first);
  op.tokens[r] = row.ids.empty() ? won : row.ids[won];
}

template <typename T>
void draw(const Draws<T>& op) {
  pool().run(op.B * op.W, [&](uint32_t r) { draw_row(op, r); });
}

}  // namespace headstart
