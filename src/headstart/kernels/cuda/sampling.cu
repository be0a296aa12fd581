// Draw a token from each row of logits, without sorting it. All sums are of whole numbers, so that what a row draws
// does not depend on how many threads and blocks share it.

namespace headstart {

typedef unsigned long long Wide;
constexpr Wide NOTHING = ~0ull;
constexpr float UNIT = 1099511627776.f;  // 2^40: masses are counted in such parts
constexpr int BINS = 1024;               // of logits by their distance from the largest
constexpr float BINS_PER_NAT = 32;

// What the blocks of a row know together.
struct Work {
  Wide cut_done, draw_done, verify_done;  // blocks that have come to the end
  Wide above_min_p, kept_mass, drawn, excess, residual;
  Wide firsts[16];  // the best token of every part, 0 where it has NaN
  Wide masses[BINS], counts[BINS];

  __device__ __forceinline__ Wide first() const {
    Wide best = NOTHING;
    for (int i = 0; i < int(gridDim.x); ++i) best = min(best, firsts[i]);
    return best;
  }
};

// How a sequence samples: params [B, 5].
struct Params {
  float temperature, top_k, top_p, log_min_p, min_keep;

  __device__ __forceinline__ bool truncates(int size) const {
    return temperature != 0 && (top_k < size || top_p < 1 || log_min_p > -INFINITY);
  }
};

// What a sequence's noise is made of: words [B, 6], the last three by the purpose of the noise.
struct NoiseWords {
  unsigned first, second, ratio, draft, accept, next;
};

// What a row can draw: tokens up to `cut` in the order of codes, or `only` one; `total` is the logsumexp of its scores.
struct Cut {
  unsigned high, low;
  float total;
  int only;  // -1 if there are several
};

enum Purpose { DRAFT, ACCEPT, NEXT };

// Numbers by which tokens are ordered as sampling does: the larger logit first, of equal ones the lower id.
__device__ __forceinline__ Wide code(float x, int id) {
  const unsigned bits = __float_as_int(x);
  return Wide(bits >> 31 ? bits : ~bits & 0x7fffffffu) << 32 | unsigned(id);
}

__device__ __forceinline__ float value_of(Wide code) {
  const unsigned key = code >> 32;
  return __int_as_float(key >> 31 ? key : ~key & 0x7fffffffu);
}

__device__ __forceinline__ Wide mass_of(float log_probability) {
  return Wide(__fmul_rn(expf(log_probability), UNIT));
}

__device__ __forceinline__ float score(float x, float temperature) {
  return __fdiv_rn(x, temperature == 0 ? 1.f : temperature);
}

// In (0, 1), as sampling/noise.py has it; and Gumbel noise.
__device__ __forceinline__ float uniform(Words keys, int id) {
  const float word = float(mix(mix(keys.first ^ unsigned(id)) + keys.second));
  return fminf(__fmul_rn(__fadd_rn(word, 0.5f), 0x1p-32f), 1 - 0x1p-24f);
}

__device__ __forceinline__ float gumbel(Words keys, int id) { return -logf(-log1pf(-uniform(keys, id))); }

// The keys of a purpose's noise at a position.
__device__ __forceinline__ Words row_keys(const NoiseWords& words, int purpose, int round, int position) {
  const Words of_round = fold({words.first, words.second}, words.ratio ? round + 1 : 0);
  const unsigned word = purpose == DRAFT ? words.draft : purpose == ACCEPT ? words.accept : words.next;
  return fold(fold(of_round, word), unsigned(position));
}

// Look at every logit of a row from `begin` to `end`, multiples of 8, and use those that are wanted: to use one may
// take many instructions, so they are there once.
template <typename T, typename Wanted, typename Use>
__device__ __forceinline__ void each_logit(const T* row, int begin, int end, Wanted wanted, Use use) {
  constexpr int AHEAD = 2;  // 32 KB of two-byte logits under way per block
  const int stride = 8 * int(blockDim.x);
  for (int first = begin + 8 * int(threadIdx.x); first < end; first += AHEAD * stride) {
    Eight<T> here[AHEAD];
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i * stride < end) here[i] = *reinterpret_cast<const Eight<T>*>(row + first + i * stride);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i * stride < end) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float x = __fadd_rn(float(here[i].at[j]), 0.f);  // -0 is 0
          found |= unsigned(wanted(x, first + i * stride + j)) << (8 * i + j);
        }
      }
    for (; found; found &= found - 1) {
      const int bit = __popc((found & -found) - 1), id = first + bit / 8 * stride + bit % 8;
      use(__fadd_rn(float(row[id]), 0.f), id);
    }
  }
}

