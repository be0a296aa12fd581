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
  Wide sound[16];   // likewise, of the model's own logits
  Wide masses[BINS], counts[BINS];

  static __device__ __forceinline__ Wide least(const Wide* each) {
    Wide best = NOTHING;
    for (int i = 0; i < int(gridDim.x); ++i) best = min(best, each[i]);
    return best;
  }
  __device__ __forceinline__ Wide first() const { return least(firsts); }
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

// What a row can draw: tokens from `first` to `last` in the order of codes, and those that XTC keeps up to `last`; or
// `only` one. `total` is the logsumexp of their scores.
struct Cut {
  unsigned first_high, first_low, last_high, last_low;
  float total;
  int only;  // -1 if there are several

  __device__ __forceinline__ Wide first() const { return Wide(first_high) << 32 | first_low; }
  __device__ __forceinline__ Wide last() const { return Wide(last_high) << 32 | last_low; }
};

// How sequences exclude top choices; without, `probability` is null.
struct Xtc {
  const float *probability, *threshold;
  const int* special;  // [B, specials], -1: none
  int specials;

  __device__ __forceinline__ bool keeps(int b, int id) const {
    for (int i = 0; i < specials; ++i)
      if (special[b * specials + i] == id) return true;
    return false;
  }
};

enum Purpose { DRAFT, ACCEPT, NEXT, XTC };

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
  const unsigned word =
      purpose == DRAFT ? words.draft : purpose == ACCEPT ? words.accept : purpose == NEXT ? words.next : 4;
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
  auto over_warp = [&] {
    for (int step = 16; step; step /= 2) {
      auto other = [&](Wide x) {
        const Wide high = unsigned(__shfl_xor_sync(0xffffffffu, int(x >> 32), step));
        return high << 32 | unsigned(__shfl_xor_sync(0xffffffffu, int(x), step));
      };
      const Wide theirs = other(smallest);
      smallest = theirs < smallest ? theirs : smallest;
      sum += other(sum);
    }
  };
  over_warp();
  __syncthreads();
  if (threadIdx.x % 32 == 0) codes[threadIdx.x / 32] = smallest, masses[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const bool here = threadIdx.x < THREADS / 32;
  smallest = here ? codes[threadIdx.x] : NOTHING, sum = here ? masses[threadIdx.x] : 0;
  over_warp();
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

// Where a row is in its batch, and what its noise is made of.
struct Place {
  int b, position, round;
  const NoiseWords& words;

  __device__ __forceinline__ Place(
      int row, int W, const unsigned* words_each, const int* lengths, const int* rounds, const int* draft)
      : b(row / W), position(lengths[b] + 1 + max(draft[0], 0) + row % W), round(rounds[b]),
        words(reinterpret_cast<const NoiseWords*>(words_each)[b]) {}

  __device__ __forceinline__ Words keys(int purpose) const { return row_keys(words, purpose, round, position); }

  __device__ __forceinline__ bool excludes(const Xtc& xtc) const {
    return xtc.probability && xtc.probability[b] > 0 && uniform(keys(XTC), 0) <= xtc.probability[b];
  }
};

// Begin the work of a row, with the best token of this block's part of it.
__device__ __forceinline__ void begin_work(Work& work, Wide first, Wide sound) {
  Wide* const bins = work.masses;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 2 * BINS; i += gridDim.x * blockDim.x) bins[i] = 0;
  if (threadIdx.x != 0) return;
  work.firsts[blockIdx.x] = first, work.sound[blockIdx.x] = sound;
  if (blockIdx.x != 0) return;
  work.cut_done = work.draw_done = work.verify_done = work.above_min_p = work.kept_mass = work.excess = 0;
  work.drawn = work.residual = NOTHING;
}

// Find the best token of each part of a row, and begin its work. Blocks: (part, row).
template <int THREADS, typename T>
__device__ void survey_row(const T* logits, int size, unsigned* memory) {
  const Slice slice(size);
  Wide first = NOTHING, odd = 0;
  auto compare = [&](float x, int id) {
    odd += x != x;
    first = min(first, code(x, id));
    return false;
  };
  each_logit(logits + static_cast<long long>(blockIdx.y) * size, slice.begin, slice.end, compare, [](float, int) {});
  reduce_block<THREADS>(first, odd);
  if (odd) first = 0;
  begin_work(reinterpret_cast<Work*>(memory)[blockIdx.y], first, first);
}

