// Attention of a prompt's pass: many queries of each row over the keys and values before them and their own.
//
// A block has ROWS queries of one key head: query r of a row is head r % GROUP of token r / GROUP, so heads that share
// keys share tiles. It takes the keys in steps of KEYS at fixed positions, in ascending order, and keeps for every
// query the maximum, the sum of p = 2^(score - maximum) and Σ p·v. A step that a query does not see leaves all three
// as they are, so what a query gets does not depend on the width of the pass, its neighbours or the capacity.
//
// The scores of a step are computed while the values of the step before are added. In WARPGROUPS, by products of
// warpgroup.cu; else by mma.sync.
//
// Long texts are cut into pieces of as many steps, each computed from nothing, and added in ascending order: by the
// block, or, where there are too few blocks for the device, each by a block of its own and all by `add_pieces`. What a
// query gets is the same.

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

// LINES of D elements into a tile. A thread copies 16 bytes of lines `first` + i, from `place_of(i)`, all at its column.
// Lines that are not `there` are zero.
template <int D, int LINES>
struct LineCopy {
  static constexpr int UNITS = PANELS<D> * PANEL / 8, AT_ONCE = 32 / UNITS;  // of a line; lines of a warp
  int first, column;

  __device__ __forceinline__ LineCopy()
      : first(threadIdx.x / 32 * AT_ONCE + threadIdx.x % 32 / UNITS), column(8 * (threadIdx.x % 32 % UNITS)) {}

  template <typename T, typename Place>
  __device__ __forceinline__ void run(T* tile, Place place_of, int there) const {
    if (AT_ONCE * UNITS < 32 && threadIdx.x % 32 >= AT_ONCE * UNITS) return;
    T* const to = unit_of<T, LINES>(tile, first, column);  // of a line that is a multiple of 8 further, as much further
    there = D % PANEL == 0 || column < D ? there - first : 0;
#pragma unroll
    for (int i = 0; i < LINES; i += READERS * AT_ONCE) {
      copy_16_bytes(to + i * PANEL, place_of(i), i < there ? 16 : 0);
    }
  }
};

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
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns, or of all
  float factor[2];              // by which what is summed up so far is multiplied

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

  // Of all columns. All of this thread's are in its own four lanes.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(0xffffffffu, sum[half], 1));
      sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(0xffffffffu, sum[half], 2));
    }
  }

  // Adds a later piece, whose factor is set too. Both are of all columns.
  __device__ __forceinline__ void add_piece(Softmax& piece, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float highest = fmaxf(top[half], piece.top[half]);
      const float base = highest == -INFINITY ? 0.0f : __fmul_rn(highest, scale);
      factor[half] = power_of_two(__fsub_rn(__fmul_rn(top[half], scale), base));
      piece.factor[half] = power_of_two(__fsub_rn(__fmul_rn(piece.top[half], scale), base));
      top[half] = highest;
      sum[half] = __fmaf_rn(sum[half], factor[half], __fmul_rn(piece.sum[half], piece.factor[half]));
    }
  }
};

// sum = sum · its factors + other · those of the other.
__device__ __forceinline__ void add_scaled(
    float (&sum)[4], const Softmax& own, const float4& other, const Softmax& others) {
  sum[0] = __fmaf_rn(other.x, others.factor[0], __fmul_rn(sum[0], own.factor[0]));
  sum[1] = __fmaf_rn(other.y, others.factor[0], __fmul_rn(sum[1], own.factor[0]));
  sum[2] = __fmaf_rn(other.z, others.factor[1], __fmul_rn(sum[2], own.factor[1]));
  sum[3] = __fmaf_rn(other.w, others.factor[1], __fmul_rn(sum[3], own.factor[1]));
}

// The queries of a block: row0 and on of a key head's GROUP·W.
struct QueryTile {
  int row0, rows, first;  // of the rows, how many there are; the position of the first token
  int lowest, highest;    // positions of queries
  int begin, end;         // steps that any of them sees

