// y = x · wᵀ for a few rows of x, with w in 4 or 8 bits (affine, by groups) or in 16.
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
// Codes enter the tensor cores as they are. In the low eight bits of a bfloat16 a code is the number code · 2⁻¹³³: the
// numbers below the first power of two and those after it stand equally far apart. (Of a float16, the low eleven bits;
// 2⁻²⁴.) Scale and bias meet float32 sums, once a unit:
//   Σ (scale · code + bias) · x = scale · Σ code · x + bias · Σ x
// Σ x comes from a tensor core too, as a product with codes that are 1: it then lies where Σ code · x lies, and is as
// small. The power of two goes when a row is complete.

namespace headstart {

// What codes are multiplied by when they are taken for numbers of type T, and what activations are multiplied by so that
// products are not too small for a float32. Of activations of 2⁶⁸ and more nothing is left.
template <typename T>
constexpr bool WIDE_EXPONENT = cuda::std::is_same_v<T, __nv_bfloat16>;
template <typename T, int BITS>
constexpr float UNSCALE = BITS == 16 ? 1.0f : WIDE_EXPONENT<T> ? 0x1p73f : 0x1p24f;

// Whether the second of two pairs in 4 bits stays where it is, four bits higher: its activations are a sixteenth then.
template <typename T, int BITS>
constexpr bool HIGH_PAIRS = BITS == 4 && WIDE_EXPONENT<T>;

// The p-th pair of weights out of a lane's words. Which two stand together is what masks cost least: in 4 bits
// (0, 4), (1, 5), (2, 6), (3, 7) of every eight, in 8 bits (0, 2), (1, 3) of every four.
template <typename T, int BITS>
__device__ __forceinline__ uint32_t weight_pair(const uint32_t* words, int p) {
  if constexpr (BITS == 16)
    return words[p];
  else if constexpr (BITS == 8)
    return words[p / 2] >> (8 * (p % 2)) & 0x00FF00FF;
  else if constexpr (HIGH_PAIRS<T, BITS>)
    return words[p / 4] >> (8 * (p % 4 / 2)) & (p % 2 ? 0x00F000F0 : 0x000F000F);
  else
    return words[p / 4] >> (4 * (p % 4)) & 0x000F000F;
}

// Two codes that are 1, as `weight_pair` finds them.
template <typename T, int BITS>
__device__ __forceinline__ uint32_t pair_of_ones(int p) {
  return HIGH_PAIRS<T, BITS> && p % 2 ? 0x00100010 : 0x00010001;
}

// The same two positions out of a lane's activations, which are packed in their natural order, or `Ready`.
template <typename T, int BITS, bool READY>
__device__ __forceinline__ uint32_t activation_pair(const uint32_t* x, int p) {
  if constexpr (BITS == 16 || READY) {
    return x[p];
  } else {
    constexpr int APART = BITS == 4 ? 2 : 1; // words between the two
    const uint32_t* here = x + p / (2 * APART) * 2 * APART + p % (2 * APART) / 2;
    const uint32_t pair = p % 2 ? high_halves(here[0], here[APART]) : low_halves(here[0], here[APART]);
    if constexpr (!WIDE_EXPONENT<T>) return pair;
    return multiply_pairs<T>(pair, HIGH_PAIRS<T, BITS> && p % 2 ? 0x5B805B80 : 0x5D805D80); // 2⁵⁶, 2⁶⁰
  }
}

// COUNT elements of type E in one read.
template <int COUNT, typename E>
struct alignas(COUNT * sizeof(E)) Several {
  E at[COUNT];
  __device__ __forceinline__ static Several read(const void* from) { return *static_cast<const Several*>(from); }
};

// The i-th of COUNT numbers.
template <int COUNT, typename T>
__device__ __forceinline__ float number_at(const Several<COUNT, T>& numbers, int i) {
  if constexpr (COUNT % 2 == 0 && WIDE_EXPONENT<T>) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(numbers.at)[i / 2];
    return __int_as_float(i % 2 ? word & 0xFFFF0000 : word << 16);
  }
  return float(numbers.at[i]);
}

