// Where a row ends among the tokens that may be kept, and what is drawn from it: a threadgroup per row.

namespace headstart {

constant constexpr int DIGITS = 256;  // of codes, a byte at a time

// The tokens that may be kept: those in a list, or all of a row.
template <typename T>
struct Candidates {
  const device T* row;
  const device uint* list;
  bool listed;
  int count;

  ulong at(int i) const thread {
    if (listed) return get(list + 2 * i);
    const float x = static_cast<float>(row[i]);
    return x > -INFINITY ? code(x, i) : NOTHING;
  }
};

template <typename T>
inline Candidates<T> candidates(
    const device T* row, int size, const device uint* plan, const device uint* list, bool planned) {
  const bool listed = planned && plan[0] == LIST;
  return {row, list, listed, listed ? static_cast<int>(plan[1]) : size};
}

// Memory that a threadgroup shares.
struct Shared {
  threadgroup ulong* parts;
  threadgroup ulong* chosen;                 // [4]
  threadgroup metal::atomic_uint* counters;  // [3 * DIGITS]: counts, and masses in two words
};

// Return the last code of tokens if `most` are kept and those that begin before a mass of `limit`, and the mass of them
// all in `kept`.
template <int THREADS, typename T>
inline ulong find_last(
    const thread Candidates<T>& from, float best, float most, ulong limit, thread ulong& kept,
    const thread Shared& shared, int index) {
  ulong prefix = 0, count = 0, mass = 0;
  for (int shift = 56;; shift -= 8) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = index; i < 3 * DIGITS; i += THREADS)
      metal::atomic_store_explicit(&shared.counters[i], 0u, metal::memory_order_relaxed);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = index; i < from.count; i += THREADS) {
      const ulong own = from.at(i);
      if (own == NOTHING || (shift < 56 && own >> (shift + 8) != prefix)) continue;
      const int digit = static_cast<int>(own >> shift & 255);
      const ulong here = mass_of(value_of(own) - best);
      const uint low = static_cast<uint>(here);
      metal::atomic_fetch_add_explicit(&shared.counters[digit], 1u, metal::memory_order_relaxed);
      const uint before =
          metal::atomic_fetch_add_explicit(&shared.counters[DIGITS + digit], low, metal::memory_order_relaxed);
      // A carry is seen by whose addition made it.
      const uint high = static_cast<uint>(here >> 32) + (before + low < low ? 1 : 0);
      metal::atomic_fetch_add_explicit(&shared.counters[2 * DIGITS + digit], high, metal::memory_order_relaxed);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (index == 0) {
      bool found = false;
      for (int digit = 0; digit < DIGITS; ++digit) {
        const uint here = metal::atomic_load_explicit(&shared.counters[digit], metal::memory_order_relaxed);
        if (here == 0) continue;
        if (found && !(count < most && mass < limit)) break;
        const uint low = metal::atomic_load_explicit(&shared.counters[DIGITS + digit], metal::memory_order_relaxed);
        const uint high =
            metal::atomic_load_explicit(&shared.counters[2 * DIGITS + digit], metal::memory_order_relaxed);
        found = true;
        shared.chosen[0] = digit;
        shared.chosen[1] = count;
        shared.chosen[2] = mass;
        shared.chosen[3] = here;
        count += here;
        mass += static_cast<ulong>(high) << 32 | low;
        kept = mass;
      }
      shared.parts[0] = kept;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    prefix = prefix << 8 | shared.chosen[0];
    count = shared.chosen[1];
    mass = shared.chosen[2];
    kept = shared.parts[0];
    if (shared.chosen[3] == 1 || shift == 0) return ((prefix + 1) << shift) - 1;  // no other token is up to there
  }
}

// Of tokens up to `last`, with a mass of `kept`: the last code above XTC's threshold, and how many are.
template <int THREADS, typename T>
inline ulong find_begin(
    const thread Candidates<T>& from, float best, float threshold, ulong last, ulong kept, thread ulong& above,
    const thread Shared& shared, int index) {
  const float all = static_cast<float>(kept) / UNIT;
  ulong least = NOTHING;
  above = 0;
  for (int i = index; i < from.count; i += THREADS) {
    const ulong own = from.at(i);
    if (own > last || own == NOTHING || !(metal::precise::exp(value_of(own) - best) / all > threshold)) continue;
    least = ~own < least ? ~own : least;
    ++above;
  }
  over_threadgroup<THREADS>(least, above, shared.parts, index);
  return ~least;
}

