// A prompt's rows before their experts: which row goes where, and its elements in the order that products want.

namespace headstart {

// Eight elements of two bytes, arranged.
template <int BITS>
__device__ __forceinline__ uint4 arrange(uint4 eight) {
  const uint32_t a = eight.x, b = eight.y, c = eight.z, d = eight.w;
  if constexpr (BITS == 4) return {low_halves(a, c), high_halves(a, c), low_halves(b, d), high_halves(b, d)};
  if constexpr (BITS == 8) return {low_halves(a, b), high_halves(a, b), low_halves(c, d), high_halves(c, d)};
  return eight;
}

// Sort pairs of a row and an expert by their experts → `order`: the pairs' numbers; `tiles`: of each an expert, where
// its pairs begin in `order`, and how many there are, which is zero behind the last of `most`. One block, with a thread
// for every expert at least. In which order an expert has its pairs may change, and changes no result.
template <int EXPERTS, int TOKENS>
__device__ __forceinline__ void sort_pairs(const unsigned* experts, int pairs, int* order, int* tiles, int most) {
  __shared__ int counts[EXPERTS], ends[EXPERTS], last_tiles[EXPERTS]; // ends, last_tiles: of this expert and all before
  const int thread = threadIdx.x, threads = blockDim.x;
  if (thread < EXPERTS) counts[thread] = 0;
  __syncthreads();
#pragma unroll 8
  for (int i = thread; i < pairs; i += threads) atomicAdd(&counts[experts[i]], 1);
  __syncthreads();

  const int count = thread < EXPERTS ? counts[thread] : 0, parts = (count + TOKENS - 1) / TOKENS;
  if (thread < EXPERTS) ends[thread] = count, last_tiles[thread] = parts;
  __syncthreads();
#pragma unroll 1
  for (int step = 1; step < EXPERTS; step *= 2) {
    const bool adds = thread < EXPERTS && thread >= step;
    const int pairs_before = adds ? ends[thread - step] : 0, tiles_before = adds ? last_tiles[thread - step] : 0;
    __syncthreads();
    if (adds) ends[thread] += pairs_before, last_tiles[thread] += tiles_before;
    __syncthreads();
  }

  if (thread < EXPERTS) {
    const int begin = ends[thread] - count;
    const int each = parts ? ((count + parts - 1) / parts + 15) / 16 * 16 : 0; // as even as they are cut into sixteens
    for (int i = 0, tile = last_tiles[thread] - parts; i < parts; i++, tile++) {
      tiles[3 * tile] = thread, tiles[3 * tile + 1] = begin + i * each;
      tiles[3 * tile + 2] = max(0, min(each, count - i * each));
    }
    counts[thread] = begin; // from here on, where the next pair goes
  }
  for (int tile = last_tiles[EXPERTS - 1] + thread; tile < most; tile += threads) tiles[3 * tile + 2] = 0;
  __syncthreads();
#pragma unroll 8
  for (int i = thread; i < pairs; i += threads) order[atomicAdd(&counts[experts[i]], 1)] = i;
}

} // namespace headstart
