// Products with experts: pair p of (row of x, expert) takes row p / share of x and gives row p of y.
//
// Pairs that chose the same expert are columns of one tile, so that its weights are read once for all of them. The
// first pair of every COLUMNS that share an expert works; the blocks of the others leave at once.

namespace headstart {

// → false where another pair does the work; else `outputs` holds the pairs of this block's expert.
template <int COLUMNS>
__device__ __forceinline__ bool gather_pairs(const unsigned* experts, int pairs, int pair, int* outputs) {
  const int lane = threadIdx.x % 32;
  const unsigned expert = experts[pair];
  int before = 0;
  for (int p = lane; p - lane < pair; p += 32)
    before += __popc(__ballot_sync(0xFFFFFFFF, p < pair && experts[p] == expert));
  if (before % COLUMNS) return false;

  if (threadIdx.x < 32) {
    for (int c = lane; c < COLUMNS; c += 32) outputs[c] = -1;
    __syncwarp();
    int found = 0;
    for (int p = pair + lane; p - lane < pairs && found < COLUMNS; p += 32) {
      bool same = p < pairs && experts[p] == expert;
      unsigned all = __ballot_sync(0xFFFFFFFF, same);
      int column = found + __popc(all & ((1u << lane) - 1));
      if (same && column < COLUMNS) outputs[column] = p;
      found += __popc(all);
    }
  }
  __syncthreads();
  return true;
}

template <typename F, typename P>
__device__ __forceinline__ void move_to_expert(P& part, int K, unsigned expert) {
  const long long rows = (long long)expert * part.N, codes = rows * (K / 8 * F::BITS);
  const long long scales = rows * (K / F::GROUP) * int(sizeof(typename F::Scale));
  auto move = [](const void*& at, long long bytes) { at = static_cast<const char*>(at) + bytes; };
  move(part.w, codes);
  if (part.up) move(part.up, codes);
  if (F::QUANTISED) move(part.scales, scales);
  if (F::HAS_BIASES) move(part.biases, scales);
  if (F::QUANTISED && part.up) move(part.up_scales, scales);
  if (F::HAS_BIASES && part.up) move(part.up_biases, scales);
  if (F::WHOLE) part.whole += expert, part.up_whole += part.up ? expert : 0;
}

// Of E logits the TOP largest, the first of equals first. One warp for a row.
template <typename T, int E, int TOP>
__device__ __forceinline__ void choose(const T* logits, unsigned* indices) {
  static_assert(TOP <= 32, "a lane has one");
  static_assert(sizeof(T) == 2 && E < 0xFFFF);
  constexpr int EACH = (E + 31) / 32;
  const int lane = threadIdx.x % 32;
  // A number's bits, ordered as the numbers are, over its expert's: the largest key is the first of the largest logits.
  unsigned keys[EACH], chosen = 0; // zero is taken already
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = lane + 32 * i;
    const unsigned bits = expert < E ? reinterpret_cast<const unsigned short*>(logits)[expert] : 0;
    keys[i] = expert < E ? (bits ^ (bits & 0x8000 ? 0xFFFF : 0x8000)) << 16 | (0xFFFF - expert) : 0;
  }
#pragma unroll 1 // in a persistent kernel code runs once: it is short rather than fast
  for (int t = 0; t < TOP; t++) {
    unsigned best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) best = max(best, keys[i]);
    best = __reduce_max_sync(0xFFFFFFFF, best);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (keys[i] == best) keys[i] = 0;
    if (lane == t) chosen = 0xFFFF - (best & 0xFFFF);
  }
  if (lane < TOP) indices[lane] = chosen;
}

// The shares of the chosen by softmax, of all or (`normed`) of the TOP. One warp for a row.
template <typename T, int E, int TOP>
__device__ __forceinline__ void score(const T* logits, const unsigned* indices, bool normed, T* scores) {
  constexpr int EACH = (E + 31) / 32;
  const int lane = threadIdx.x % 32;
  const float value = lane < TOP ? float(logits[indices[lane]]) : 0;
  float values[EACH], most = -INFINITY, all = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int expert = lane + 32 * i;
    values[i] = expert < E ? float(logits[expert]) : -INFINITY;
    most = fmaxf(most, values[i]);
  }
  for (int mask = 16; mask; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, mask));
#pragma unroll 1
  for (int i = 0; i < EACH; i++) all = __fadd_rn(all, expf(__fsub_rn(values[i], most)));
  for (int mask = 16; mask; mask /= 2) all = __fadd_rn(all, __shfl_xor_sync(0xFFFFFFFF, all, mask));
  const float share = float(T(__fdiv_rn(expf(__fsub_rn(value, most)), all)));
  float chosen = 0;
#pragma unroll
  for (int t = 0; t < TOP; t++) chosen = __fadd_rn(chosen, __shfl_sync(0xFFFFFFFF, share, t));
  if (lane < TOP) scores[lane] = T(normed ? __fdiv_rn(share, chosen) : share);
}

// One element of a row: what its experts made, by their scores, and what all rows share, by its gate's sigmoid.
template <typename T>
__device__ __forceinline__ T combined(const T* parts, const T* scores, int top, int N, T shared, T gate) {
  float sum = 0;
  for (int i = 0; i < top; i++) sum = __fmaf_rn(float(parts[(long long)i * N]), float(scores[i]), sum);
  return T(__fmaf_rn(__fdiv_rn(1.0f, 1.0f + expf(-float(gate))), float(shared), sum));
}

} // namespace headstart
