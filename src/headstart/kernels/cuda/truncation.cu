// Where a row of logits ends by top_k, top_p and min_p: by a histogram of distances from the largest logit.

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

// Return the code of the last token that a row keeps. By one block, from the histogram that all have made.
template <int THREADS, typename T>
__device__ Wide find_cut(
    const T* row, int size, const Params& params, float best, const Work& work, Histogram<THREADS>& bins) {
  __shared__ Wide list[BINS];
  __shared__ int listed;
  bins.clear();
  for (int i = threadIdx.x; i < BINS; i += THREADS) bins.masses[i] = work.masses[i], bins.counts[i] = work.counts[i];
  const float by_min_p = fmaxf(float(work.above_min_p), params.min_keep);
  const unsigned most = params.log_min_p > -INFINITY ? fminf(params.top_k, by_min_p) : params.top_k;
  const Wide all = bins.sum(), limit = params.top_p < 1 ? Wide(ceil(double(all) * params.top_p)) : NOTHING;
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
  return list[bins.choose(most, limit, count, mass)];
}

// Find out where each row of logits [B, W, size] of a sequence that truncates ends: the code of its last token. Blocks:
// (part, row), as many parts as in the survey.
template <int THREADS, typename T>
__device__ void cut_row(
    const T* logits, int size, int W, unsigned* memory, const float* params_each, unsigned* ends) {
  __shared__ Histogram<THREADS> bins;
  const int row = blockIdx.y;
  Work& work = reinterpret_cast<Work*>(memory)[row];
  const Params params = reinterpret_cast<const Params*>(params_each)[row / W];
  const float best = value_of(work.first());
  if (!params.truncates(size) || !(best > -INFINITY && best < INFINITY)) return;
  logits += static_cast<long long>(row) * size;
  const Slice slice(size);
  const float least = __fadd_rn(best, params.log_min_p);
  Wide none = NOTHING, above = 0;
  bins.clear();
  auto possible = [&](float x, int) { return x > -INFINITY; };
  each_logit(logits, slice.begin, slice.end, possible, [&](float x, int) {
    above += x >= least;
    bins.add(bin_of(best, x), params.top_p < 1 ? mass_of(__fsub_rn(x, best)) : 0);
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
  const Wide last = find_cut(logits, size, params, best, work, bins);
  if (threadIdx.x == 0) reinterpret_cast<Wide*>(ends)[row] = last;
}

}  // namespace headstart
