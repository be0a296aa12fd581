// Units of a product: what a lane reads of codes, scales and activations, and the sums of a unit. See products.cu.
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

}  // namespace headstart
