// Experts chosen by index. MLX passes arrays of fewer than 8 elements as `constant`, so small ones have a type
// parameter for their pointer.
//
// Pair p of (row of x, expert) takes row p / share of x and gives row p of y.

namespace headstart {

// Find up to ROWS pairs that chose the expert of `pair`, so that they share one read of its weights. Return false
// where an earlier pair does the work of this one.
template <int ROWS, typename Indices>
inline bool gather_pairs(Indices experts, int pairs, int pair, thread int (&found)[ROWS]) {
  const uint expert = experts[pair];
  int before = 0;
  for (int p = 0; p < pair; ++p) before += experts[p] == expert;
  if (before % ROWS) return false;
  int count = 0;
  for (int r = 0; r < ROWS; ++r) found[r] = -1;
  for (int p = pair; p < pairs; ++p) {
    if (experts[p] != expert) continue;
    for (int r = 0; r < ROWS; ++r) found[r] = r == count ? p : found[r];
    ++count;
  }
  return true;
}

// The TOP largest of E logits, the first of equals first, and their softmax over all E or (`normed`) over the TOP.
// One simdgroup per row.
template <typename T, int E, int TOP, typename Logits>
inline void route(Logits logits, bool normed, device uint* indices, device T* scores, int lane) {
  constexpr int EACH = (E + 31) / 32;
  float values[EACH], most = -INFINITY, all = 0.0f;
  for (int i = 0; i < EACH; ++i) {
    const int expert = lane + 32 * i;
    values[i] = expert < E ? static_cast<float>(logits[expert]) : -INFINITY;
    most = metal::max(most, values[i]);
  }
  for (ushort step = 1; step < 32; step *= 2) most = metal::max(most, metal::simd_shuffle_xor(most, step));
  for (int i = 0; i < EACH; ++i) all += metal::precise::exp(values[i] - most);
  all = sum_over_simdgroup(all);

  float shares[TOP], chosen = 0.0f;
  for (int t = 0; t < TOP; ++t) {
    float best = -INFINITY;
    int at = E - 1;  // also where nothing is larger: in a row of NaN
    for (int i = 0; i < EACH; ++i) {
      if (values[i] > best) {
        best = values[i];
        at = lane + 32 * i;
      }
    }
    for (ushort step = 1; step < 32; step *= 2) {
      const float other = metal::simd_shuffle_xor(best, step);
      const int there = metal::simd_shuffle_xor(at, step);
      if (other > best || (other == best && there < at)) {
        best = other;
        at = there;
      }
    }
    for (int i = 0; i < EACH; ++i)
      if (lane + 32 * i == at) values[i] = -INFINITY;
    shares[t] = static_cast<float>(static_cast<T>(metal::precise::exp(best - most) / all));
    chosen += shares[t];
    if (lane == 0) indices[t] = at;
  }
  for (int t = 0; t < TOP; ++t)
    if (lane == 0) scores[t] = static_cast<T>(normed ? shares[t] / chosen : shares[t]);
}

// One element of a row: the experts' outputs by their scores, and the shared expert's by the sigmoid of its gate.
template <typename T, typename Scores>
inline T combine(const device T* parts, Scores scores, int top, int N, T shared, T gate) {
  float sum = 0.0f;
  for (int i = 0; i < top; ++i) {
    sum = metal::fma(static_cast<float>(parts[static_cast<long>(i) * N]), static_cast<float>(scores[i]), sum);
  }
  return static_cast<T>(metal::fma(sigmoid(static_cast<float>(gate)), static_cast<float>(shared), sum));
}

}  // namespace headstart
