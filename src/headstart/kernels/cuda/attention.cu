// Attention of a short window over keys and values of different lengths, in three stages.
//
// `arrange` makes queries, keys and values of a layer's products. The positions are cut into pieces of SPLIT at fixed
// places: `partials` takes one piece of one key head of one row, and all queries that look at it; `merge`
// puts the pieces of a query together in a fixed order. A query is row w·GROUP + g of its block, wherever the window
// ends, and sees zeros where nothing is written yet: what it gets depends neither on the width of the window nor on
// the capacity nor on other rows.

namespace headstart {

constexpr int SPLIT = 128;  // positions
constexpr int WARPS = 8;    // of a team of `partials`
constexpr int MERGERS = 4;  // pieces that `merge` looks at side by side
constexpr int TILE = 16;    // queries multiplied together
constexpr int PAD = 8;      // elements at the end of a line of shared memory: eight lines, eight different banks

// One head of one token of a layer's products as attention wants it, by a warp: queries and keys normed and rotated to
// their positions. `index` counts through B·W·(H + 2·HKV). Keys and values go to position `start` + w of [B, HKV, S, D].
template <int H, int HKV, int D, int DIMS, int PARTS = 2, typename T, typename N>
__device__ __forceinline__ void arrange(
    int index,
    float* line,            // [D], this warp's
    const T* both,          // [B, W, H, PARTS·D], queries and, if there are two parts, gates
    const T* keys,          // [B, W, HKV, D]
    const T* values,        // [B, W, HKV, D]
    const N* query_weight,  // [D]
    const N* key_weight,    // [D]
    const int* offset,      // [B], the position of the window's first token
    float eps,
    float log2_base,        // of the rotation's frequencies, of the first DIMS elements
    int B,
    int W,
    T* new_queries,         // [B, H, W, D]
    T* new_keys,            // [B, HKV, S, D]
    T* new_values,          // [B, HKV, S, D]
    int S,
    bool at_offset) {       // whether a window's keys and values stand at its offset, or at 0
  const int lane = threadIdx.x % 32;
  const int head = index % (H + 2 * HKV), token = index / (H + 2 * HKV), b = token / W, w = token % W;
  if (b >= B) {
    return;
  }
  const int position = w + (at_offset ? offset[b] : 0);
  if (head >= H + HKV) {
    const int h = head - H - HKV;
    for (int d = lane; d < D; d += 32) {
      new_values[((long long)(b * HKV + h) * S + position) * D + d] = values[((long long)token * HKV + h) * D + d];
    }
    return;
  }
  const bool query = head < H;
  const int h = query ? head : head - H;
  const T* from = query ? both + ((long long)token * H + h) * PARTS * D : keys + ((long long)token * HKV + h) * D;
  T* to = query ? new_queries + ((long long)(b * H + h) * W + w) * D
                : new_keys + ((long long)(b * HKV + h) * S + position) * D;
  const N* weight = query ? query_weight : key_weight;

  float sum = 0.0f;
  for (int d = lane; d < D; d += 32) {
    const float x = static_cast<float>(from[d]);
    line[d] = x;
    sum = __fmaf_rn(x, x, sum);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  }
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(D)), eps)));
  for (int d = lane; d < D; d += 32) {
    line[d] = __fmul_rn(__fmul_rn(line[d], scale), static_cast<float>(weight[d]));
  }
  __syncwarp();
  for (int d = lane; d < D; d += 32) {
    if (d < DIMS / 2) {  // with its partner half the rotated elements further
      const float angle = __fmul_rn(float(offset[b] + w), exp2f(-__fmul_rn(float(d) / (DIMS / 2), log2_base)));
      const float x = line[d], y = line[d + DIMS / 2];
      float sine, cosine;
      sincosf(angle, &sine, &cosine);
      to[d] = static_cast<T>(__fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine)));
      to[d + DIMS / 2] = static_cast<T>(__fadd_rn(__fmul_rn(x, sine), __fmul_rn(y, cosine)));
    } else if (d >= DIMS) {
      to[d] = static_cast<T>(line[d]);
    }
  }
  __syncwarp();
}

