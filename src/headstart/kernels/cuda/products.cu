// y = x · wᵀ for a few rows of x, with w in any mode that codes.cu reads, or in 16 bits.
//
// Tensor cores multiply 16 rows of w by 8 columns (rows of x), always all 8, some unused. A row of w is cut
// into SLICES along k, a slice into chunks of CHUNK bytes, a chunk into units. A column is summed by 16 within a unit,
// by units within a slice, then over the slices: an order that depends on w's shape alone. Neither the number of
// columns nor their neighbours matter, nor the height of a tile.
//
// A team has a warp for every slice, and takes one tile of TALL · 16 rows of w after another. Each warp reads its slice
// through a ring of its own in shared memory, always STAGES chunks ahead, into the next tile too: so the memory has
// work all the time, while a tile begins and while its slices are added. The first chunks are under way before the
// activations are waited for.

namespace headstart {

// Tiles team.index, + team.count, … of `tiles`; tile t is of choose(t). Its column c goes to row outputs(t, c) of y,
// nowhere if that is negative, and comes from row outputs(t, c) / share of x; MOVES: from other rows in other tiles.
// WHOLE: every tile has all of its rows. STREAMS: see `copy_16_bytes`. No slice has fewer chunks in AHEAD tiles than
// there are STAGES: scales are fetched AHEAD tiles before they are needed. What others write to x may be read after
// `ready`.
template <
    typename T, typename F, int CHUNK, int SLICES, int TALL, int WIDE, int STAGES, int AHEAD, bool MOVES, bool WHOLE,
    bool STREAMS, typename X, typename Choose, typename Outputs, typename Awaited>
__device__ __forceinline__ void product(
    const Team& team, unsigned char* shared, const X* x, int K, int tiles, int share, Choose choose, Outputs outputs,
    Awaited ready) {
  constexpr bool READY = !cuda::std::is_same_v<X, T>;
  static_assert(!READY || (F::MODE == AFFINE && F::BITS == 4 && WIDE_EXPONENT<T>));
  using S = Layout<F, CHUNK>;
  using Scale = typename F::Scale;
  constexpr int STAGE = TALL * 16 * S::PITCH, PIECES = TALL * CHUNK / 32, SUMS = TALL * WIDE * 128;
  static_assert(STAGE % (S::TURNED ? 512 : 16) == 0);
  const int lane = team.thread % 32, slice = team.thread / 32, group = lane / 4, quarter = lane % 4;
  const int chunks = K / S::CODES, groups = F::QUANTISED ? K / F::GROUP : 0;
  const int begin = slice * chunks / SLICES, end = (slice + 1) * chunks / SLICES;
  unsigned char* ring = shared + slice * STAGES * STAGE;
  float* all_sums = reinterpret_cast<float*>(shared + SLICES * STAGES * STAGE); // of this tile, the next
  Scale* all_scales = reinterpret_cast<Scale*>(all_sums + 2 * SLICES * SUMS); // scales and biases of this tile and AHEAD more
  const int scales_each = (F::HAS_BIASES ? 32 : 16) * TALL * groups;

  // The first of a tile's r-th sixteen rows, and of which matrix: of a gate's tile the second half is `up`'s.
  auto sixteen = [](const auto& part, int r) {
    return part.first + 16 * (part.up && 2 * r >= TALL ? r - TALL / 2 : r);
  };
  auto is_up = [](const auto& part, int r) { return part.up && 2 * r >= TALL; };

  // The scales of sixteen rows stand together, and so do their biases: the whole team copies them, first all scales.
  auto fetch_scales = [&](int tile, Scale* to) {
    if (!F::QUANTISED || tile >= tiles) return;
    const auto part = choose(tile);
    constexpr int PIECE = 16 / sizeof(Scale);
    const int each = 16 * groups / PIECE; // pieces that sixteen rows have
#pragma unroll 1 // here and below: code has to be read too, by a layer's kernel only once
    for (int i = team.thread; i < (F::HAS_BIASES ? 2 : 1) * TALL * each; i += 32 * SLICES) {
      const int r = i / each % TALL, row = sixteen(part, r), at = row * groups + i % each * PIECE;
      const void* from = i < TALL * each ? (is_up(part, r) ? part.up_scales : part.scales)
                                         : (is_up(part, r) ? part.up_biases : part.biases);
      const int there = WHOLE ? 16 : min(16, int(sizeof(Scale)) * (part.N * groups - at));
      if (WHOLE || there > 0) copy_16_bytes(to + PIECE * i, static_cast<const Scale*>(from) + at, there);
    }
  };

  // A lane copies the same pieces of every chunk: of every ROWS-th row, beginning with its own.
  constexpr int ROWS = 32 / S::LANES;
  const int own_row = lane / S::LANES, own_piece = lane % S::LANES, row_bytes = K / 8 * F::BITS;
  const int put = S::TURNED ? place<CHUNK>(own_row, own_piece * 16) : own_row * S::PITCH + own_piece * 16;
  const char* from[TALL]; // this lane's first piece of the next chunk, in every sixteen rows
  int rows[TALL]; // of these, counted from the lane's own
  int fetched = team.index, left = end - begin; // the tile that is fetched, and how many of its chunks are to come
  auto aim = [&] {
    if (fetched >= tiles) return;
    const auto part = choose(fetched);
#pragma unroll
    for (int r = 0; r < TALL; r++) {
      const int row = sixteen(part, r) + own_row;
      from[r] = static_cast<const char*>(is_up(part, r) ? part.up : part.w) + (long long)row * row_bytes +
                begin * CHUNK + own_piece * 16;
      rows[r] = part.N - row;
    }
  };
  auto fetch = [&](unsigned char* stage) {
    if (fetched < tiles) {
      if constexpr (S::TURNED) {
        // As `place` says. Stages begin at multiples of 512, so no sum is needed: that could be one of a register and a
        // uniform register, which NVRTC 13.0 miscompiles (`has_uniform_copies` in compiler.py).
        const auto even = offset_address(stage, put), odd = offset_address(stage, ROWS == 4 ? put ^ 16 : put);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const int r = ROWS * i / 16, row = ROWS * i % 16;
          if (WHOLE || row < rows[r])
            copy_16_bytes<STREAMS>((i % 2 ? odd : even) + 512 * i, from[r] + (long long)row * row_bytes);
        }
      } else {
#pragma unroll
        for (int r = 0; r < TALL; r++)
#pragma unroll
          for (int piece = 0; piece < CHUNK / 16; piece += 2)
            if ((WHOLE || rows[r] > 0) && piece + own_piece < CHUNK / 16)
              copy_16_bytes<STREAMS>(
                  address_of(stage, put) + 16 * (r * S::PITCH + piece), from[r] + 16 * piece);
      }
#pragma unroll
      for (int r = 0; r < TALL; r++) from[r] += CHUNK;
      if (--left == 0) {
        left = end - begin, fetched += team.count;
        aim();
      }
    }
    commit_copies();
  };

#pragma unroll 1
  for (int i = 0; i < AHEAD; i++) fetch_scales(team.index + i * team.count, all_scales + i * scales_each);
  aim();
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) fetch(ring + i * STAGE);
  ready();

  const X* columns[WIDE];
  auto aim_columns = [&](int tile) {
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
      int output = tile < tiles ? outputs(tile, 8 * c + group) : -1;
      columns[c] = output < 0 ? nullptr : x + (long long)(output / share) * K + quarter * S::EACH;
    }
  };
  aim_columns(team.index);
  // Columns are read SOON units before they are multiplied. Those that are not there are anything: no other column
  // depends on them.
  constexpr int SOON = WIDE == 1 || S::UNITS == 1 ? S::UNITS : S::UNITS / 2;
  uint32_t coming[SOON][WIDE][S::EACH / 2] = {};
  auto read_columns = [&](int chunk, int unit) {
#pragma unroll
    for (int i = 0; i < WIDE * S::EACH / 8; i++) {
      int c = i / (S::EACH / 8), p = i % (S::EACH / 8) * 4;
      if (!columns[c]) continue;
      uint4 eight = *reinterpret_cast<const uint4*>(columns[c] + chunk * S::CODES + unit * S::UNIT + 2 * p);
      uint32_t* to = coming[unit % SOON][c] + p;
      to[0] = eight.x, to[1] = eight.y, to[2] = eight.z, to[3] = eight.w;
    }
  };
