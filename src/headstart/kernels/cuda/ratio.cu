// Verification of drafts by the ratio rule, from rows of logits and where they begin and end.

namespace headstart {

__device__ __forceinline__ float probability(const Cut& cut, float x, int id, float temperature, const Xtc& xtc, int b) {
  const Wide own = code(x, id);
  if (x == -INFINITY || own > cut.last() || (own < cut.first() && !xtc.keeps(b, id))) return 0;
  return expf(__fsub_rn(score(x, temperature), cut.total));
}

// Verify the drafts of a window [B, W], all but its first token, by the ratio rule: block verification, as
// sampling/accept.py has it. `most` drafts are accepted, and `tokens` are those and the token after them, again and
// again. With the optimistic rule that is all that are allowed. Of other sequences `tokens` are those `drawn` from the
// target, and `most` is W. Drafts [B, k] were drawn from one array of logits [B, k, size], or each from its own [B, 1, size]. Blocks: (part, draft, sequence).
template <int THREADS, typename T, typename Q, int N>
__device__ void verify_by_ratio(
    const T* logits, int size, int W, unsigned* memory, const float* params_each, const unsigned* words_each,
    const int* lengths, const int* rounds, const Xtc& xtc, const bool* optimistic, const int* drawn, const int* cuts,
    const int* window, const int* max_k, const int* remaining, const int* draft_cuts, const Q* const (&draft_logits)[N], int width, int* tokens, int* most) {
  constexpr int MOST = 16;
  __shared__ float p[MOST], q[MOST];
  const int i = blockIdx.y, b = blockIdx.z, k = W - 1;
  const float temperature = reinterpret_cast<const Params*>(params_each)[b].temperature;
  const NoiseWords& words = reinterpret_cast<const NoiseWords*>(words_each)[b];
  Work* const work = reinterpret_cast<Work*>(memory) + b * W;
  window += b * W, drawn += b * W, tokens += b * W;
  const int allowed = max(0, min(k, min(max_k[b], remaining[b] - 1)));
  if (!words.ratio) {
    if (blockIdx.x != 0 || i != 0 || threadIdx.x != 0) return;
    const int n = optimistic[b] ? allowed : 0;
    for (int j = 0; j < W; ++j) tokens[j] = !optimistic[b] ? drawn[j] : j < n ? window[j + 1] : drawn[n];
    most[b] = optimistic[b] ? n : W;
    return;
  }
  auto target_row = [&](int j) { return logits + static_cast<long long>(b * W + j) * size; };
  auto draft_row = [&](int j) {
    const Q* from = draft_logits[0];
    if (width > 1) return from + static_cast<long long>(b * width + j) * size;
#pragma unroll
    for (int n = 1; n < N; ++n)
      if (n == j) from = draft_logits[n];
    return from + static_cast<long long>(b) * size;
  };
  const Cut* const target_cuts = reinterpret_cast<const Cut*>(cuts) + b * W;
  const Cut* const drafter_cuts = reinterpret_cast<const Cut*>(draft_cuts) + b * k;
  auto p_of = [&](int j, float x, int id) { return probability(target_cuts[j], x, id, temperature, xtc, b); };
  auto q_of = [&](int j, int id) {
    const Cut& cut = drafter_cuts[j];
    if (cut.only >= 0) return id == cut.only ? 1.f : 0.f;  // there may be no logits
    return probability(cut, __fadd_rn(float(draft_row(j)[id]), 0.f), id, temperature, xtc, b);
  };
  if (int(threadIdx.x) < k) {
    const int j = threadIdx.x, id = window[j + 1];
    p[j] = p_of(j, __fadd_rn(float(target_row(j)[id]), 0.f), id), q[j] = q_of(j, id);
  }
  __syncthreads();
  auto next_weight = [&](float weight, int j) {
    const float ratio = __fdiv_rn(__fmul_rn(weight, p[j]), q[j]);
    return ratio > 1 ? 1 : ratio;  // NaN stays: it accepts nothing
  };
  float weight = 1;
  for (int j = 0; j < i; ++j) weight = next_weight(weight, j);
  if (i < allowed) {
    const Slice slice(size);
    const Words keys = row_keys(words, NEXT, rounds[b], lengths[b] + 1 + i);
    Wide best = NOTHING, excess = 0;
    const Wide last = target_cuts[i].last();
    auto kept = [&](float x, int id) { return x > -INFINITY && code(x, id) <= last; };
    each_logit(target_row(i), slice.begin, slice.end, kept, [&](float x, int id) {
      const float more = __fsub_rn(__fmul_rn(weight, p_of(i, x, id)), q_of(i, id));
      if (!(more > 0)) return;
      excess += Wide(__fmul_rn(more, UNIT));
      best = min(best, code(__fadd_rn(logf(more), gumbel(keys, id)), id));
    });
    reduce_block<THREADS>(best, excess);
    if (threadIdx.x == 0) atomicMin(&work[i].residual, best), atomicAdd(&work[i].excess, excess);
  }
  if (!last_to_come(&work->verify_done, gridDim.x * gridDim.y) || threadIdx.x != 0) return;

  int n = 0;
  weight = 1;
  for (int j = 1; j <= allowed; ++j) {
    weight = next_weight(weight, j - 1);
    float chance = weight;
    if (j < allowed) {
      const float more = __fmul_rn(float(load_acquire(&work[j].excess)), 1 / UNIT);
      const float total = __fadd_rn(more, __fsub_rn(1, weight));
      chance = total == 0 ? 1 : __fdiv_rn(more, total);
    }
    if (uniform(row_keys(words, ACCEPT, rounds[b], lengths[b] + j), 0) < chance) n = j;
  }
  const Wide other = n < allowed ? load_acquire(&work[n].residual) : NOTHING;
  for (int j = 0; j < W; ++j) tokens[j] = j < n ? window[j + 1] : other == NOTHING ? drawn[n] : int(other);
  most[b] = n;
}

}  // namespace headstart
