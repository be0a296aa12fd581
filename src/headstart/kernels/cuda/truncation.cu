// Where a row of logits begins and ends by top_p, min_p, XTC and top_k: by a histogram of distances from the largest
// logit.

namespace headstart {

// Counts and masses of bins in a block's shared memory.
template <int THREADS>
struct Histogram {
  static constexpr int EACH = BINS / THREADS;
  Wide masses[BINS], mass_sums[THREADS];
  unsigned counts[BINS], count_sums[THREADS];
  int chosen;
  unsigned count_before;
  Wide mass_before;

  __device__ __forceinline__ void clear() {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) masses[i] = counts[i] = 0;
    __syncthreads();
  }

  // There are no fast additions of 64 bits to shared memory. A carry is seen by whose addition made it.
  __device__ __forceinline__ void add(int bin, Wide mass) {
    atomicAdd(&counts[bin], 1u);
    unsigned* const halves = reinterpret_cast<unsigned*>(&masses[bin]);
    const unsigned low = unsigned(mass), high = unsigned(mass >> 32);
    const unsigned carry = low != 0 && atomicAdd(&halves[0], low) + low < low;
    if (high + carry) atomicAdd(&halves[1], high + carry);
  }

  // Sum the bins of each thread and of all before it; return the mass of all.
  __device__ __forceinline__ Wide sum() {
    __syncthreads();
    Wide mass = 0;
    unsigned count = 0;
    for (int i = threadIdx.x * EACH; i < int(threadIdx.x + 1) * EACH; ++i) mass += masses[i], count += counts[i];
    mass_sums[threadIdx.x] = mass, count_sums[threadIdx.x] = count;
    if (threadIdx.x == 0) chosen = 0;
    for (int step = 1; step < THREADS; step *= 2) {
      __syncthreads();
      const bool adds = int(threadIdx.x) >= step;
      mass = adds ? mass_sums[threadIdx.x - step] : 0, count = adds ? count_sums[threadIdx.x - step] : 0;
      __syncthreads();
      mass_sums[threadIdx.x] += mass, count_sums[threadIdx.x] += count;
    }
    __syncthreads();
    return mass_sums[THREADS - 1];
  }

  // After `sum`: the last bin whose first token is kept, since fewer than `most` tokens and less than `limit` are
  // before it. What is before it is added to `count` and `mass`.
  __device__ __forceinline__ int choose(unsigned most, Wide limit, unsigned& count, Wide& mass) {
    unsigned here = count + (threadIdx.x ? count_sums[threadIdx.x - 1] : 0), kept_count = 0;
    Wide before = mass + (threadIdx.x ? mass_sums[threadIdx.x - 1] : 0), kept_mass = 0;
    int last = -1;
    for (int i = threadIdx.x * EACH; i < int(threadIdx.x + 1) * EACH; ++i) {
      if (counts[i] && (here == 0 || (here < most && before < limit))) last = i, kept_count = here, kept_mass = before;
      here += counts[i], before += masses[i];
    }
    if (last >= 0) atomicMax(&chosen, last);
    __syncthreads();
    if (last == chosen) count_before = kept_count, mass_before = kept_mass;
    __syncthreads();
    count = count_before, mass = mass_before;
    return chosen;
  }
};

__device__ __forceinline__ int bin_of(float best, float x) {
  return int(fminf(__fmul_rn(__fsub_rn(best, x), BINS_PER_NAT), BINS - 1.f));
}

// Return the code of the last token of a row if `most` are kept and those that begin before `top_p` of the mass, and
// the mass of them all: NOTHING if that ends no row. By one block, from the histogram that all have made.
template <int THREADS, typename T>
__device__ __noinline__ Wide find_cut(
    const T* row, int size, unsigned most, float top_p, float best, const Work& work, Histogram<THREADS>& bins,
    Wide& kept) {
  __shared__ Wide list[BINS];
  __shared__ int listed;
  bins.clear();
  for (int i = threadIdx.x; i < BINS; i += THREADS) bins.masses[i] = work.masses[i], bins.counts[i] = work.counts[i];
  kept = bins.sum();
  const Wide limit = top_p < 1 ? Wide(ceil(double(kept) * top_p)) : NOTHING;
  if (limit == NOTHING && most >= bins.count_sums[THREADS - 1]) return NOTHING;
  unsigned count = 0;
  Wide mass = 0, prefix = 0;
  const int coarse = bins.choose(most, limit, count, mass);
  int shift = 64, here = bins.counts[coarse];
  auto candidate = [&](float x, int id) {
    return x > -INFINITY && bin_of(best, x) == coarse && (shift == 64 || code(x, id) >> shift == prefix);
  };
  while (here > BINS) {  // equal logits, or a flat distribution: go on by the bits of codes, 10 at a time
    bins.clear();
    each_logit(row, 0, size, candidate, [&](float x, int id) {
      bins.add(int(code(x, id) >> (shift - 10)) & (BINS - 1), mass_of(__fsub_rn(x, best)));
    });
    bins.sum();
    const int next = bins.choose(most, limit, count, mass);
    prefix = prefix << 10 | unsigned(next), shift -= 10, here = bins.counts[next];
  }

  if (threadIdx.x == 0) listed = 0;
  bins.clear();
  each_logit(row, 0, size, candidate, [&](float x, int id) { list[atomicAdd(&listed, 1)] = code(x, id); });
  __syncthreads();
  int padded = 2;
  while (padded < here) padded *= 2;
  for (int i = here + threadIdx.x; i < padded; i += THREADS) list[i] = NOTHING;
  for (int width = 2; width <= padded; width *= 2)
    for (int step = width / 2; step; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < padded / 2; i += THREADS) {
        const int low = 2 * i - (i & (step - 1));
        const Wide one = list[low], other = list[low + step];
        if ((one > other) == !(low & width)) list[low] = other, list[low + step] = one;
      }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < here; i += THREADS)
    bins.counts[i] = 1, bins.masses[i] = mass_of(__fsub_rn(value_of(list[i]), best));
  bins.sum();
  const int last = bins.choose(most, limit, count, mass);
  kept = mass + bins.masses[last];
  return list[last];
}

