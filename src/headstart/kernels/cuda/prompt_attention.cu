// Attention of a prompt's pass: many queries of each row over the keys and values before them and their own.
//
// A block has ROWS queries of one key head: query r of a row is head r % GROUP of token r / GROUP, so heads that share
// keys share tiles. It takes the keys in steps of KEYS at fixed positions, in ascending order, and keeps for every
// query the maximum, the sum of p = 2^(score - maximum) and Σ p·v. A step that a query does not see leaves all three
// as they are, so what a query gets does not depend on the width of the pass, its neighbours or the capacity.
// The scores of a step are computed while the values of the step before are added.
//
// Long texts are cut into pieces of as many steps, each computed from nothing, and added in ascending order: by the
// block, or, where there are too few blocks for the device, each by a block of its own and all by `add_pieces`. What a
// query gets is the same.

namespace headstart {

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
      float x = __fmul_rn(__fadd_rn(sum[j][2 * half], 0.0f), inverse);  // unseen values make 0 of -0
      float y = __fmul_rn(__fadd_rn(sum[j][2 * half + 1], 0.0f), inverse);
      if (gates != nullptr) {
        const Two<T> gate = *reinterpret_cast<const Two<T>*>(gates + at * 2 * D + D + column);
        x = __fmul_rn(x, sigmoid(static_cast<float>(gate.x)));
        y = __fmul_rn(y, sigmoid(static_cast<float>(gate.y)));
      }
      *reinterpret_cast<uint32_t*>(out + at * D + column) = pack<T>(x, y);
    }
  }
}

// Queries `index`·ROWS and on of key head `head` of row b, by a block of 32·READERS threads: over all pieces, or over
// one of several blocks' pieces, for `add_pieces`.
template <int H, int HKV, int D, int PIECE, bool WARPGROUPS, typename T>
__device__ __forceinline__ void attend_prompt(
    unsigned char* shared,  // at a multiple of 1024: panels of the queries, and of two steps of keys and values
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
  Softmax softmax;

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