// [b, head, piece] of `out` gets Σ p·v and of `weights` (max, Σ p), for every query; p = 2^(score − max). By a team of
// 32·WARPS threads.
template <int H, int HKV, int D, typename T>
__device__ __forceinline__ void partials(
    const Team& team,
    unsigned char* shared,
    int piece,
    int pieces,
    int head,
    int b,
    const T* q,         // [B, H, W, D]
    const T* keys,      // [B, HKV, S, D]
    const T* values,    // [B, HKV, S, D]
    const int* offset,  // [B], the position of the window's first token
    float scale,        // times log2(e)
    int W,
    int S,
    float* out,         // [B, HKV, pieces, GROUP·W, D]
    float* weights,     // [B, HKV, pieces, GROUP·W, 2]
    bool causal = true,  // or queries also see what follows in their window
    int window = 0) {    // a query sees positions less than this away; 0: all
  constexpr int GROUP = H / HKV;
  constexpr int LINE = D + PAD, P_LINE = SPLIT + PAD;
  constexpr int COLUMNS = (D / 8 + WARPS - 1) / WARPS;  // of eight, that a warp has of the output
  static_assert(SPLIT == 16 * WARPS, "a warp has sixteen keys");
  T* const key_lines = reinterpret_cast<T*>(shared);
  T* const value_lines = key_lines + SPLIT * LINE;
  T* const query_lines = value_lines + SPLIT * LINE;
  T* const p_lines = query_lines + TILE * LINE;
  float* const maxima = reinterpret_cast<float*>(p_lines + TILE * P_LINE);  // [WARPS, TILE]
  float* const sums = maxima + WARPS * TILE;                                // [WARPS, TILE]

  const int thread = team.thread, warp = thread / 32, lane = thread % 32;
  const int begin = piece * SPLIT, first = offset[b];
  const int written = min(SPLIT, first + W - begin);  // positions of this piece
  const int queries = GROUP * W;
  if (written <= 0) {
    return;
  }

  auto copy = [&](T* lines, const T* from) {  // a whole piece
#pragma unroll 2
    for (int i = thread; i < SPLIT * (D / 8); i += 32 * WARPS) {
      const int line = i / (D / 8), column = 8 * (i % (D / 8));
      const long long at = ((long long)(b * HKV + head) * S + begin + line) * D + column;
      copy_16_bytes(lines + line * LINE + column, from + at, line < written ? 16 : 0);
    }
  };
  auto copy_queries = [&](int row0) {
#pragma unroll 1
    for (int i = thread; i < TILE * (D / 8); i += 32 * WARPS) {
      const int line = i / (D / 8), column = 8 * (i % (D / 8)), row = row0 + line;
      const long long at = ((long long)(b * H + head * GROUP + row % GROUP) * W + row / GROUP) * D + column;
      copy_16_bytes(query_lines + line * LINE + column, q + at, row < queries ? 16 : 0);
    }
  };
  team.sync();  // of the piece before, nothing is read any more
  copy_queries(0);
  copy(key_lines, keys);
  commit_copies();
  copy(value_lines, values);
  commit_copies();

  for (int row0 = 0; row0 < queries; row0 += TILE) {
    if (row0 == 0) {
      wait_for_copies<1>();  // the values may still be on their way
    } else {
      team.sync();
      copy_queries(row0);
      commit_copies();
      wait_for_copies<0>();
    }
    team.sync();

    // Scores of sixteen queries and this warp's sixteen keys.
    float scores[2][4] = {};
#pragma unroll 4
    for (int k = 0; k < D; k += 16) {
      uint32_t a_part[4], b_part[2];
      load_matrices_4(a_part, query_lines + (lane % 16) * LINE + k + 8 * (lane / 16));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        load_matrices_2(b_part, key_lines + (16 * warp + 8 * j + lane % 8) * LINE + k + 8 * (lane / 8 % 2));
        multiply<T>(scores[j], a_part, b_part);
      }
    }
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = begin + 16 * warp + 8 * j + 2 * (lane % 4) + e % 2;
        const int own = first + (row0 + lane / 4 + 8 * (e / 2)) / GROUP;  // the query's position
        const bool seen = key <= (causal ? own : first + W - 1) && (window == 0 || abs(own - key) < window);
        scores[j][e] = seen ? __fmul_rn(scores[j][e], scale) : -INFINITY;
        highest[e / 2] = fmaxf(highest[e / 2], scores[j][e]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffffu, highest[half], 2));
      if (lane % 4 == 0) {
        maxima[warp * TILE + lane / 4 + 8 * half] = highest[half];
      }
    }
    team.sync();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = lane / 4 + 8 * half;
      float top = -INFINITY;
      for (int w = 0; w < WARPS; ++w) {
        top = fmaxf(top, maxima[w * TILE + line]);
      }
      top = top == -INFINITY ? 0.0f : top;  // nothing to see: every p is zero
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p = exp2f(__fsub_rn(scores[j][2 * half + e], top));
          sum = __fadd_rn(sum, p);
          p_lines[line * P_LINE + 16 * warp + 8 * j + 2 * (lane % 4) + e] = static_cast<T>(p);
        }
      }
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
      if (lane % 4 == 0) {
        sums[warp * TILE + line] = sum;
      }
    }
    wait_for_copies<0>();
    team.sync();

    // Sixteen queries by this warp's columns of the values.
    float sum[COLUMNS][4] = {};
