// Draw a token from each row of logits, without sorting it.
//
// A threadgroup has a slice of a row: `survey` finds its best token, draws from it where nothing truncates the row, and
// else counts tokens by their distance from the best, in bins. `plan` finds the bin in which the row ends, `gather`
// lists all tokens up to it, and `select` finds the exact end among these, and draws. Of a row whose list would be too
// long, as of a flat one, `select` reads all tokens. A sum is of whole numbers, or has one order: what a row draws
// depends on its own logits.

namespace headstart {

constant constexpr ulong NOTHING = ~0ul;
constant constexpr float UNIT = 1099511627776.0f;  // 2^40: masses are counted in such parts
constant constexpr float PART = 524288.0f;         // 2^19: those of a bin, in which a slice has up to 4,096 tokens
constant constexpr int BINS = 128;
constant constexpr float BINS_PER_NAT = 8.0f;
constant constexpr int FOUND = 8, PLAN = 8;  // numbers of a slice and of a row
constant constexpr int LISTED = 4096;        // tokens of a row, at most
constant constexpr uint DRAWN = 0, LIST = 1, ROW = 2, EXCLUDED = 3;  // what is left of a row after the survey
constant constexpr uint DRAFT = 0, ACCEPT = 1, NEXT = 2, XTC = 3;

struct Words {
  uint first, second;
};

inline uint mix(uint x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

inline Words fold(const thread Words& keys, uint word) {
  return {mix(keys.first ^ (word * 0x9E3779B9u)), mix(keys.second + mix(word ^ keys.first))};
}

// In (0, 1), as sampling/noise.py has it; and Gumbel noise.
inline float uniform(const thread Words& keys, uint id) {
  const float word = static_cast<float>(mix(mix(keys.first ^ id) + keys.second));
  const float u = (word + 0.5f) * 2.3283064365386963e-10f;
  return u < 0.99999994f ? u : 0.99999994f;
}

inline float gumbel(const thread Words& keys, uint id) {
  const float x = -uniform(keys, id), y = 1.0f + x;  // log(1 + x), also of a small x
  return -metal::precise::log(-(y == 1.0f ? x : x * (metal::precise::log(y) / (y - 1.0f))));
}

// Numbers by which tokens are ordered as sampling does: the larger logit first, of equal ones the lower id.
inline ulong code(float x, uint id) {
  const uint bits = as_type<uint>(x + 0.0f);  // -0 is 0
  return static_cast<ulong>(bits >> 31 ? bits : ~bits & 0x7FFFFFFFu) << 32 | id;
}

inline float value_of(ulong own) {
  const uint key = static_cast<uint>(own >> 32);
  return as_type<float>(key >> 31 ? key : ~key & 0x7FFFFFFFu);
}

inline ulong mass_of(float log_probability) {
  return static_cast<ulong>(metal::precise::exp(log_probability) * UNIT);
}

inline bool is_sound(float best) { return best > -INFINITY && best < INFINITY; }

inline float floor_of(float x) {  // of a bin's edge
  const float whole = static_cast<float>(static_cast<int>(x));
  return metal::abs(x) >= 8388608.0f ? x : whole > x ? whole - 1.0f : whole;
}

// Bins have fixed edges, so that those of slices can be added.
inline int bin_of(float best, float x) {
  const float apart = floor_of(best * BINS_PER_NAT) - floor_of(x * BINS_PER_NAT);
  return apart < BINS - 1 ? static_cast<int>(apart) : BINS - 1;
}

inline float edge_of(float best, int bin) {
  return (floor_of(best * BINS_PER_NAT) - static_cast<float>(bin - 1)) / BINS_PER_NAT;
}

// How a sequence samples, and what its noise is made of.
struct Sequence {
  float temperature, top_k, top_p, log_min_p, min_keep;
  uint first, second, ratio, draft, accept, next;
  int length, round;
  float xtc_probability, xtc_threshold;

  bool truncates(int size) const thread {
    return temperature != 0.0f && (top_k < size || top_p < 1.0f || log_min_p > -INFINITY);
  }
  float score(float x) const thread { return x / (temperature == 0.0f ? 1.0f : temperature); }
  Words keys(uint purpose, int position) const thread {
    const Words both = {first, second};
    const uint word = purpose == DRAFT ? draft : purpose == ACCEPT ? accept : purpose == NEXT ? next : 4u;
    const Words of_round = fold(both, ratio ? round + 1 : 0), of_purpose = fold(of_round, word);
    return fold(of_purpose, static_cast<uint>(position));
  }
  bool excludes(int position) const thread {
    const Words own = keys(XTC, position);
    return temperature != 0.0f && xtc_probability > 0.0f && uniform(own, 0) <= xtc_probability;
  }
};

template <typename Numbers, typename Noise, typename Integers, typename Xtc>
inline Sequence sequence(
    Numbers p, Noise w, Integers lengths, Integers rounds, Xtc probability, Xtc threshold, int b) {
  p += 5 * b;
  w += 6 * b;
  return {p[0], p[1], p[2], p[3], p[4], w[0], w[1], w[2], w[3], w[4], w[5], lengths[b], rounds[b],
          probability[b], threshold[b]};
}

// Tokens that XTC keeps.
template <typename Ids>
struct Special {
  Ids ids;
  int count;

  bool has(uint id) const thread {
    for (int i = 0; i < count; ++i)
      if (ids[i] == static_cast<int>(id)) return true;
    return false;
  }
};

template <typename Ids>
inline Special<Ids> special_tokens(Ids ids, int count, int b) {
  return {ids + count * b, count};
}

inline ulong shuffled(ulong x, ushort step) {
  const uint high = metal::simd_shuffle_xor(static_cast<uint>(x >> 32), step);
  return static_cast<ulong>(high) << 32 | metal::simd_shuffle_xor(static_cast<uint>(x), step);
}

// The smallest code and the sum of all lanes, in every lane.
inline void over_simdgroup(thread ulong& smallest, thread ulong& sum) {
  for (ushort step = 1; step < 32; step *= 2) {
    const ulong other = shuffled(smallest, step);
    smallest = other < smallest ? other : smallest;
    sum += shuffled(sum, step);
  }
}

// The same of all threads.
template <int THREADS>
inline void over_threadgroup(thread ulong& smallest, thread ulong& sum, threadgroup ulong* parts, int index) {
  over_simdgroup(smallest, sum);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (index % 32 == 0) {
    parts[index / 16] = smallest;
    parts[index / 16 + 1] = sum;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  smallest = NOTHING;
  sum = 0;
  for (int i = 0; i < THREADS / 32; ++i) {
    smallest = parts[2 * i] < smallest ? parts[2 * i] : smallest;
    sum += parts[2 * i + 1];
  }
}

inline void put(device uint* to, ulong x) {
  to[0] = static_cast<uint>(x >> 32);
  to[1] = static_cast<uint>(x);
}

inline ulong get(const device uint* from) { return static_cast<ulong>(from[0]) << 32 | from[1]; }

// Look over the EACH tokens that a thread has of a slice from `begin` on; `own` is the best of the model's logits, 0 if
// one is NaN. Leaves in `found`: the best code, `own`, what is drawn, and the mass to the best.
template <int THREADS, int EACH, bool COUNTS>
inline void survey(
    const thread float (&values)[EACH], ulong own, const thread Sequence& how, uint purpose, int position, int begin,
    int size, device uint* found, device uint* bins, threadgroup ulong* parts, threadgroup metal::atomic_uint* counted,
    int index) {
  ulong first = NOTHING, none = 0;
  for (int i = 0; i < EACH; ++i) {
    const int id = begin + i * THREADS + index;
    if (id >= size) continue;
    const ulong here = values[i] != values[i] ? 0 : code(values[i], id);
    first = here < first ? here : first;
  }
  over_threadgroup<THREADS>(first, none, parts, index);
  over_threadgroup<THREADS>(own, none, parts, index);
  const float best = value_of(first);
  const bool excludes = how.excludes(position), whole = !excludes && !how.truncates(size);
  const bool draws = is_sound(best) && how.temperature != 0.0f;
  const Words keys = how.keys(purpose, position);
  ulong drawn = NOTHING, mass = 0;
  if (COUNTS) {
    for (int i = index; i < 2 * BINS; i += THREADS)
      metal::atomic_store_explicit(&counted[i], 0u, metal::memory_order_relaxed);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  for (int i = 0; draws && i < EACH; ++i) {
    const int id = begin + i * THREADS + index;
    if (id >= size || !(values[i] > -INFINITY)) continue;
    if (whole) {
      const float scaled = how.score(values[i]);
      const ulong here = code(scaled + gumbel(keys, id), id);
      drawn = here < drawn ? here : drawn;
      mass += mass_of(scaled - how.score(best));
      continue;
    }
    mass += mass_of(values[i] - best);
    if (!COUNTS) continue;
    const int bin = bin_of(best, values[i]);
    const float part = metal::precise::exp(values[i] - edge_of(best, bin)) * PART;
    metal::atomic_fetch_add_explicit(&counted[bin], 1u, metal::memory_order_relaxed);
    metal::atomic_fetch_add_explicit(&counted[BINS + bin], static_cast<uint>(part), metal::memory_order_relaxed);
  }
  over_threadgroup<THREADS>(drawn, mass, parts, index);
  if (index == 0) {
    put(found, first);
    put(found + 2, own);
    put(found + 4, drawn);
    put(found + 6, mass);
  }
  if (COUNTS)
    for (int i = index; i < 2 * BINS; i += THREADS)
      bins[i] = metal::atomic_load_explicit(&counted[i], metal::memory_order_relaxed);
}

// The sum of masses of slices, each to its own best, to the best of all.
inline float total_of(const device uint* found, int slices, float best, const thread Sequence& how, bool scaled) {
  float total = 0.0f;
  for (int s = 0; s < slices; ++s) {
    const float here = value_of(get(found + s * FOUND));
    if (!is_sound(here)) continue;
    const float apart = scaled ? how.score(here) - how.score(best) : here - best;
    total += static_cast<float>(get(found + s * FOUND + 6)) / UNIT * metal::precise::exp(apart);
  }
  return total;
}

// Find out what is left to do with a row, and for a list how many tokens of each slice are in it. BINS threads.
inline void plan_row(
    const device uint* found, const device uint* bins, int slices, const thread Sequence& how, bool excludes, int size,
    device uint* plan, device uint* counts, threadgroup float* masses, threadgroup uint* counted, int index) {
  ulong first = NOTHING;
  for (int s = 0; s < slices; ++s) {
    const ulong here = get(found + s * FOUND);
    first = here < first ? here : first;
  }
  const float best = value_of(first);
  const bool truncates = how.truncates(size);
  if (!is_sound(best) || (!excludes && !truncates)) {
    if (index == 0) plan[0] = DRAWN;
    return;
  }
  float mass = 0.0f;
  uint count = 0;
  for (int s = 0; s < slices; ++s) {
    const float here = value_of(get(found + s * FOUND));
    if (!is_sound(here)) continue;
    const int shift = bin_of(best, here);
    for (int i = metal::max(index - shift, 0); i <= (index < BINS - 1 ? index - shift : BINS - 1); ++i) {
      const uint part = bins[s * 2 * BINS + BINS + i];
      count += bins[s * 2 * BINS + i];
      if (part) mass += static_cast<float>(part) / PART * metal::precise::exp(edge_of(here, i) - best);
    }
  }
  masses[index] = mass;
  counted[index] = count;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const float total = total_of(found, slices, best, how, false);
  const float above = excludes ? 2.0f + 1.0f / how.xtc_threshold : 0.0f;  // infinite without a threshold
  int last = 0;
  count = 0;
  mass = 0.0f;
  for (; last < BINS; ++last) {
    count += counted[last];
    mass += masses[last];
    const bool by_mass = how.top_p < 1.0f && mass >= (how.top_p + 1e-5f) * total;
    const bool by_min_p = how.log_min_p > -INFINITY && last > bin_of(best, best + how.log_min_p);
    if (by_mass || (by_min_p && count >= how.min_keep) || (how.top_k < size && count >= how.top_k + above)) break;
  }
  const uint kind = !truncates ? EXCLUDED : count <= LISTED ? LIST : ROW;
  if (index == 0) {
    plan[0] = kind;
    plan[1] = count;
    plan[2] = static_cast<uint>(last);
    plan[3] = as_type<uint>(total);
    put(plan + 4, first);
  }
  for (int s = index; kind == LIST && s < slices; s += BINS) {
    const float here = value_of(get(found + s * FOUND));
    const int shift = is_sound(here) ? bin_of(best, here) : BINS;
    count = 0;
    for (int i = 0; i < BINS && (last >= BINS - 1 || i <= last - shift) && shift < BINS; ++i)
      count += bins[s * 2 * BINS + i];
    counts[s] = count;
  }
}

// List the tokens of a slice that may be kept; or, of a row that only XTC shortens, draw from those that it leaves.
template <int THREADS, typename T, typename Ids>
inline void gather(
    const device T* logits, const device uint* plan, const device uint* counts, int slice, int begin, int end,
    const thread Sequence& how, const thread Words& keys, const thread Special<Ids>& special, device uint* list, device uint* found,
    threadgroup ulong* parts, threadgroup metal::atomic_uint* next, int index) {
  const uint kind = plan[0];
  if (kind != LIST && kind != EXCLUDED) return;
  const float best = value_of(get(plan + 4)), total = as_type<float>(plan[3]);
  ulong least = NOTHING, sum = 0;
  if (kind == LIST) {
    if (index == 0) metal::atomic_store_explicit(next, 0u, metal::memory_order_relaxed);
    for (int s = index; s < slice; s += THREADS) sum += counts[s];
    over_threadgroup<THREADS>(least, sum, parts, index);
    for (int id = begin + index; id < end; id += THREADS) {
      const float x = static_cast<float>(logits[id]);
      if (!(x > -INFINITY) || bin_of(best, x) > static_cast<int>(plan[2])) continue;
      const uint at = metal::atomic_fetch_add_explicit(next, 1u, metal::memory_order_relaxed);
      put(list + 2 * (sum + at), code(x, id));
    }
    return;
  }
  ulong drawn = NOTHING, none = 0;
  for (int id = begin + index; id < end; id += THREADS) {
    const float x = static_cast<float>(logits[id]);
    if (!(x > -INFINITY)) continue;
    if (metal::precise::exp(x - best) / total > how.xtc_threshold) {
      least = ~code(x, id) < least ? ~code(x, id) : least;
      if (!special.has(id)) continue;
    }
    const float scaled = how.score(x);
    const ulong here = code(scaled + gumbel(keys, id), id);
    drawn = here < drawn ? here : drawn;
    sum += mass_of(scaled - how.score(best));
  }
  over_threadgroup<THREADS>(drawn, sum, parts, index);
  over_threadgroup<THREADS>(least, none, parts, index);
  if (index != 0) return;
  put(found, drawn);
  put(found + 2, ~least);
  put(found + 4, sum);
}

}  // namespace headstart
