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
//
// Codes enter the tensor cores as codes.cu says. Scale and bias meet float32 sums, once a unit. Σ x comes from a tensor
// core too, as a product with codes that are 1: it then lies where Σ code · x lies, and is as small. The power of two
// goes when a row is complete.

namespace headstart {

// The same two positions as `code_pair`'s out of a lane's activations, which are packed in their natural order, or `Ready`.
template <typename T, typename F, int EACH, bool READY>
__device__ __forceinline__ uint32_t activation_pair(const uint32_t* x, int p) {
  if constexpr (!F::QUANTISED || READY) {
    return x[p];
  } else {
    constexpr int WORDS = APART<F, EACH>; // between the two
    const uint32_t* here = x + p / (2 * WORDS) * 2 * WORDS + p % (2 * WORDS) / 2;
    const uint32_t pair = p % 2 ? high_halves(here[0], here[WORDS]) : low_halves(here[0], here[WORDS]);
    const uint32_t scale = activation_scale<T, F>(p);
    return scale ? multiply_pairs<T>(pair, scale) : pair;
  }
}

// COUNT elements of type E in one read, if that is a power of two.
template <int COUNT, typename E>
struct alignas(COUNT & (COUNT - 1) ? alignof(E) : COUNT * sizeof(E)) Several {
  E at[COUNT];
  __device__ __forceinline__ static Several read(const void* from) { return *static_cast<const Several*>(from); }
};

// COUNT scales or biases of a row: bytes stay in words, which compilers would take apart.
template <typename F, int COUNT>
struct Scales {
  using Scale = typename F::Scale;
  static constexpr bool BYTES = sizeof(Scale) == 1;
  Several<BYTES ? (COUNT + 3) / 4 : COUNT, cuda::std::conditional_t<BYTES, uint32_t, Scale>> in;

  __device__ __forceinline__ void read(const Scale* from) {
    if constexpr (BYTES && COUNT == 1)
      in.at[0] = *from;
    else if constexpr (BYTES && COUNT == 2)
      in.at[0] = *reinterpret_cast<const unsigned short*>(from);
    else
      in = in.read(from);
  }

  // Number i in float32.
  __device__ __forceinline__ float at(int i) const {
    if constexpr (COUNT % 2 == 0 && cuda::std::is_same_v<Scale, __nv_bfloat16>) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(in.at)[i / 2];
      return __int_as_float(i % 2 ? word & 0xFFFF0000 : word << 16);
    } else if constexpr (F::MODE == MXFP) { // 2⁻¹²⁷ is 0 here: nothing would be left of its products
      const uint32_t word = in.at[i / 4];
      return __int_as_float((i % 4 < 3 ? word << (23 - 8 * (i % 4)) : word >> 1) & 0x7F800000);
    } else {
      return float(in.at[i]);
    }
  }

  // What a lane multiplies its row's sums or codes by in unit u of UNITS: of nvfp4 each lane has a group of its own.
  template <typename T, int UNITS>
  __device__ __forceinline__ UnitScale<F> of_unit(int u, int quarter) const {
    if constexpr (F::MODE == NVFP)
      return narrow_scales<T>(__byte_perm(in.at[u], 0, 0x0404 | quarter << 4 | quarter << 12));
    else
      return at(u * COUNT / UNITS);
  }
};

// Where a row keeps its sixteen-byte pieces: turned by row, so that the lanes of a warp read from different banks.
template <int CHUNK>
__device__ __forceinline__ int place(int row, int byte) {
  int turn = ((row & 1) << 2 | (row & 2) | ((row >> 2) & 1)) & (CHUNK / 16 - 1);
  return row * CHUNK + (((byte >> 4) ^ turn) << 4) + (byte & 15);
}

template <typename F, int CHUNK>
struct Layout {
  static constexpr int BITS = F::BITS, GROUP = F::GROUP;
  static constexpr int CODES = CHUNK * 8 / BITS; // positions along k that a chunk covers
  static constexpr int UNIT = F::MODE != NVFP && (!F::QUANTISED || GROUP < 64) ? 32 : 64; // positions that are summed
                                                                                          // together, by one scale
  static constexpr int UNITS = CODES / UNIT;
  static constexpr int EACH = UNIT / 4; // positions of a unit that a lane holds
  static constexpr int BYTES = EACH * BITS / 8, WORDS = (BYTES + 3) / 4;
  static constexpr int SCALES = F::QUANTISED && CODES > GROUP ? CODES / GROUP : 1; // that a row needs for a chunk
  // Chunks of other sizes than powers of two are not turned: their rows lie apart by an odd number of pieces instead.
  static constexpr bool TURNED = (CHUNK & (CHUNK - 1)) == 0 && CHUNK > 16;
  static constexpr int PITCH = TURNED || CHUNK / 16 % 2 ? CHUNK : CHUNK + 16;
  static constexpr int LANES = TURNED ? CHUNK / 16 : 2; // that copy a row