// Where a row keeps its sixteen-byte pieces: turned by row, so that the lanes of a warp read from different banks.
template <int CHUNK>
__device__ __forceinline__ int place(int row, int byte) {
  int turn = ((row & 1) << 2 | (row & 2) | ((row >> 2) & 1)) & (CHUNK / 16 - 1);
  return row * CHUNK + (((byte >> 4) ^ turn) << 4) + (byte & 15);
}

template <typename T, int BITS, int GROUP, int CHUNK>
struct Layout {
  static constexpr int CODES = CHUNK * 8 / BITS; // positions along k that a chunk covers
  static constexpr int UNIT = BITS == 16 || GROUP < 64 ? 32 : 64; // positions that share a scale, summed together
  static constexpr int UNITS = CODES / UNIT;
  static constexpr int EACH = UNIT / 4; // positions of a unit that a lane holds
  static constexpr int WORDS = EACH * BITS / 32;
  static constexpr int SCALES = BITS < 16 && CODES > GROUP ? CODES / GROUP : 1; // that a row needs for a chunk
};

// A unit of TALL · 16 rows by WIDE · 8 columns, added to `total`. `words`: of rows 16r + group and + 8, with scales
// and biases; `pairs`: of column 8c + group.
template <typename T, int BITS, int TALL, int WIDE, typename S>
__device__ __forceinline__ void add_unit(
    float (&total)[TALL][WIDE][4], const Several<S::WORDS, uint32_t> (&words)[TALL][2],
    const uint32_t (&pairs)[WIDE][S::EACH / 2], const float (&scales)[TALL][2], const float (&biases)[TALL][2]) {
  float sum[TALL][WIDE][4] = {}, ones[WIDE][4] = {};
#pragma unroll
  for (int p = 0; p < S::EACH / 2; p += 2) {
    uint32_t b[WIDE][2];
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
      b[c][0] = pairs[c][p], b[c][1] = pairs[c][p + 1];
      const uint32_t even = pair_of_ones<T, BITS>(p), odd = pair_of_ones<T, BITS>(p + 1);
      if (BITS < 16) multiply<T>(ones[c], {even, even, odd, odd}, b[c]);
    }
#pragma unroll
    for (int r = 0; r < TALL; r++) {
      uint32_t a[4] = {
          weight_pair<T, BITS>(words[r][0].at, p), weight_pair<T, BITS>(words[r][1].at, p),
          weight_pair<T, BITS>(words[r][0].at, p + 1), weight_pair<T, BITS>(words[r][1].at, p + 1)};
#pragma unroll
      for (int c = 0; c < WIDE; c++) multiply<T>(BITS == 16 ? total[r][c] : sum[r][c], a, b[c]);
    }
  }
  if constexpr (BITS < 16) {
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < WIDE; c++)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; i++)
            total[r][c][i] = fmaf(scales[r][h], sum[r][c][i], fmaf(biases[r][h], ones[c][i], total[r][c][i]));
  }
}

// Tiles team.index, + team.count, … of `tiles`; tile t is of choose(t). Its column c goes to row outputs(t, c) of y,
// nowhere if that is negative, and comes from row outputs(t, c) / share of x; MOVES: from other rows in other tiles.
// WHOLE: every tile has all of its rows. STREAMS: see `copy_16_bytes`. No slice has fewer chunks in AHEAD tiles than
// there are STAGES: scales are fetched AHEAD tiles before they are needed. What others write to x may be read after
// `ready`.
template <
    typename T, int BITS, int GROUP, int CHUNK, int SLICES, int TALL, int WIDE, int STAGES, int AHEAD, bool MOVES,
    bool WHOLE, bool STREAMS, typename X, typename Choose, typename Outputs, typename Awaited>
