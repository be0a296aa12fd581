// Verify drafts by the ratio rule: speculative sampling with block verification, as sampling/accept.py has it.
#pragma once

#include "draw.h"

namespace headstart {

// The probability of every token of a row, 0 of those that cannot be drawn.
template <typename T>
void probabilities(const T* logits, long V, const Drawn& from, float temperature, const Exclusion& xtc, float* out) {
  if (from.only >= 0) {
    std::fill(out, out + V, 0.0f);
    out[from.only] = 1;
    return;
  }
  auto p = [&](long i) { return exponential(to_float(logits[i]) / temperature - from.total); };
  const float first = from.first_x, last = from.last_x;
  const uint32_t first_id = from.first_id, last_id = from.last_id;
  for (long i = 0; i < V; ++i) {
    const float x = to_float(logits[i]);
    const bool early = x > first || (x == first && uint32_t(i) < first_id);
    const bool late = x < last || (x == last && uint32_t(i) > last_id);
    out[i] = early || late ? 0.0f : p(i);
  }
  for (long i = 0; i < xtc.specials; ++i) {
    const long id = xtc.special[i];
    if (id < 0 || id >= V) continue;
    const Candidate token = {to_float(logits[id]), uint32_t(id)};
    if (!(Candidate{last, last_id} < token)) out[id] = p(id);
  }
}

// Σ max(weight · p − q, 0), each of which is left in p.
inline float keep_excess(float* p, const float* q, float weight, long V) {
  float sums[LANES] = {};
  auto excess = [&](long i) {
    const float more = weight * p[i] - q[i];
    return p[i] = more > 0 ? more : 0.0f;
  };
  long i = 0;
  for (; i + LANES <= V; i += LANES)
    for (long j = 0; j < LANES; ++j) sums[j] += excess(i + j);
  for (; i < V; ++i) sums[0] += excess(i);
  return sum(load(sums));
}

template <typename T>
void verify_sequence(const Verification<T>& op, long b) {
  const Draws<T>& of = op.target;
  const long k = of.W - 1, V = of.V;
  int* tokens = of.tokens + b * of.W;
  const NoiseWords& words = of.words[b];
  op.most[b] = of.W;
  if (!words.ratio) return;
  static thread_local std::vector<float> p, q;
  static thread_local Row row;
  p.resize(V), q.resize(V);
  const float temperature = of.params[b].temperature == 0 ? 1.0f : of.params[b].temperature;
  const Exclusion xtc = of.exclusion(b);
  const Drawn *targets = of.drawn + b * of.W, *drafters = op.drafters + b * k;
  const int* drafts = op.window + b * of.W + 1;
  const Keys of_round = fold({words.first, words.second}, of.rounds[b] + 1);
  auto keys = [&](uint32_t purpose, long i) { return fold(fold(of_round, purpose), uint32_t(of.lengths[b] + 1 + i)); };
  auto target = [&](long i) { return of.logits + (b * of.W + i) * V; };
  auto both = [&](long i) {
    probabilities(target(i), V, targets[i], temperature, xtc, p.data());
    probabilities(op.drafter(b, i), V, drafters[i], temperature, xtc, q.data());
  };
  auto one = [&](const T* logits, const Drawn& from, int id) {
    if (from.only >= 0) return from.only == id ? 1.0f : 0.0f;
    const Candidate token = {to_float(logits[id]), uint32_t(id)};
    const Range range = {{from.first_x, from.first_id}, {from.last_x, from.last_id}};
    const bool kept = !(range.last < token) && (!(token < range.first) || xtc.is_special(id));
    return kept ? exponential(token.x / temperature - from.total) : 0.0f;
  };
  const long allowed = std::max(0l, std::min({k, long(op.max_k[b]), long(op.remaining[b]) - 1}));
  static thread_local std::vector<float> weights;
  weights.assign(1, 1.0f);
  for (long i = 0; i < allowed; ++i) {
    const float ratio = weights[i] * one(target(i), targets[i], drafts[i]) / one(op.drafter(b, i), drafters[i], drafts[i]);
    weights.push_back(ratio > 1 ? 1.0f : ratio);  // NaN stays: it accepts nothing
  }
  long accepted = allowed;
  for (; accepted; --accepted) {
    const float weight = weights[accepted];
    float probability = weight;
    if (accepted < allowed) {
      both(accepted);
      const float excess = keep_excess(p.data(), q.data(), weight, V), total = excess + (1 - weight);
      probability = total == 0 ? 1.0f : excess / total;
    }
    if (unit(keys(words.accept, accepted - 1), 0) < probability) break;
  }
  float left = 0;
  if (accepted < allowed) {
    both(accepted);
    left = keep_excess(p.data(), q.data(), weights[accepted], V);
  }
  if (!(left > 0)) probabilities(target(accepted), V, targets[accepted], temperature, xtc, p.data());
  row.ids.clear(), row.scores.clear();
  for (long i = 0; i < V; ++i)
    if (p[i] > 0) row.ids.push_back(i), row.scores.push_back(std::log(p[i]));
  int next = tokens[accepted];  // where nothing can be drawn
  if (!row.ids.empty()) {
    const long first = std::max_element(row.scores.begin(), row.scores.end()) - row.scores.begin();
    next = row.ids[row.race(keys(words.next, accepted), first)];
  }
  for (long i = 0; i <= k; ++i) tokens[i] = i < accepted ? drafts[i] : next;
  op.most[b] = accepted;
}

template <typename T>
void verify(const Verification<T>& op) {
  pool().run(op.target.B, [&](uint32_t b) { verify_sequence(op, b); });
}

}  // namespace headstart
