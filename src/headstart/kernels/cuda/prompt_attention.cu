// Attention of a prompt's pass: many queries of each row over the keys and values before them and their own.
//
// A block has ROWS queries of one key head: query r of a row is head r % GROUP of token r / GROUP, so heads that share
// keys share tiles. It takes the keys in steps of KEYS at fixed positions, in ascending order, and keeps for every
// query the maximum, the sum of p = 2^(score - maximum) and Σ p·v. A step that a query does not see leaves all three
// as they are, so what a query gets does not depend on the width of the pass, its neighbours or the capacity.
//
// The scores of a step are computed while the values of the step before are added. In WARPGROUPS, by products of
// warpgroup.cu; else by mma.sync.

namespace headstart {

constexpr int ROWS = 128, KEYS = 64;
constexpr int READERS = 8;  // warps, of sixteen queries each
constexpr int PANEL = 64;   // columns of a panel, see warpgroup.cu

template <int D>
constexpr int PANELS = (D + PANEL - 1) / PANEL;

// Shared memory of a block, in bytes: queries, and two steps of keys and of values.
template <int D>
constexpr int PROMPT_ATTENTION_BYTES = 2 * PANELS<D> * PANEL * (ROWS + 4 * KEYS);

// The unit of 16 bytes of a tile's line where `column` begins.
template <typename T, int LINES>
__device__ __forceinline__ T* unit_of(T* tile, int line, int column) {
  return tile + (column / PANEL * LINES + line) * PANEL + ((column / 8 % 8) ^ (line % 8)) * 8;
}

// LINES of `from`, D elements each, into a tile. What is not `there` is zero.
template <int D, int LINES, typename T, typename Line>
__device__ __forceinline__ void copy_lines(T* tile, Line line_of, int there) {
  constexpr int UNITS = PANELS<D> * PANEL / 8, AT_ONCE = 32 / UNITS;  // of a line; lines of a warp
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * AT_ONCE + lane / UNITS, column = 8 * (lane % UNITS);
  if (AT_ONCE * UNITS < 32 && lane >= AT_ONCE * UNITS) return;
  T* to = unit_of<T, LINES>(tile, first, column);  // of a line that is a multiple of 8 further, as much further
#pragma unroll
  for (int i = 0; i < LINES; i += READERS * AT_ONCE) {
    const bool is_there = first + i < there && (D % PANEL == 0 || column < D);
    copy_16_bytes(to + i * PANEL, line_of(first + i) + column, is_there ? 16 : 0);
  }
}

// Of sixteen queries of each warp and a step's keys.
template <int D, bool WARPGROUPS, typename T>
__device__ __forceinline__ void begin_scores(float (&scores)[KEYS / 8][4], const T* queries, const T* keys) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (WARPGROUPS) {
    const int group = __shfl_sync(0xffffffffu, warp / 4, 0);  // the same in all lanes, and the compiler knows it
    const unsigned long long a = describe_panel(queries + group * 64 * PANEL), b = describe_panel(keys);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
      const int unit = k % PANEL / 8;
      multiply_panels<T>(scores, a + k / PANEL * ROWS * 8 + unit, b + k / PANEL * KEYS * 8 + unit, k > 0);
    }
    commit_products();
  } else {
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[j][e] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < D; k += 16) {
      uint32_t a[4], b[4];
      load_matrices_4(a, unit_of<const T, ROWS>(queries, 16 * warp + lane % 16, k + 8 * (lane / 16)));
#pragma unroll
      for (int j = 0; j < KEYS / 8; j += 2) {
        load_matrices_4(b, unit_of<const T, KEYS>(keys, 8 * j + lane % 8 + 8 * (lane / 16), k + 8 * (lane / 8 % 2)));
        multiply<T>(scores[j], a, {b[0], b[1]});
        multiply<T>(scores[j + 1], a, {b[2], b[3]});
      }
    }
  }
}