#pragma unroll 2
    for (int k = 0; k < SPLIT; k += 16) {
      uint32_t a_part[4], b_part[2];
      load_matrices_4(a_part, p_lines + (lane % 16) * P_LINE + k + 8 * (lane / 16));
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        if (warp + WARPS * i < D / 8) {
          load_matrices_2_transposed(b_part, value_lines + (k + lane % 16) * LINE + 8 * (warp + WARPS * i));
          multiply<T>(sum[i], a_part, b_part);
        }
      }
    }
    const long long of_piece = ((long long)(b * HKV + head) * pieces + piece) * queries;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + lane / 4 + 8 * half, column = 8 * (warp + WARPS * i) + 2 * (lane % 4);
        if (row < queries && column < D) {
          *reinterpret_cast<float2*>(out + (of_piece + row) * D + column) =
              make_float2(sum[i][2 * half], sum[i][2 * half + 1]);
        }
      }
    }
    if (thread < TILE && row0 + thread < queries) {
      float top = -INFINITY, total = 0.0f;
      for (int w = 0; w < WARPS; ++w) {
        top = fmaxf(top, maxima[w * TILE + thread]);
        total = __fadd_rn(total, sums[w * TILE + thread]);
      }
      weights[(of_piece + row0 + thread) * 2] = top;
      weights[(of_piece + row0 + thread) * 2 + 1] = total;
    }
  }
}

// Shared memory that `merge` needs, in floats.
template <int D>
constexpr int MERGE_FLOATS = (MERGERS * D + D / 32 + MERGERS + 3) / 4 * 4;

// The pieces of one query, as one output, times the sigmoid of its gate if it has one: head h of token w of row b, by
// a team of D threads.
template <int H, int HKV, int D, typename T, typename Y>
__device__ __forceinline__ void merge(
    const Team& team,
    float* shared,
    int h,
    int w,
    int b,
    const float* partial,  // [B, HKV, pieces, GROUP·W, D]
    const float* weights,  // [B, HKV, pieces, GROUP·W, 2]
    const T* gates,        // [B, W, H, 2·D], the second half of each head; or null
    const int* offset,     // [B]
    int W,
    int pieces,
    Y* out,                // [B, W, H, D]
    bool causal = true) {
  constexpr int GROUP = H / HKV;
  constexpr int LANES = D / MERGERS;  // of four columns
  float (*sums)[D] = reinterpret_cast<float (*)[D]>(shared);
  float* tops = shared + MERGERS * D;
  float* totals = tops + D / 32;
  const int thread = team.thread;
  const int merger = thread / LANES, column = 4 * (thread % LANES);
  const int seen = (offset[b] + (causal ? w : W - 1)) / SPLIT + 1;  // pieces
  const int queries = GROUP * W, row = w * GROUP + h % GROUP;
  auto line = [&](int piece) { return ((long long)(b * HKV + h / GROUP) * pieces + piece) * queries + row; };

  float top = -INFINITY;
#pragma unroll 1
  for (int piece = thread; piece < seen; piece += D) {
    top = fmaxf(top, weights[2 * line(piece)]);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  }
  team.sync();  // of the query before, nothing is read any more
  if (thread % 32 == 0) {
    tops[thread / 32] = top;
  }
  team.sync();
  for (int i = 0; i < D / 32; ++i) {
    top = fmaxf(top, tops[i]);
  }

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float total = 0.0f;
#pragma unroll 2
  for (int piece = merger; piece < seen; piece += MERGERS) {
    const float factor = exp2f(__fsub_rn(weights[2 * line(piece)], top));
    const float4 x = *reinterpret_cast<const float4*>(partial + line(piece) * D + column);
    sum.x = __fmaf_rn(factor, x.x, sum.x), sum.y = __fmaf_rn(factor, x.y, sum.y);
    sum.z = __fmaf_rn(factor, x.z, sum.z), sum.w = __fmaf_rn(factor, x.w, sum.w);
    total = __fmaf_rn(factor, weights[2 * line(piece) + 1], total);
  }
  *reinterpret_cast<float4*>(&sums[merger][column]) = sum;
  if (thread % LANES == 0) {
    totals[merger] = total;
  }
  team.sync();

  float value = sums[0][thread], weight = totals[0];
  for (int i = 1; i < MERGERS; ++i) {
    value = __fadd_rn(value, sums[i][thread]);
    weight = __fadd_rn(weight, totals[i]);
  }
  const long long at = ((long long)b * W + w) * H + h;
  float opened = 1.0f;
  if (gates != nullptr) {
    const float gate = static_cast<float>(gates[at * 2 * D + D + thread]);
    opened = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-gate)));
  }
  leave(out, at * D + thread, static_cast<T>(__fmul_rn(__fdiv_rn(value, weight), opened)));
}

}  // namespace headstart