__device__ __forceinline__ void product(
    const Team& team, unsigned char* shared, const X* x, int K, int tiles, int share, Choose choose, Outputs outputs,
    Awaited ready) {
  constexpr bool READY = !cuda::std::is_same_v<X, T>;
  static_assert(!READY || HIGH_PAIRS<T, BITS>);
  using S = Layout<T, BITS, GROUP, CHUNK>;
  constexpr int STAGE = TALL * 16 * CHUNK, PIECES = TALL * CHUNK / 32, SUMS = TALL * WIDE * 128;
  static_assert(STAGE % 512 == 0);
  const int lane = team.thread % 32, slice = team.thread / 32, group = lane / 4, quarter = lane % 4;
  const int chunks = K / S::CODES, groups = BITS == 16 ? 0 : K / GROUP;
  const int begin = slice * chunks / SLICES, end = (slice + 1) * chunks / SLICES;
  unsigned char* ring = shared + slice * STAGES * STAGE;
  float* all_sums = reinterpret_cast<float*>(shared + SLICES * STAGES * STAGE); // of this tile, the next
  T* all_scales = reinterpret_cast<T*>(all_sums + 2 * SLICES * SUMS); // scales and biases of this tile and AHEAD more
  const int scales_each = 32 * TALL * groups;

  // The first of a tile's r-th sixteen rows, and of which matrix: of a gate's tile the second half is `up`'s.
  auto sixteen = [](const auto& part, int r) {
    return part.first + 16 * (part.up && 2 * r >= TALL ? r - TALL / 2 : r);
  };
  auto is_up = [](const auto& part, int r) { return part.up && 2 * r >= TALL; };

  // The scales of sixteen rows stand together, and so do their biases: the whole team copies them, first all scales.
  auto fetch_scales = [&](int tile, T* to) {
    if (BITS == 16 || tile >= tiles) return;
    const auto part = choose(tile);
    const int each = 2 * groups; // pieces that sixteen rows have
#pragma unroll 1 // here and below: code has to be read too, by a layer's kernel only once
    for (int i = team.thread; i < 2 * TALL * each; i += 32 * SLICES) {
      const int r = i / each % TALL, row = sixteen(part, r), at = row * groups + i % each * 8;
      const T* from = i < TALL * each ? (is_up(part, r) ? part.up_scales : part.scales)
                                      : (is_up(part, r) ? part.up_biases : part.biases);
      const int there = WHOLE ? 16 : min(16, 2 * (part.N * groups - at));
      if (WHOLE || there > 0) copy_16_bytes(to + 8 * i, from + at, there);
    }
  };

  // A lane copies the same pieces of every chunk: of every ROWS-th row, beginning with its own.
  constexpr int ROWS = 512 / CHUNK;
  const int put = place<CHUNK>(lane / (CHUNK / 16), lane % (CHUNK / 16) * 16), row_bytes = K / 8 * BITS;
  const char* from[TALL]; // this lane's first piece of the next chunk, in every sixteen rows
  int rows[TALL]; // of these, counted from the lane's own
  int fetched = team.index, left = end - begin; // the tile that is fetched, and how many of its chunks are to come
  auto aim = [&] {
    if (fetched >= tiles) return;
    const auto part = choose(fetched);
#pragma unroll
    for (int r = 0; r < TALL; r++) {
      const int row = sixteen(part, r) + lane / (CHUNK / 16);
      from[r] = static_cast<const char*>(is_up(part, r) ? part.up : part.w) + (long long)row * row_bytes +
                begin * CHUNK + lane % (CHUNK / 16) * 16;
      rows[r] = part.N - row;
    }
  };
  auto fetch = [&](unsigned char* stage) {
    if (fetched < tiles) {
      // As `place` says. Stages begin at multiples of 512, so no sum is needed: that could be one of a register and a
      // uniform register, which NVRTC 13.0 miscompiles (`has_uniform_copies` in compiler.py).
      const auto even = offset_address(stage, put), odd = offset_address(stage, ROWS == 4 ? put ^ 16 : put);
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const int r = ROWS * i / 16, row = ROWS * i % 16;
        if (WHOLE || row < rows[r])
          copy_16_bytes<STREAMS>((i % 2 ? odd : even) + 512 * i, from[r] + (long long)row * row_bytes);
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

  const int mine = place<CHUNK>(group, quarter * S::EACH * BITS / 8);
  int turn = 0, odd = 0, at_scales = 0;
#pragma unroll 1
  for (int tile = team.index; tile < tiles; tile += team.count, odd ^= 1) {
    const T* tile_scales = all_scales + at_scales * scales_each;
    fetch_scales(tile + AHEAD * team.count, all_scales + (at_scales ? at_scales - 1 : AHEAD) * scales_each);
    at_scales = at_scales == AHEAD ? 0 : at_scales + 1;
    float total[TALL][WIDE][4] = {};
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) {
      unsigned char* stage = ring + turn * STAGE;
      const int following = chunk + 1 == end ? begin : chunk + 1; // of the next tile
      wait_for_copies<STAGES - 1>();
      __syncwarp();
      Several<S::SCALES, T> scales[TALL][2], biases[TALL][2];
#pragma unroll
      for (int r = 0; r < TALL * 2 && BITS < 16; r++) {
        const T* at = tile_scales + (8 * r + group) * groups + chunk * S::CODES / GROUP;
        scales[r / 2][r % 2] = Several<S::SCALES, T>::read(at);
        biases[r / 2][r % 2] = Several<S::SCALES, T>::read(at + 16 * TALL * groups);
      }
#pragma unroll
      for (int u = 0; u < S::UNITS; u++) {
        uint32_t pairs[WIDE][S::EACH / 2];
#pragma unroll
        for (int i = 0; i < WIDE * S::EACH / 2; i++)
          pairs[i / (S::EACH / 2)][i % (S::EACH / 2)] =
              activation_pair<T, BITS, READY>(coming[u % SOON][i / (S::EACH / 2)], i % (S::EACH / 2));
        if (MOVES && u + SOON == S::UNITS && chunk + 1 == end) aim_columns(tile + team.count);
        if (u + SOON < S::UNITS)
          read_columns(chunk, u + SOON);
        else
          read_columns(following, u + SOON - S::UNITS);
        Several<S::WORDS, uint32_t> words[TALL][2];
        float unit_scales[TALL][2], unit_biases[TALL][2];
#pragma unroll
        for (int r = 0; r < TALL * 2; r++) {
          int at = (mine ^ (u * S::UNIT * BITS / 8)) + 8 * CHUNK * r; // as `place` says
          words[r / 2][r % 2] = Several<S::WORDS, uint32_t>::read(stage + at);
          if (BITS == 16) continue;
          unit_scales[r / 2][r % 2] = number_at(scales[r / 2][r % 2], u * S::SCALES / S::UNITS);
          unit_biases[r / 2][r % 2] = number_at(biases[r / 2][r % 2], u * S::SCALES / S::UNITS);
        }
        add_unit<T, BITS, TALL, WIDE, S>(total, words, pairs, unit_scales, unit_biases);
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
    auto sum_of = [&](int at) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SLICES; i++) sum += sums[i * SUMS + at];
      return sum * UNSCALE<T, BITS>;
    };
#pragma unroll 1
    for (int at = team.thread; at < (part.up ? SUMS / 2 : SUMS); at += SLICES * 32) {
      int i = at / 32 % 4, c = at / 128 % WIDE, r = at / (128 * WIDE);
      int row = part.first + 16 * r + i / 2 * 8 + group, output = outputs(tile, 8 * c + 2 * quarter + i % 2);
      if (row >= part.N || output < 0) continue;
      const long long to = (long long)output * part.N + row;
      const T made = part.up ? swiglu<T>(sum_of(at), sum_of(at + SUMS / 2)) : T(sum_of(at));
      leave(part.y, to, part.residual ? T(float(part.residual[to]) + float(made)) : made);
    }
  }
}

} // namespace headstart
