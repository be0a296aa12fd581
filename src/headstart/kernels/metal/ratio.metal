// Verification of drafts by the ratio rule, as sampling/accept.py has it: block verification.

namespace headstart {

constant constexpr int DRAFTS = 16;  // of a window, at most

template <typename Ids>
inline float probability(
    const thread Cut& cut, float x, uint id, const thread Sequence& how, const thread Special<Ids>& special) {
  if (cut.only >= 0) return static_cast<int>(id) == cut.only ? 1.0f : 0.0f;
  const ulong own = code(x, id);
  if (x == -INFINITY || own > cut.last || (own < cut.first && !special.has(id))) return 0.0f;
  return metal::precise::exp(how.score(x) - cut.total);
}

// The likelihood ratio of target to drafter over one more draft, at most 1. NaN stays: it accepts nothing.
inline float next_weight(float weight, float p, float q) {
  const float ratio = weight * p / q;
  return ratio > 1.0f ? 1.0f : ratio;
}

inline int allowed_drafts(int k, int most, int remaining) {
  return metal::max(0, metal::min(k, metal::min(most, remaining - 1)));
}

// What the target would draw more often than the drafter at draft `i`, over tokens `begin` to `end` of its candidates:
// the mass, and the best code with its noise.
template <int THREADS, typename T, typename Q, typename Ids>
inline void find_excess(
    const thread Candidates<T>& from, const device Q* drafter, const thread Cut& target, const thread Cut& draft,
    float weight, int begin, int end, const thread Sequence& how, const thread Words& keys, const thread Special<Ids>& special,
    device uint* excess, threadgroup ulong* parts, int index) {
  ulong best = NOTHING, sum = 0;
  for (int i = begin + index; i < end; i += THREADS) {
    const ulong own = from.at(i);
    if (own == NOTHING || own > target.last) continue;
    const uint id = static_cast<uint>(own);
    const float q = draft.only >= 0 ? 0.0f : static_cast<float>(drafter[id]);  // there may be no logits
    const float p = probability(target, value_of(own), id, how, special);
    const float more = weight * p - probability(draft, q, id, how, special);
    if (!(more > 0.0f)) continue;
    sum += static_cast<ulong>(more * UNIT);
    const ulong here = code(metal::precise::log(more) + gumbel(keys, id), id);
    best = here < best ? here : best;
  }
  over_threadgroup<THREADS>(best, sum, parts, index);
  if (index != 0) return;
  put(excess, best);
  put(excess + 2, sum);
}

// Accept drafts of a sequence: `tokens` are those and the one after them, again and again, and `most` how many. With
// the optimistic rule that is all that are allowed. With others tokens are those `drawn`, and `most` is W. A simdgroup.
template <typename Window, typename Drawn, typename Tokens>
inline void accept(
    Window window, Drawn drawn, int W, int allowed, bool optimistic, const threadgroup float* p,
    const threadgroup float* q, const device uint* excess, int slices, const thread Sequence& how, Tokens tokens,
    device int* most, int lane) {
  float weight = 1.0f;
  int accepted = 0, next = -1;
  for (int j = 1; how.ratio && j <= allowed; ++j) {
    weight = next_weight(weight, p[j - 1], q[j - 1]);
    float chance = weight;
    int other = -1;
    if (j < allowed) {
      ulong best = NOTHING, sum = 0;
      for (int s = lane; s < slices; s += 32) {
        const device uint* from = excess + (j * slices + s) * 4;
        best = get(from) < best ? get(from) : best;
        sum += get(from + 2);
      }
      over_simdgroup(best, sum);
      const float more = static_cast<float>(sum) / UNIT, total = more + (1.0f - weight);
      chance = total == 0.0f ? 1.0f : more / total;
      if (best != NOTHING) other = static_cast<int>(best);
    }
    const Words keys = how.keys(ACCEPT, how.length + j);
    if (uniform(keys, 0) < chance) {
      accepted = j;
      next = other;
    }
  }
  if (how.ratio && accepted == 0 && allowed > 0) {  // the first draft is rejected
    ulong best = NOTHING, none = 0;
    for (int s = lane; s < slices; s += 32) best = get(excess + s * 4) < best ? get(excess + s * 4) : best;
    over_simdgroup(best, none);
    next = best == NOTHING ? -1 : static_cast<int>(best);
  }
  if (optimistic) accepted = allowed;
  if (lane != 0) return;
  for (int j = 0; j < W; ++j) {
    const int after = next >= 0 ? next : drawn[accepted];
    tokens[j] = !how.ratio && !optimistic ? drawn[j] : j < accepted ? window[j + 1] : after;
  }
  most[0] = how.ratio || optimistic ? accepted : W;
}

}  // namespace headstart