// Return the code from which on a row keeps all, of tokens up to `last` with a mass of `kept`: of those above XTC's
// threshold the last one. `above` is how many these are. By one block.
template <int THREADS, typename T>
__device__ Wide find_begin(const T* row, int size, float threshold, float best, Wide last, Wide kept, Wide& above) {
  __shared__ Wide begin, count;
  const float all = __fmul_rn(float(kept), 1 / UNIT), least = __fadd_rn(best, logf(__fmul_rn(threshold, all)) - 1e-3f);
  Wide smallest = NOTHING, found = 0;
  auto likely = [&](float x, int id) { return x >= least && x > -INFINITY && code(x, id) <= last; };
  each_logit(row, 0, size, likely, [&](float x, int id) {
    if (!(__fdiv_rn(expf(__fsub_rn(x, best)), all) > threshold)) return;
    smallest = min(smallest, ~code(x, id)), ++found;
  });
  reduce_block<THREADS>(smallest, found);
  if (threadIdx.x == 0) begin = found ? ~smallest : 0, count = found;
  __syncthreads();
  above = count;
  return begin;
}

// Return how many of the tokens before `begin` XTC keeps, and in `end` the `most`-th of them.
template <typename T>
__device__ __forceinline__ unsigned count_special(const T* row, int b, const Xtc& xtc, Wide begin, unsigned most, Wide& end) {
  auto code_of = [&](int i) {
    const int id = xtc.special[b * xtc.specials + i];
    for (int j = 0; id >= 0 && j < i; ++j)
      if (xtc.special[b * xtc.specials + j] == id) return NOTHING;
    return id < 0 ? NOTHING : code(__fadd_rn(float(row[id]), 0.f), id);
  };
  unsigned count = 0;
  for (int i = 0; i < xtc.specials; ++i) {
    const Wide own = code_of(i);
    if (own >= begin) continue;
    unsigned rank = 1;
    for (int j = 0; j < xtc.specials; ++j) rank += code_of(j) < own;
    if (rank == most) end = own;
    ++count;
  }
  return count;
}

// Find out where each row of logits [B, W, size] of a sequence that truncates begins and ends: the codes of these
// tokens. Blocks: (part, row), as many parts as in the survey.
template <int THREADS, typename T>
__device__ void cut_row(
    const T* logits, int size, int W, unsigned* memory, const float* params_each, const unsigned* words_each,
    const int* lengths, const int* rounds, const int* draft, const Xtc& xtc, unsigned* ends) {
  __shared__ Histogram<THREADS> bins;
  const int row = blockIdx.y;
  const Place place(row, W, words_each, lengths, rounds, draft);
  Work& work = reinterpret_cast<Work*>(memory)[row];
  const Params params = reinterpret_cast<const Params*>(params_each)[place.b];
  const float best = value_of(work.first());
  if (params.temperature == 0 || !(best > -INFINITY && best < INFINITY)) return;
  const bool excludes = place.excludes(xtc), weighed = excludes || params.top_p < 1;
  if (!excludes && !params.truncates(size)) return;
  logits += static_cast<long long>(row) * size;
  const Slice slice(size);
  const float least = __fadd_rn(best, params.log_min_p);
  Wide none = NOTHING, above = 0;
  bins.clear();
  auto possible = [&](float x, int) { return x > -INFINITY; };
  each_logit(logits, slice.begin, slice.end, possible, [&](float x, int) {
    above += x >= least;
    bins.add(bin_of(best, x), weighed ? mass_of(__fsub_rn(x, best)) : 0);
  });
  reduce_block<THREADS>(none, above);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&work.above_min_p, above);
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (bins.counts[i]) {
      atomicAdd(&work.counts[i], Wide(bins.counts[i]));
      atomicAdd(&work.masses[i], bins.masses[i]);
    }
  if (!last_to_come(&work.cut_done, gridDim.x)) return;

  const unsigned top_k = params.top_k;
  unsigned most = size;
  if (params.log_min_p > -INFINITY) most = fmaxf(float(work.above_min_p), params.min_keep);
  Wide begin = 0, kept, end = NOTHING;
  Wide last = find_cut(logits, size, excludes ? most : min(most, top_k), params.top_p, best, work, bins, kept);
  if (excludes) {
    begin = find_begin<THREADS>(logits, size, xtc.threshold[place.b], best, last, kept, above);
    const unsigned special = count_special(logits, place.b, xtc, begin, top_k, end);
    if (special < top_k && top_k < size)
      end = find_cut(logits, size, top_k - special + (begin ? unsigned(above) - 1 : 0), 1.f, best, work, bins, kept);
    last = min(last, end);
  }
  if (threadIdx.x == 0) reinterpret_cast<Wide*>(ends)[2 * row] = begin, reinterpret_cast<Wide*>(ends)[2 * row + 1] = last;
}

}  // namespace headstart