// A block's part of a row.
struct Slice {
  int begin, end;
  __device__ __forceinline__ explicit Slice(int size)
      : begin(8 * int(Wide(size / 8) * blockIdx.x / gridDim.x)),
        end(8 * int(Wide(size / 8) * (blockIdx.x + 1) / gridDim.x)) {}
};

// The smallest of all threads' codes and the sum of their masses; right in thread 0.
template <int THREADS>
__device__ __forceinline__ void reduce_block(Wide& smallest, Wide& sum) {
  __shared__ Wide codes[THREADS / 32], masses[THREADS / 32];
  auto over_warp = [&](int lanes) {
    for (int step = lanes / 2; step; step /= 2) {
      auto other = [&](Wide x) {
        const Wide high = unsigned(__shfl_xor_sync(0xffffffffu, int(x >> 32), step));
        return high << 32 | unsigned(__shfl_xor_sync(0xffffffffu, int(x), step));
      };
      const Wide theirs = other(smallest);
      smallest = theirs < smallest ? theirs : smallest;
      sum += other(sum);
    }
  };
  over_warp(32);
  __syncthreads();
  if (threadIdx.x % 32 == 0) codes[threadIdx.x / 32] = smallest, masses[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const bool here = threadIdx.x < THREADS / 32;
  smallest = here ? codes[threadIdx.x] : NOTHING, sum = here ? masses[threadIdx.x] : 0;
  over_warp(32);
}

// Find the best token of each part of a row, and begin its work. Blocks: (part, row).
template <int THREADS, typename T>
__device__ void survey_row(const T* logits, int size, unsigned* memory) {
  Work& work = reinterpret_cast<Work*>(memory)[blockIdx.y];
  const Slice slice(size);
  Wide first = NOTHING, odd = 0;
  auto compare = [&](float x, int id) {
    odd += x != x;
    first = min(first, code(x, id));
    return false;
  };
  each_logit(logits + static_cast<long long>(blockIdx.y) * size, slice.begin, slice.end, compare, [](float, int) {});
  reduce_block<THREADS>(first, odd);
  Wide* const bins = work.masses;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < 2 * BINS; i += gridDim.x * THREADS) bins[i] = 0;
  if (threadIdx.x != 0) return;
  work.firsts[blockIdx.x] = odd ? 0 : first;
  if (blockIdx.x != 0) return;
  work.cut_done = work.draw_done = work.verify_done = work.above_min_p = work.kept_mass = work.excess = 0;
  work.drawn = work.residual = NOTHING;
}

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

// Whether this block is the last of `all` that come here; what the others wrote before is then there to read.
__device__ __forceinline__ bool last_to_come(Wide* counter, int all) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1ull) + 1 == Wide(all);
    __threadfence();
  }
  __syncthreads();
  return last;
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