// sum += p · values.
template <int D, bool WARPGROUPS, typename T>
__device__ __forceinline__ void begin_sum(
    float (&sum)[PANELS<D> * PANEL / 8][4], const uint32_t (&p)[KEYS / 16][4], const T* values) {
  const int lane = threadIdx.x % 32;
  if constexpr (WARPGROUPS) {
    const unsigned long long b = describe_panel(values, KEYS * PANEL * 2);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) multiply_by_panels<T>(sum, p[k], b + k * 16 * 8);
    commit_products();
  } else {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
      for (int j = 0; j < D / 8; j += 2) {
        uint32_t b[4];
        load_matrices_4_transposed(b, unit_of<const T, KEYS>(values, 16 * k + lane % 16, 8 * j + 8 * (lane / 16)));
        multiply<T>(sum[j], p[k], {b[0], b[1]});
        multiply<T>(sum[j + 1], p[k], {b[2], b[3]});
      }
  }
}

// Of a thread's two queries, so far: what the softmax of all of their scores needs.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns
  float factor[2];              // by which this step changes what is summed up so far

  // Makes p of a step's scores.
  __device__ __forceinline__ void add(float (&scores)[KEYS / 8][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = top[half];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        highest = fmaxf(highest, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float base = highest == -INFINITY ? 0.0f : __fmul_rn(highest, scale);  // nothing seen: every p is zero
      factor[half] = power_of_two(__fsub_rn(__fmul_rn(top[half], scale), base));
      top[half] = highest;
      float parts[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j][2 * half + e];
          score = power_of_two(__fmaf_rn(score, scale, -base));
          parts[e] = __fadd_rn(parts[e], score);
        }
      }
      sum[half] = __fmaf_rn(sum[half], factor[half], __fadd_rn(parts[0], parts[1]));
    }
  }
};

template <typename T>
struct __align__(4) Two {
  T x, y;
};

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, __fadd_rn(1.0f, power_of_two(__fmul_rn(x, -1.44269504f))));
}

// Queries `tile`·ROWS and on of key head `head` of row b, by a block of 32·READERS threads.
template <int H, int HKV, int D, bool WARPGROUPS, typename T>
__device__ __forceinline__ void attend_prompt(
    unsigned char* shared,  // PROMPT_ATTENTION_BYTES<D>, at a multiple of 1024
    int tile,
    int head,
    int b,
    const T* q,         // [B, H, W, D]
    const T* gates,     // [B, W, H, 2·D], the second half of each head; or null
    const T* keys,      // [B, HKV, S, D]
    const T* values,    // [B, HKV, S, D]
    const int* offset,  // [B], the position of the pass's first token
    float scale,        // times log2(e)
    int W,
    int S,
    int window,  // a query sees positions less than this before its own; 0: all
    T* out) {    // [B, W, H, D]
  constexpr int GROUP = H / HKV, STEP = PANELS<D> * PANEL * KEYS;
  T* const query_tile = reinterpret_cast<T*>(shared);
  T* const key_tiles = query_tile + PANELS<D> * PANEL * ROWS;
  T* const value_tiles = key_tiles + 2 * STEP;

  const int row0 = tile * ROWS, queries = GROUP * W, first = offset[b];
  const int lowest = first + row0 / GROUP, highest = first + (min(row0 + ROWS, queries) - 1) / GROUP;  // positions
  const int begin = window == 0 ? 0 : max(0, lowest - window + 1) / KEYS, end = highest / KEYS + 1;    // steps
  const long long of_head = (long long)(b * HKV + head) * S * D;

  auto copy_step = [&](T* tiles, const T* from, int step) {
    const T* const lines = from + of_head + (long long)step * KEYS * D;
    copy_lines<D, KEYS>(tiles + step % 2 * STEP, [&](int line) { return lines + line * D; },
                        highest + 1 - step * KEYS);
  };
  auto arrive = [] {  // all copies but those committed last
    wait_for_copies<1>();
    if constexpr (WARPGROUPS) show_to_tensor_cores();
    __syncthreads();
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto row_of = [&](int half) { return row0 + 16 * warp + lane / 4 + 8 * half; };
  const int own[2] = {first + row_of(0) / GROUP, first + row_of(1) / GROUP};
  float scores[KEYS / 8][4], sum[PANELS<D> * PANEL / 8][4] = {};
  uint32_t p[KEYS / 16][4];
  Softmax softmax;

  auto add_scores = [&](int step) {
    const int key0 = step * KEYS;
    if (key0 + KEYS - 1 > lowest || (window != 0 && highest - key0 >= window)) {
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int before = own[e / 2] - (key0 + 8 * j + 2 * (lane % 4) + e % 2);
          if (before < 0 || (window != 0 && before >= window)) scores[j][e] = -INFINITY;
        }
      }
    }
    softmax.add(scores, scale);
  };
  auto pack_scores = [&] {  // in the layout of a product's left side
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[k][i] = pack<T>(scores[2 * k + i / 2][2 * (i % 2)], scores[2 * k + i / 2][2 * (i % 2) + 1]);
      }
    }
  };

  copy_lines<D, ROWS>(
      query_tile,
      [&](int line) {
        const int row = min(row0 + line, queries - 1);
        return q + ((long long)(b * H + head * GROUP + row % GROUP) * W + row / GROUP) * D;
      },
      queries - row0);
  copy_step(key_tiles, keys, begin);
  commit_copies();
  copy_step(value_tiles, values, begin);
  if (begin + 1 < end) copy_step(key_tiles, keys, begin + 1);
  commit_copies();
  arrive();
  if constexpr (WARPGROUPS) begin_products();
  begin_scores<D, WARPGROUPS>(scores, query_tile, key_tiles + begin % 2 * STEP);
  if constexpr (WARPGROUPS) {
    wait_for_products<0>();
    hold(scores);
  }
  add_scores(begin);
  pack_scores();
  __syncthreads();  // the first keys are read
  if (begin + 2 < end) copy_step(key_tiles, keys, begin + 2);
  commit_copies();

