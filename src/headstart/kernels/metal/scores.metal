// Log-probabilities of a row's generated token and of its best ones, under the model itself.

namespace headstart {

// Find the `top` best tokens of a slice, and the mass of all to the best.
template <int THREADS, int EACH>
inline void score_slice(
    const thread float (&values)[EACH], int begin, int size, int top, device uint* codes, device float* mass,
    threadgroup ulong* parts, int index) {
  ulong last = 0, sum = 0, none = NOTHING;
  float best = -INFINITY;
  for (int t = 0; t < top; ++t) {
    ulong next = NOTHING, zero = 0;
    for (int i = 0; i < EACH; ++i) {
      const int id = begin + i * THREADS + index;
      if (id >= size) continue;
      const ulong own = code(values[i], id);
      next = own > last && own < next ? own : next;
    }
    over_threadgroup<THREADS>(next, zero, parts, index);
    if (t == 0) best = value_of(next);
    if (index == 0) put(codes + 2 * t, next);
    last = next == NOTHING ? NOTHING - 1 : next;
  }
  for (int i = 0; i < EACH; ++i)
    if (begin + i * THREADS + index < size && values[i] > -INFINITY) sum += mass_of(values[i] - best);
  over_threadgroup<THREADS>(none, sum, parts, index);
  if (index == 0) mass[0] = static_cast<float>(sum) / UNIT;
}

// Merge the slices of a row: the logarithm of the probability of a token, and of the `top` best. A simdgroup.
inline void merge_scores(
    const device uint* codes, const device float* masses, int slices, int top, float chosen_logit,
    device float* chosen, device int* ids, device float* scores, int lane) {
  float best = -INFINITY, sum = 0.0f;
  for (int s = 0; s < slices; ++s) best = metal::max(best, value_of(get(codes + 2 * s * top)));
  for (int s = 0; s < slices; ++s) {
    const float here = value_of(get(codes + 2 * s * top));
    if (here > -INFINITY) sum += masses[s] * metal::precise::exp(here - best);
  }
  const float total = best + metal::precise::log(sum);
  ulong last = 0;
  for (int t = 0; t < top; ++t) {
    ulong next = NOTHING, none = 0;
    for (int i = lane; i < slices * top; i += 32) {
      const ulong own = get(codes + 2 * i);
      next = own > last && own < next ? own : next;
    }
    over_simdgroup(next, none);
    last = next;
    if (lane == 0) {
      ids[t] = static_cast<int>(last);
      scores[t] = value_of(last) - total;
    }
  }
  if (lane == 0) chosen[0] = chosen_logit - total;
}

}  // namespace headstart
