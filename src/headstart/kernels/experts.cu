// Products with experts: pair p of (row of x, expert) takes row p / share of x and gives row p of y.
//
// Pairs that chose the same expert are columns of one tile, so that its weights are read once for all of them. The
// first pair of every WIDE · 8 that share an expert works; the blocks of the others leave at once.

namespace headstart {

// → false where another pair does the work; else `outputs` holds the pairs of this block's expert.
template <int WIDE>
__device__ __forceinline__ bool gather_pairs(const unsigned* experts, int pairs, int pair, int* outputs) {
  const int lane = threadIdx.x % 32;
  const unsigned expert = experts[pair];
  int before = 0;
  for (int p = lane; p - lane < pair; p += 32)
    before += __popc(__ballot_sync(0xFFFFFFFF, p < pair && experts[p] == expert));
  if (before % (8 * WIDE)) return false;

  if (threadIdx.x < 32) {
    for (int c = lane; c < 8 * WIDE; c += 32) outputs[c] = -1;
    __syncwarp();
    int found = 0;
    for (int p = pair + lane; p - lane < pairs && found < 8 * WIDE; p += 32) {
      bool same = p < pairs && experts[p] == expert;
      unsigned all = __ballot_sync(0xFFFFFFFF, same);
      int column = found + __popc(all & ((1u << lane) - 1));
      if (same && column < 8 * WIDE) outputs[column] = p;
      found += __popc(all);
    }
  }
  __syncthreads();
  return true;
}

// One element of a row: what its experts made, by their scores, and what all rows share, by its gate's sigmoid.
template <typename T>
__device__ __forceinline__ T combined(const T* parts, const T* scores, int top, int N, T shared, T gate) {
  float sum = 0;
  for (int i = 0; i < top; i++) sum = __fmaf_rn(float(parts[(long long)i * N]), float(scores[i]), sum);
  return T(__fmaf_rn(__fdiv_rn(1.0f, 1.0f + expf(-float(gate))), float(shared), sum));
}

} // namespace headstart
