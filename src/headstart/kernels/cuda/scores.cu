// Log-probabilities of a row's generated token and of its best ones, under the model itself.

namespace headstart {

// The smallest code that a thread of the block has seen, in all threads.
template <int THREADS>
__device__ __forceinline__ Wide smallest_of(Wide code) {
  __shared__ Wide found;
  Wide none = 0;
  reduce_block<THREADS>(code, none);
  if (threadIdx.x == 0) found = code;
  __syncthreads();
  code = found;
  __syncthreads();
  return code;
}

// Find the `top` best tokens of a part of a row of logits, and the mass of all to the best. A part has one block however
// many rows there are, so that a sum has one order. It is small enough to be read again from near. Blocks: (part, row).
template <int THREADS, typename T>
__device__ void score_part(const T* logits, int size, int top, unsigned* codes, float* masses) {
  const int part = blockIdx.y * gridDim.x + blockIdx.x;
  logits += static_cast<long long>(blockIdx.y) * size;
  const Slice slice(size);
  Wide* const found = reinterpret_cast<Wide*>(codes) + part * top;
  Wide last = 0;
  for (int i = 0; i < top; ++i) {
    Wide next = NOTHING;
    auto compare = [&](float x, int id) {
      if (const Wide own = code(x, id); own > last) next = min(next, own);
      return false;
    };
    each_logit(logits, slice.begin, slice.end, compare, [](float, int) {});
    last = smallest_of<THREADS>(next);
    if (threadIdx.x == 0) found[i] = last;
    if (last == NOTHING) last -= 1;  // nothing is left
  }
  __syncthreads();
  Wide none = NOTHING, mass = 0;
  const float best = value_of(found[0]);
  auto possible = [](float x, int) { return x > -INFINITY; };
  each_logit(logits, slice.begin, slice.end, possible, [&](float x, int) { mass += mass_of(__fsub_rn(x, best)); });
  reduce_block<THREADS>(none, mass);
  if (threadIdx.x == 0) masses[part] = __fmul_rn(float(mass), 1 / UNIT);
}

// Merge the parts of each row: the logarithm of the probability of its token, and of its `top` best. A warp per row.
template <typename T>
__device__ void merge_scores(
    const T* logits, int size, int parts, int top, const unsigned* codes, const float* masses, const int* tokens,
    float* chosen, int* ids, float* scores) {
  const int row = blockIdx.x;
  const Wide* const found = reinterpret_cast<const Wide*>(codes) + row * parts * top;
  float most = -INFINITY, sum = 0;
  for (int i = 0; i < parts; ++i) most = fmaxf(most, value_of(found[i * top]));
  for (int i = 0; i < parts; ++i)
    if (const float best = value_of(found[i * top]); best > -INFINITY)
      sum = __fadd_rn(sum, __fmul_rn(masses[row * parts + i], expf(__fsub_rn(best, most))));
  const float total = __fadd_rn(most, logf(sum));
  Wide last = 0;
  for (int i = 0; i < top; ++i) {
    Wide next = NOTHING;
    for (int j = threadIdx.x; j < parts * top; j += 32)
      if (found[j] > last) next = min(next, found[j]);
    last = smallest_of<32>(next);
    if (threadIdx.x == 0) ids[row * top + i] = int(last), scores[row * top + i] = __fsub_rn(value_of(last), total);
  }
  if (threadIdx.x != 0) return;
  chosen[row] = __fsub_rn(float(logits[static_cast<long long>(row) * size + tokens[row]]), total);
}

}  // namespace headstart