  template <int GROUP>
  __device__ __forceinline__ static QueryTile of(int tile, int first, int W, int window) {
    const int row0 = tile * ROWS, lowest = first + row0 / GROUP;
    const int highest = first + (min(row0 + ROWS, GROUP * W) - 1) / GROUP;
    const int begin = window == 0 ? 0 : max(0, lowest - window + 1) / KEYS;
    return {row0, GROUP * W, first, lowest, highest, begin, highest / KEYS + 1};
  }

  // Of a thread, as fragments are laid out.
  __device__ __forceinline__ int row(int half) const {
    return row0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
  }
};

template <typename T>
struct __align__(4) Two {
  T x, y;
};

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, __fadd_rn(1.0f, power_of_two(__fmul_rn(x, -1.44269504f))));
}

template <int H, int HKV, int D, int N, typename T>
__device__ __forceinline__ void leave_queries(
    const QueryTile& tile,
    const float (&sum)[N][4],
    const Softmax& softmax,  // of all columns
    int head,
    int b,
    const T* gates,
    int W,
    T* out) {
  constexpr int GROUP = H / HKV;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = __fdiv_rn(1.0f, softmax.sum[half]);
    const int row = tile.row(half);
    if (row >= tile.rows) continue;
    const long long at = ((long long)b * W + row / GROUP) * H + head * GROUP + row % GROUP;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const int column = 8 * j + 2 * (threadIdx.x % 4);
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

// Where a thread keeps what it has of a block's pieces, side by side with the others of the block: its sum, and after
// it its softmax.
template <int D>
__device__ __forceinline__ long long part_of(int block) {
  return (long long)block * ((D / 8 + 1) * 32 * READERS) + threadIdx.x;
}

__device__ __forceinline__ float4 top_and_sum(const Softmax& softmax) {
  return {softmax.top[0], softmax.top[1], softmax.sum[0], softmax.sum[1]};
}

__device__ __forceinline__ Softmax softmax_of(const float4& kept) {
  Softmax softmax;
  softmax.top[0] = kept.x, softmax.top[1] = kept.y, softmax.sum[0] = kept.z, softmax.sum[1] = kept.w;
  return softmax;
}

// Queries `index`·ROWS and on of key head `head` of row b, by a block of 32·READERS threads: over all pieces, or over
// one of several blocks' pieces, for `add_pieces`.
template <int H, int HKV, int D, int PIECE, bool WARPGROUPS, typename T>
__device__ __forceinline__ void attend_prompt(
    unsigned char* shared,  // PROMPT_ATTENTION_BYTES<D>, at a multiple of 1024
    int index,
    int head,
    int b,
    int piece,          // of PIECE steps; or -1
    int block,          // among all
    const T* q,         // [B, H, W, D]
    const T* gates,     // [B, W, H, 2·D], the second half of each head; or null
    const T* keys,      // [B, HKV, S, D]
    const T* values,    // [B, HKV, S, D]
    const int* offset,  // [B], the position of the pass's first token
    float scale,        // times log2(e)
    int W,
    int S,
    int window,      // a query sees positions less than this before its own; 0: all
    T* out,          // [B, W, H, D]
    float* parts) {  // of all blocks, where there are several pieces
  constexpr int GROUP = H / HKV, STEP = PANELS<D> * PANEL * KEYS;
  T* const query_tile = reinterpret_cast<T*>(shared);
  T* const key_tiles = query_tile + PANELS<D> * PANEL * ROWS;
  T* const value_tiles = key_tiles + 2 * STEP;

  const QueryTile tile = QueryTile::of<GROUP>(index, offset[b], W, window);
  const int begin = max(tile.begin, piece * PIECE), end = piece < 0 ? tile.end : min(tile.end, (piece + 1) * PIECE);
  if (begin >= end) return;
  const LineCopy<D, KEYS> copy;
  const long long begins = (long long)(b * HKV + head) * S * D + copy.first * D + copy.column;

  auto copy_step = [&](T* tiles, const T* from, int step) {
    const T* const lines = from + begins + (long long)step * (KEYS * D);
    copy.run(tiles + step % 2 * STEP, [&](int i) { return lines + i * D; }, tile.highest + 1 - step * KEYS);
  };
  auto arrive = [] {  // all copies but those committed last
    wait_for_copies<1>();
    if constexpr (WARPGROUPS) show_to_tensor_cores();
    __syncthreads();
  };

  const int lane = threadIdx.x % 32;
  const int own[2] = {tile.first + tile.row(0) / GROUP, tile.first + tile.row(1) / GROUP};
  float scores[KEYS / 8][4], sum[PANELS<D> * PANEL / 8][4] = {};
  uint32_t p[KEYS / 16][4];
  Softmax softmax, all;

  auto add_scores = [&](int step) {
    const int key0 = step * KEYS;
    if (key0 + KEYS - 1 > tile.lowest || (window != 0 && tile.highest - key0 >= window)) {
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
  float4* const part = reinterpret_cast<float4*>(parts) + part_of<D>(block);
  auto leave_part = [&] {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) part[j * 32 * READERS] = {sum[j][0], sum[j][1], sum[j][2], sum[j][3]};
    part[D / 8 * 32 * READERS] = top_and_sum(softmax);
  };
  auto end_piece = [&](bool first) {  // adds what was left before
    softmax.add_lanes();
    if (first) return;
    Softmax all = softmax_of(part[D / 8 * 32 * READERS]);
    all.add_piece(softmax, scale);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) add_scaled(sum[j], softmax, part[j * 32 * READERS], all);
    softmax = all;
  };

  const LineCopy<D, ROWS> copy_queries;
  copy_queries.run(
      query_tile,
      [&](int i) {
        const int row = min(tile.row0 + copy_queries.first + i, tile.rows - 1);
        return q + ((long long)(b * H + head * GROUP + row % GROUP) * W + row / GROUP) * D + copy_queries.column;
      },
      tile.rows - tile.row0);
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
    if ((step + 1) % PIECE == 0) {  // this piece ends
      if constexpr (WARPGROUPS) {
        wait_for_products<0>();
        hold(sum);
      }
      end_piece(step / PIECE == begin / PIECE);
      leave_part();
#pragma unroll
      for (int j = 0; j < PANELS<D> * PANEL / 8; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
      softmax = Softmax();
    }
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

  end_piece(piece >= 0 || (end - 1) / PIECE == begin / PIECE);
  if (piece >= 0) {
    leave_part();
  } else {
    leave_queries<H, HKV, D>(tile, sum, softmax, head, b, gates, W, out);
  }
}

// What blocks left of their `pieces`, the last of which is the last that any query of any row sees.
template <int H, int HKV, int D, int PIECE, typename T>
__device__ __forceinline__ void add_pieces(
    int index,
    int head,
    int b,
    int block,  // that had the first piece of these queries
    int stride, // blocks to the next
    const float* parts,  // of `attend_prompt`
    const T* gates,
    const int* offset,
    float scale,
    int W,
    int window,
    T* out) {
  const QueryTile tile = QueryTile::of<H / HKV>(index, offset[b], W, window);
  float sum[D / 8][4] = {};
  Softmax all;
#pragma unroll 1
  for (int piece = tile.begin / PIECE; piece <= (tile.end - 1) / PIECE; ++piece) {
    const float4* const part = reinterpret_cast<const float4*>(parts) + part_of<D>(block + piece * stride);
    Softmax own = softmax_of(part[D / 8 * 32 * READERS]);
    all.add_piece(own, scale);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const float4 later = part[j * 32 * READERS], before = {sum[j][0], sum[j][1], sum[j][2], sum[j][3]};
      sum[j][0] = later.x, sum[j][1] = later.y, sum[j][2] = later.z, sum[j][3] = later.w;
      add_scaled(sum[j], own, before, all);
    }
  }
  leave_queries<H, HKV, D>(tile, sum, all, head, b, gates, W, out);
}

}  // namespace headstart