#pragma unroll 1
  for (int step = begin; step + 1 < end; ++step) {
    arrive();  // the values of this step and the keys of the next; the values before are read
    if constexpr (WARPGROUPS) {
      hold(scores), hold(sum), hold(p);
      begin_products();
      begin_scores<D, WARPGROUPS>(scores, query_tile, key_tiles + (step + 1) % 2 * STEP);
    }
    copy_step(value_tiles, values, step + 1);
    commit_copies();
    if constexpr (!WARPGROUPS) {
      begin_scores<D, WARPGROUPS>(scores, query_tile, key_tiles + (step + 1) % 2 * STEP);
    }
    begin_sum<D, WARPGROUPS>(sum, p, value_tiles + step % 2 * STEP);
    if constexpr (WARPGROUPS) {
      wait_for_products<1>();
      hold(scores);
    }
    add_scores(step + 1);
    __syncthreads();  // the keys are read
    if (step + 3 < end) copy_step(key_tiles, keys, step + 3);
    commit_copies();
    if constexpr (WARPGROUPS) {
      wait_for_products<0>();
      hold(sum), hold(p);
    }
    const bool changes = softmax.factor[0] != 1.0f || softmax.factor[1] != 1.0f;
    if (__ballot_sync(0xffffffffu, changes)) {
#pragma unroll
      for (int j = 0; j < PANELS<D> * PANEL / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][e] = __fmul_rn(sum[j][e], softmax.factor[e / 2]);
      }
    }
    pack_scores();
  }
  arrive();
  if constexpr (WARPGROUPS) {
    hold(sum), hold(p);
    begin_products();
  }
  begin_sum<D, WARPGROUPS>(sum, p, value_tiles + (end - 1) % 2 * STEP);
  if constexpr (WARPGROUPS) {
    wait_for_products<0>();
    hold(sum);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = softmax.sum[half];
    total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
    total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
    const float inverse = __fdiv_rn(1.0f, total);
    const int row = row_of(half);
    if (row >= queries) continue;
    const long long at = ((long long)b * W + row / GROUP) * H + head * GROUP + row % GROUP;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
      float x = __fmul_rn(sum[j][2 * half], inverse), y = __fmul_rn(sum[j][2 * half + 1], inverse);
      if (gates != nullptr) {
        const Two<T> gate = *reinterpret_cast<const Two<T>*>(gates + at * 2 * D + D + column);
        x = __fmul_rn(x, sigmoid(static_cast<float>(gate.x)));
        y = __fmul_rn(y, sigmoid(static_cast<float>(gate.y)));
      }
      *reinterpret_cast<uint32_t*>(out + at * D + column) = pack<T>(x, y);
    }
  }
}

}  // namespace headstart
