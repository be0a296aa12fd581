// Greedy decoding after the logits: the best token of each row, and how many drafts agree with them.

namespace headstart {

// Of two candidates the larger, of equal ones the earlier.
struct Best {
  float value;
  int index;

  __device__ __forceinline__ void take(float other, int at) {
    if (other > value || (other == value && at < index)) value = other, index = at;
  }
};

// The argmax of a row of `size` logits, as MLX finds it but for NaN, which is never the best here: a sequence with one
// ends anyway. Where nothing is more than -inf it is token 0. `finite` is 0 where a logit is NaN or the largest
// infinite. A block of THREADS per row.
template <int THREADS, typename T>
__device__ void best_token(const T* logits, int size, int* token, int* finite) {
  constexpr int WARPS = THREADS / 32, AHEAD = 4;
  __shared__ Best parts[WARPS];
  __shared__ int odd[WARPS];
  const Eight<T>* const row = reinterpret_cast<const Eight<T>*>(logits + static_cast<long long>(blockIdx.x) * size);
  Best best{-INFINITY, 0};
  bool nan = false;
  for (int first = threadIdx.x; first < size / 8; first += AHEAD * THREADS) {
    Eight<T> here[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i * THREADS < size / 8) here[i] = row[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i * THREADS < size / 8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float value = float(here[i].at[j]);
          nan |= value != value;
          if (value > best.value) best = {value, 8 * (first + i * THREADS) + j};
        }
      }
  }
  auto over_warp = [&] {
    for (int step = 16; step; step /= 2) {
      const float value = __shfl_xor_sync(0xffffffffu, best.value, step);
      best.take(value, __shfl_xor_sync(0xffffffffu, best.index, step));
    }
  };
  over_warp();
  const unsigned any = __ballot_sync(0xffffffffu, nan);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best, odd[threadIdx.x / 32] = any != 0;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = threadIdx.x < WARPS ? parts[threadIdx.x] : Best{-INFINITY, 0};
  nan = threadIdx.x < WARPS && odd[threadIdx.x];
  over_warp();
  const bool void_row = __ballot_sync(0xffffffffu, nan) != 0;
  if (threadIdx.x != 0) return;
  token[blockIdx.x] = best.index;
  finite[blockIdx.x] = !void_row && best.value > -INFINITY && best.value < INFINITY;
}

// Accept the drafts of a window [B, W], all but its first token, while they are the `best` tokens before them: at most
// `max_k` and `most`, and one less than remain. `finite` of a sequence is that of all tokens that it generates. A
// thread each.
__device__ __forceinline__ void accept_drafts(
    int B, int W, const int* best, const int* finite_each, const int* most, const int* window, const int* max_k,
    const int* lengths, const int* remaining, const int* rounds, int* accepted, int* proposed, int* finite,
    int* generated, int* last, int* new_lengths, int* new_remaining, int* new_rounds, int* places) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= B) return;
  best += b * W, finite_each += b * W, window += b * W, places += b * W;
  const int allowed = max(0, min(W - 1, min(max_k[b], remaining[b] - 1)));
  int n = 0;
  while (n < min(allowed, most[b]) && window[n + 1] == best[n]) ++n;
  int sound = 1;
  for (int i = 0; i <= n; ++i) sound &= finite_each[i];
  accepted[b] = n, proposed[b] = allowed, finite[b] = sound, generated[b] = n + 1;
  last[b] = best[n];
  new_lengths[b] = lengths[b] + n + 1;
  new_remaining[b] = remaining[b] - n - 1;
  new_rounds[b] = rounds[b] + 1;
  for (int i = 0; i < W; ++i) places[i] = lengths[b] + 1 + i;
}

// Where drafts begin after `counts` more pairs, starts [k, B], and the last of these pairs. A thread per sequence and
// draft.
__device__ __forceinline__ void draft_starts(int B, const int* lengths, const int* counts, int* last, int* starts) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y;
  if (b >= B) return;
  starts[j * B + b] = lengths[b] + counts[b] + j;
  if (j == 0) last[b] = max(counts[b] - 1, 0);
}

// Columns [rows, width] of an array, which all rows share if it has one.
struct Columns {
  const int* from;
  int rows, width;
};

// out [B, all widths] = the arrays side by side, as one array or as pairs of numbers. A thread per row.
template <int N, int PIECES>
__device__ __forceinline__ void join_columns(const Columns (&arrays)[N], int* const (&out)[PIECES]) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  int B = 0, width = 0;
  for (const Columns& each : arrays) B = max(B, each.rows), width += each.width;
  if (b >= B) return;
  int at = b * width;
  for (const Columns& each : arrays)
    for (int i = 0; i < each.width; ++i, ++at)
      out[PIECES == 1 ? 0 : at / 2][PIECES == 1 ? at : at % 2] = each.from[(each.rows == 1 ? 0 : b) * each.width + i];
}

}  // namespace headstart