#pragma unroll
  for (int u = 0; u < SOON; u++) read_columns(begin, u);
  wait_for_copies<STAGES - 1>();
  team.sync();

  const int mine = S::place_of(group, quarter);
  int turn = 0, odd = 0, at_scales = 0;
#pragma unroll 1
  for (int tile = team.index; tile < tiles; tile += team.count, odd ^= 1) {
    const Scale* tile_scales = all_scales + at_scales * scales_each;
    fetch_scales(tile + AHEAD * team.count, all_scales + (at_scales ? at_scales - 1 : AHEAD) * scales_each);
    at_scales = at_scales == AHEAD ? 0 : at_scales + 1;
    float total[TALL][WIDE][4] = {};
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) {
      unsigned char* stage = ring + turn * STAGE;
      const int following = chunk + 1 == end ? begin : chunk + 1; // of the next tile
      wait_for_copies<STAGES - 1>();
      __syncwarp();
      Scales<F, S::SCALES> scales[TALL][2], biases[TALL][2];
#pragma unroll
      for (int r = 0; r < TALL * 2 && F::QUANTISED; r++) {
        const Scale* at = tile_scales + (8 * r + group) * groups + chunk * S::CODES / F::GROUP;
        scales[r / 2][r % 2].read(at);
        if (F::HAS_BIASES) biases[r / 2][r % 2].read(at + 16 * TALL * groups);
      }
#pragma unroll
      for (int u = 0; u < S::UNITS; u++) {
        uint32_t pairs[WIDE][S::EACH / 2];
#pragma unroll
        for (int i = 0; i < WIDE * S::EACH / 2; i++)
          pairs[i / (S::EACH / 2)][i % (S::EACH / 2)] =
              activation_pair<T, F, S::EACH, READY>(coming[u % SOON][i / (S::EACH / 2)], i % (S::EACH / 2));
        if (MOVES && u + SOON == S::UNITS && chunk + 1 == end) aim_columns(tile + team.count);
        if (u + SOON < S::UNITS)
          read_columns(chunk, u + SOON);
        else
          read_columns(following, u + SOON - S::UNITS);
        Several<S::WORDS, uint32_t> words[TALL][2];
        UnitScale<F> unit_scales[TALL][2];
        float unit_biases[TALL][2];
#pragma unroll
        for (int r = 0; r < TALL * 2; r++) {
          words[r / 2][r % 2] = read_codes<S>(stage + S::unit_at(mine, u) + 8 * S::PITCH * r, quarter);
          if (!F::QUANTISED) continue;
          unit_scales[r / 2][r % 2] = scales[r / 2][r % 2].template of_unit<T, S::UNITS>(u, quarter);
          if (F::HAS_BIASES) unit_biases[r / 2][r % 2] = biases[r / 2][r % 2].at(u * S::SCALES / S::UNITS);
        }
        add_unit<T, F, TALL, WIDE, S>(total, words, pairs, unit_scales, unit_biases);
      }
      __syncwarp();
      fetch(stage);
      turn = turn + 1 == STAGES ? 0 : turn + 1;
    }

    // The slices meet in shared memory and are added in their order. The next tile has other room for that, so one
    // barrier is enough; behind it the next tile's scales are there for all.
    float* sums = all_sums + odd * SLICES * SUMS;
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int c = 0; c < WIDE; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[(((slice * TALL + r) * WIDE + c) * 4 + i) * 32 + lane] = total[r][c][i];
    wait_for_copies<STAGES - 1>();
    team.sync();
    const auto part = choose(tile);
    auto sum_of = [&](int at, const float* whole) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SLICES; i++) sum += sums[i * SUMS + at];
      sum *= UNSCALE<T, F>;
      return F::WHOLE ? sum * __fdiv_rn(*whole, WHOLE_MOST) : sum;
    };
#pragma unroll 1
    for (int at = team.thread; at < (part.up ? SUMS / 2 : SUMS); at += SLICES * 32) {
      int i = at / 32 % 4, c = at / 128 % WIDE, r = at / (128 * WIDE);
      int row = part.first + 16 * r + i / 2 * 8 + group, output = outputs(tile, 8 * c + 2 * quarter + i % 2);
      if (row >= part.N || output < 0) continue;
      const long long to = (long long)output * part.N + row;
      const float sum = sum_of(at, part.whole);
      const T made = part.up ? swiglu<T>(sum, sum_of(at + SUMS / 2, part.up_whole)) : T(sum);
      leave(part.y, to, part.residual ? T(float(part.residual[to]) + float(made)) : made);
    }
  }
}

} // namespace headstart
