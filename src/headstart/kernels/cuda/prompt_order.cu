// A prompt's rows before their experts: which row goes where, and its elements in the order that products want.

namespace headstart {

// Eight of every 64 elements of two bytes, each `from` and `to` where it is arranged (see prompt_experts.cu).
template <int BITS>
__device__ __forceinline__ void arrange(const uint4* from, uint32_t* to, int eight) {
  const uint4 x = from[eight];
  const uint32_t natural[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int p = 0; p < 4; p++) {
    uint32_t pair = natural[p];
    if constexpr (BITS == 4)
      pair = p % 2 ? high_halves(natural[p / 2], natural[p / 2 + 2]) : low_halves(natural[p / 2], natural[p / 2 + 2]);
    if constexpr (BITS == 8)
      pair = p % 2 ? high_halves(natural[p - 1], natural[p]) : low_halves(natural[p], natural[p + 1]);
    to[eight / 8 * 32 + (eight % 2 * 4 + p) * 4 + eight % 8 / 2] = pair;
  }
}

// act(i, numbers[i]) for all i < count, by all threads of the block, BATCH of them under way.
template <int BATCH, typename Act>
__device__ __forceinline__ void for_all(const unsigned* numbers, int count, Act act) {
#pragma unroll 1
  for (int first = threadIdx.x; first < count; first += BATCH * blockDim.x) {
    unsigned some[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++)
      if (first + j * blockDim.x < count) some[j] = numbers[first + j * blockDim.x];
#pragma unroll
    for (int j = 0; j < BATCH; j++)
      if (first + j * blockDim.x < count) act(first + j * blockDim.x, some[j]);
  }
}

// Sort pairs of a row and an expert by their experts → `order`: the pairs' numbers; `tiles`: of each an expert, where
// its pairs begin in `order`, and how many there are, which is zero behind the last. One block, with a thread
// for every expert at least. In which order an expert has its pairs may change, and changes no result.
template <int EXPERTS, int TOKENS>
__device__ __forceinline__ void sort_pairs(const unsigned* experts, int pairs, int* order, int* tiles) {
  __shared__ int counts[EXPERTS], ends[EXPERTS], last_tiles[EXPERTS]; // ends, last_tiles: of this expert and all before
  const int thread = threadIdx.x, threads = blockDim.x;
  if (thread < EXPERTS) counts[thread] = 0;
  __syncthreads();
  for_all<16>(experts, pairs, [&](int, unsigned expert) { atomicAdd(&counts[expert], 1); });
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
  const int most = min(EXPERTS, pairs) + pairs / TOKENS;
  for (int tile = last_tiles[EXPERTS - 1] + thread; tile < most; tile += threads) tiles[3 * tile + 2] = 0;
  __syncthreads();
  for_all<16>(experts, pairs, [&](int i, unsigned expert) { order[atomicAdd(&counts[expert], 1)] = i; });
}

} // namespace headstart