// Draw a token from each row of logits [B, W, size] up to its end, for the positions after `lengths`: of the target
// itself, or, if `draft` is not negative, drafts from that number on. Blocks: (part, row), as many parts as in the
// survey.
template <int THREADS, typename T>
__device__ void draw_row(
    const T* logits, int size, int W, unsigned* memory, const unsigned* ends, const float* params_each,
    const unsigned* words_each, const int* lengths, const int* rounds, const int* draft, int* token, int* finite,
    int* cuts) {
  const int row = blockIdx.y, b = row / W;
  Work& work = reinterpret_cast<Work*>(memory)[row];
  const Params params = reinterpret_cast<const Params*>(params_each)[b];
  logits += static_cast<long long>(row) * size;
  const Wide first = work.first();
  const float best = value_of(first), top = score(best, params.temperature);
  const bool sound = best > -INFINITY && best < INFINITY;
  Cut& cut = reinterpret_cast<Cut*>(cuts)[row];
  if (!sound || params.temperature == 0) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    token[row] = int(first), finite[row] = sound, cut = {unsigned(first >> 32), unsigned(first), best, -1};
    return;
  }
  const Wide last = params.truncates(size) ? reinterpret_cast<const Wide*>(ends)[row] : NOTHING;
  const int position = lengths[b] + 1 + max(draft[0], 0) + row % W;
  const NoiseWords& words = reinterpret_cast<const NoiseWords*>(words_each)[b];
  const Words keys = row_keys(words, draft[0] < 0 ? NEXT : DRAFT, rounds[b], position);
  const Slice slice(size);
  Wide drawn = NOTHING, mass = 0;
  auto kept = [&](float x, int id) { return x > -INFINITY && code(x, id) <= last; };
  each_logit(logits, slice.begin, slice.end, kept, [&](float x, int id) {
    const float scaled = score(x, params.temperature);
    mass += mass_of(__fsub_rn(scaled, top));
    drawn = min(drawn, code(__fadd_rn(scaled, gumbel(keys, id)), id));
  });
  reduce_block<THREADS>(drawn, mass);
  if (threadIdx.x == 0) atomicMin(&work.drawn, drawn), atomicAdd(&work.kept_mass, mass);
  if (!last_to_come(&work.draw_done, gridDim.x) || threadIdx.x != 0) return;
  token[row] = int(load_acquire(&work.drawn)), finite[row] = 1;
  const float all = __fmul_rn(float(load_acquire(&work.kept_mass)), 1 / UNIT);
  cut = {unsigned(last >> 32), unsigned(last), __fadd_rn(top, logf(all)), -1};
}

__device__ __forceinline__ float probability(const Cut& cut, float x, int id, float temperature) {
  if (x == -INFINITY || code(x, id) > (Wide(cut.high) << 32 | cut.low)) return 0;
  return expf(__fsub_rn(score(x, temperature), cut.total));
}

// Verify the drafts of a window [B, W], all but its first token, by the ratio rule: block verification, as
// sampling/accept.py has it. `most` drafts are accepted, and `tokens` are those and the token after them, again and
// again. Of sequences with another rule `tokens` are those `drawn` from the target, and `most` is W. Drafts [B, k] were
// drawn from one array of logits [B, k, size], or each from its own [B, 1, size]. Blocks: (part, draft, sequence).
template <int THREADS, typename T, typename Q, int N>
__device__ void verify_by_ratio(
    const T* logits, int size, int W, unsigned* memory, const float* params_each, const unsigned* words_each,
    const int* lengths, const int* rounds, const int* drawn, const int* cuts, const int* window, const int* max_k,
    const int* remaining, const int* draft_cuts, const Q* const (&draft_logits)[N], int width, int* tokens, int* most) {
  constexpr int MOST = 16;
  __shared__ float p[MOST], q[MOST];
  const int i = blockIdx.y, b = blockIdx.z, k = W - 1;
  const float temperature = reinterpret_cast<const Params*>(params_each)[b].temperature;
  const NoiseWords& words = reinterpret_cast<const NoiseWords*>(words_each)[b];
  Work* const work = reinterpret_cast<Work*>(memory) + b * W;
  window += b * W, drawn += b * W, tokens += b * W;
  if (!words.ratio) {
    if (blockIdx.x != 0 || i != 0 || threadIdx.x != 0) return;
    for (int j = 0; j < W; ++j) tokens[j] = drawn[j];
    most[b] = W;
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
  auto p_of = [&](int j, float x, int id) { return probability(target_cuts[j], x, id, temperature); };
  auto q_of = [&](int j, int id) {
    const Cut& cut = drafter_cuts[j];
    if (cut.only >= 0) return id == cut.only ? 1.f : 0.f;  // there may be no logits
    return probability(cut, __fadd_rn(float(draft_row(j)[id]), 0.f), id, temperature);
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
  const int allowed = max(0, min(k, min(max_k[b], remaining[b] - 1)));
  float weight = 1;
  for (int j = 0; j < i; ++j) weight = next_weight(weight, j);
  if (i < allowed) {
    const Slice slice(size);
    const Words keys = row_keys(words, NEXT, rounds[b], lengths[b] + 1 + i);
    Wide best = NOTHING, excess = 0;
    const Wide last = Wide(target_cuts[i].high) << 32 | target_cuts[i].low;
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