  // Where a lane begins to read; unit u is `unit_at` further.
  __device__ __forceinline__ static int place_of(int group, int quarter) {
    if constexpr (TURNED) return place<CHUNK>(group, quarter * BYTES);
    return group * PITCH + (BYTES < 3 ? quarter * BYTES : quarter * BYTES & ~3);
  }
  __device__ __forceinline__ static int unit_at(int mine, int u) {
    return TURNED ? mine ^ (u * UNIT * BITS / 8) : mine + u * UNIT * BITS / 8;
  }
};

// A lane's codes of a unit.
template <typename S>
__device__ __forceinline__ Several<S::WORDS, uint32_t> read_codes(const unsigned char* from, int quarter) {
  using Words = Several<S::WORDS, uint32_t>;
  if constexpr (S::BYTES == 1) {
    return {*from};
  } else if constexpr (S::BYTES == 2) {
    return {*reinterpret_cast<const unsigned short*>(from)};
  } else if constexpr ((S::WORDS & (S::WORDS - 1)) == 0 && S::BYTES % 4 == 0) {
    return Words::read(from);
  } else {
    Words words;
    const uint32_t* at = reinterpret_cast<const uint32_t*>(from);
    constexpr int READ = (S::BYTES + 6) / 4; // words that hold them wherever they begin
    uint32_t read[READ];
#pragma unroll
    for (int i = 0; i < READ; i++) read[i] = at[i];
#pragma unroll
    for (int i = 0; i < S::WORDS; i++)
      words.at[i] = S::BYTES % 4 ? __funnelshift_r(read[i], read[min(i + 1, READ - 1)], 8 * (quarter * S::BYTES & 3))
                                 : read[i];
    return words;
  }
}

// A unit of TALL · 16 rows by WIDE · 8 columns, added to `total`. `words`: of rows 16r + group and + 8, with scales
// and biases; `pairs`: of column 8c + group.
template <typename T, typename F, int TALL, int WIDE, typename S>
__device__ __forceinline__ void add_unit(
    float (&total)[TALL][WIDE][4], const Several<S::WORDS, uint32_t> (&words)[TALL][2],
    const uint32_t (&pairs)[WIDE][S::EACH / 2], const UnitScale<F> (&scales)[TALL][2], const float (&biases)[TALL][2]) {
  float sum[TALL][WIDE][4] = {}, ones[WIDE][4] = {};
  auto weights = [&](int r, int h, int p) {
    const uint32_t pair = code_pair<T, F, S::EACH>(words[r][h].at, p);
    if constexpr (F::QUANTISED && !F::SCALES_SUMS) return multiply_pairs<T>(pair, scales[r][h]);
    return pair;
  };
#pragma unroll
  for (int p = 0; p < S::EACH / 2; p += 2) {
    uint32_t b[WIDE][2];
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
      b[c][0] = pairs[c][p], b[c][1] = pairs[c][p + 1];
      const uint32_t even = pair_of_ones<T, F>(p), odd = pair_of_ones<T, F>(p + 1);
      if (F::HAS_BIASES) multiply<T>(ones[c], {even, even, odd, odd}, b[c]);
    }
#pragma unroll
    for (int r = 0; r < TALL; r++) {
      uint32_t a[4] = {weights(r, 0, p), weights(r, 1, p), weights(r, 0, p + 1), weights(r, 1, p + 1)};
#pragma unroll
      for (int c = 0; c < WIDE; c++) multiply<T>(F::SCALES_SUMS ? sum[r][c] : total[r][c], a, b[c]);
    }
  }
  if constexpr (F::SCALES_SUMS) {
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < WIDE; c++)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; i++) {
            const float biased = F::HAS_BIASES ? fmaf(biases[r][h], ones[c][i], total[r][c][i]) : total[r][c][i];
            total[r][c][i] = fmaf(scales[r][h], sum[r][c][i], biased);
          }
  }
}

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