// How many tokens before `begin` XTC keeps, and in `end` the `most`-th of them.
template <typename T, typename Ids>
inline uint count_special(
    const device T* row, const thread Special<Ids>& special, ulong begin, float most, thread ulong& end) {
  uint count = 0;
  for (int i = 0; i < special.count; ++i) {
    const int id = special.ids[i];
    bool again = id < 0;
    for (int j = 0; j < i; ++j) again = again || special.ids[j] == id;
    if (again) continue;
    const ulong own = code(static_cast<float>(row[id]), id);
    if (own >= begin) continue;
    ++count;
    uint rank = 0;
    for (int j = 0; j < special.count; ++j) {
      const int other = special.ids[j];
      again = other < 0;
      for (int l = 0; l < j; ++l) again = again || special.ids[l] == other;
      rank += !again && code(static_cast<float>(row[again ? 0 : other]), other) <= own;
    }
    if (rank == most) end = own;
  }
  return count;
}

// What a row can draw: tokens from `first` to `last` in the order of codes, and those that XTC keeps up to `last`; or
// `only` one. `total` is the logsumexp of their scores.
struct Cut {
  ulong first, last;
  float total;
  int only;  // -1 if there are several
};

template <typename Integers>
inline Cut cut_at(Integers from) {
  const uint words[4] = {
      static_cast<uint>(from[0]), static_cast<uint>(from[1]), static_cast<uint>(from[2]), static_cast<uint>(from[3])};
  const ulong first = static_cast<ulong>(words[0]) << 32 | words[1];
  return {first, static_cast<ulong>(words[2]) << 32 | words[3], as_type<float>(static_cast<int>(from[4])), from[5]};
}

// Draw from the slices of a row: `found` has three numbers of each, see `survey`, and `rest`, see `gather`, where a row
// is only shortened by XTC.
template <int THREADS, typename Ids>
inline ulong draw_slices(
    const device uint* found, const device uint* rest, int slices, bool excluded, float best,
    const thread Sequence& how, const thread Words& keys, const thread Special<Ids>& special, thread Cut& cut,
    threadgroup ulong* parts, int index) {
  ulong drawn = NOTHING, sum = 0, begin = NOTHING, none = 0;
  for (int s = index; s < slices; s += THREADS) {
    const device uint* from = excluded ? rest + s * FOUND : found + s * FOUND + 4;
    drawn = get(from) < drawn ? get(from) : drawn;
    if (excluded) {
      begin = ~get(from + 2) < begin ? ~get(from + 2) : begin;
      sum += get(from + 4);
    }
  }
  over_threadgroup<THREADS>(drawn, sum, parts, index);
  float total = static_cast<float>(sum) / UNIT;
  if (!excluded) total = total_of(found, slices, best, how, true);
  if (excluded) {
    over_threadgroup<THREADS>(begin, none, parts, index);
    cut.first = ~begin;
    if (cut.first && !special.has(static_cast<uint>(cut.first))) {  // the last one above the threshold stays
      const float scaled = how.score(value_of(cut.first));
      const ulong here = code(scaled + gumbel(keys, static_cast<uint>(cut.first)), static_cast<uint>(cut.first));
      drawn = here < drawn ? here : drawn;
      total += metal::precise::exp(scaled - how.score(best));
    }
  }
  cut.total = how.score(best) + metal::precise::log(total);
  return drawn;
}