// The same of logits that are changed on the way: `changed` [B, W, size].
template <int THREADS, typename T>
__device__ void change_row(
    const T* logits, int size, int W, const Changes& changes, const int* draft, unsigned* memory, float* changed) {
  __shared__ __align__(16) unsigned char marks[RowChanges::MARKS];
  const int row = blockIdx.y;
  const RowChanges own(changes, row / W, max(draft[0], 0) + row % W, row, size);
  logits += static_cast<long long>(row) * size, changed += static_cast<long long>(row) * size;
  const Slice slice(size);
  own.mark(marks);
  Wide first = NOTHING, odd = 0, sound = NOTHING, none = 0;
  for (int begin = slice.begin + 8 * int(threadIdx.x); begin < slice.end; begin += 8 * THREADS) {
    const Eight<T> here = *reinterpret_cast<const Eight<T>*>(logits + begin);
    Eight<float> made;
    for (int j = 0; j < 8; ++j) {
      const int id = begin + j;
      const float x = float(here.at[j]), y = own.change(x, id, marks[id % RowChanges::MARKS]);
      sound = min(sound, x != x ? 0 : code(__fadd_rn(x, 0.f), id));
      first = min(first, code(__fadd_rn(y, 0.f), id)), odd += y != y;
      made.at[j] = y;
    }
    *reinterpret_cast<Eight<float>*>(changed + begin) = made;
  }
  reduce_block<THREADS>(first, odd);
  reduce_block<THREADS>(sound, none);
  begin_work(reinterpret_cast<Work*>(memory)[row], odd ? 0 : first, sound);
}

// Draw a token from each row of logits [B, W, size] up to its end, for the positions after `lengths`: of the target
// itself, or, if `draft` is not negative, drafts from that number on. Blocks: (part, row), as many parts as in the
// survey.
template <int THREADS, typename T>
__device__ void draw_row(
    const T* logits, int size, int W, unsigned* memory, const unsigned* ends, const float* params_each,
    const unsigned* words_each, const int* lengths, const int* rounds, const int* draft, const Xtc& xtc, int* token,
    int* finite, int* cuts) {
  const int row = blockIdx.y;
  const Place place(row, W, words_each, lengths, rounds, draft);
  Work& work = reinterpret_cast<Work*>(memory)[row];
  const Params params = reinterpret_cast<const Params*>(params_each)[place.b];
  logits += static_cast<long long>(row) * size;
  const Wide best_code = work.first();
  const float best = value_of(best_code), top = score(best, params.temperature), own = value_of(Work::least(work.sound));
  const bool sound = best > -INFINITY && best < INFINITY;
  Cut& cut = reinterpret_cast<Cut*>(cuts)[row];
  if (blockIdx.x == 0 && threadIdx.x == 0) finite[row] = own > -INFINITY && own < INFINITY;
  if (!sound || params.temperature == 0) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const unsigned high = best_code >> 32, low = unsigned(best_code);
    token[row] = int(best_code), cut = {high, low, high, low, best, -1};
    return;
  }
  const bool excludes = place.excludes(xtc), ended = excludes || params.truncates(size);
  const Wide* const end = reinterpret_cast<const Wide*>(ends) + 2 * row;
  const Wide begin = ended ? end[0] : 0, last = ended ? end[1] : NOTHING;
  const Words keys = place.keys(draft[0] < 0 ? NEXT : DRAFT);
  const Slice slice(size);
  Wide drawn = NOTHING, mass = 0;
  auto kept = [&](float x, int id) { return x > -INFINITY && code(x, id) <= last; };
  each_logit(logits, slice.begin, slice.end, kept, [&](float x, int id) {
    if (code(x, id) < begin && !xtc.keeps(place.b, id)) return;
    const float scaled = score(x, params.temperature);
    mass += mass_of(__fsub_rn(scaled, top));
    drawn = min(drawn, code(__fadd_rn(scaled, gumbel(keys, id)), id));
  });
  reduce_block<THREADS>(drawn, mass);
  if (threadIdx.x == 0) atomicMin(&work.drawn, drawn), atomicAdd(&work.kept_mass, mass);
  if (!last_to_come(&work.draw_done, gridDim.x) || threadIdx.x != 0) return;
  token[row] = int(load_acquire(&work.drawn));
  const float all = __fmul_rn(float(load_acquire(&work.kept_mass)), 1 / UNIT);
  cut = {unsigned(begin >> 32), unsigned(begin), unsigned(last >> 32), unsigned(last), __fadd_rn(top, logf(all)), -1};
}

}  // namespace headstart