// Draw from the candidates of a row.
template <int THREADS, typename T, typename Ids>
inline ulong draw_candidates(
    const thread Candidates<T>& from, int size, float best, float total, bool excludes, const thread Sequence& how,
    const thread Words& keys, const thread Special<Ids>& special, thread Cut& cut, const thread Shared& shared, int index) {
  ulong none = NOTHING, count = 0, kept = static_cast<ulong>(total * UNIT);
  const bool by_min_p = how.log_min_p > -INFINITY;
  float most = size;
  if (by_min_p) {
    for (int i = index; i < from.count; i += THREADS) {
      const ulong own = from.at(i);
      count += own != NOTHING && value_of(own) >= best + how.log_min_p;
    }
    over_threadgroup<THREADS>(none, count, shared.parts, index);
    most = metal::max(static_cast<float>(count), how.min_keep);
  }
  const ulong limit = how.top_p < 1.0f ? static_cast<ulong>(total * how.top_p * UNIT) : NOTHING;
  const bool shortened = by_min_p || how.top_p < 1.0f;
  if (!excludes) most = how.top_k < most ? how.top_k : most;
  if (!excludes || shortened) cut.last = find_last<THREADS>(from, best, most, limit, kept, shared, index);
  if (excludes) {
    ulong above, end = NOTHING;
    cut.first = find_begin<THREADS>(from, best, how.xtc_threshold, cut.last, kept, above, shared, index);
    const uint kept_before = count_special(from.row, special, cut.first, how.top_k, end);
    if (kept_before < how.top_k && how.top_k < size) {
      most = how.top_k - kept_before + (cut.first ? static_cast<float>(above) - 1.0f : 0.0f);
      end = find_last<THREADS>(from, best, most, NOTHING, kept, shared, index);
    }
    cut.last = end < cut.last ? end : cut.last;
  }
  ulong drawn = NOTHING, sum = 0;
  for (int i = index; i < from.count; i += THREADS) {
    const ulong own = from.at(i);
    const uint id = static_cast<uint>(own);
    if (own > cut.last || own == NOTHING || (own < cut.first && !special.has(id))) continue;
    const float scaled = how.score(value_of(own));
    const ulong here = code(scaled + gumbel(keys, id), id);
    drawn = here < drawn ? here : drawn;
    sum += mass_of(scaled - how.score(best));
  }
  over_threadgroup<THREADS>(drawn, sum, shared.parts, index);
  cut.total = how.score(best) + metal::precise::log(static_cast<float>(sum) / UNIT);
  return drawn;
}

// Draw a token from a row; `plan` is null if nothing truncates.
template <int THREADS, bool TRUNCATES, typename T, typename Ids>
inline void draw_row(
    const device T* row, int size, const device uint* found, const device uint* rest, int slices,
    const device uint* plan, const device uint* list, const thread Sequence& how, uint purpose, int position,
    const thread Special<Ids>& special, device int* token, device int* finite, device int* cuts,
    const thread Shared& shared, int index) {
  ulong first = NOTHING, own = NOTHING;
  for (int s = 0; s < slices; ++s) {
    first = get(found + s * FOUND) < first ? get(found + s * FOUND) : first;
    own = get(found + s * FOUND + 2) < own ? get(found + s * FOUND + 2) : own;
  }
  const float best = value_of(first);
  const Words keys = how.keys(purpose, position);
  Cut cut = {first, first, best, -1};
  ulong drawn = first;
  if (is_sound(best) && how.temperature != 0.0f) {
    cut.first = 0;
    cut.last = NOTHING;
    const uint kind = TRUNCATES ? plan[0] : DRAWN;
    if (kind == DRAWN || kind == EXCLUDED) {
      drawn = draw_slices<THREADS>(
          found, rest, slices, kind == EXCLUDED, best, how, keys, special, cut, shared.parts, index);
    } else {
      const Candidates<T> from = candidates(row, size, plan, list, true);
      drawn = draw_candidates<THREADS>(
          from, size, best, as_type<float>(plan[3]), how.excludes(position), how, keys, special, cut, shared, index);
    }
  }
  if (index != 0) return;
  token[0] = static_cast<int>(drawn);
  finite[0] = is_sound(value_of(own));
  const uint words[4] = {
      static_cast<uint>(cut.first >> 32), static_cast<uint>(cut.first), static_cast<uint>(cut.last >> 32),
      static_cast<uint>(cut.last)};
  for (int i = 0; i < 4; ++i) cuts[i] = static_cast<int>(words[i]);
  cuts[4] = as_type<int>(cut.total);
  cuts[5] = cut.only;
}

}  // namespace headstart
