// y = x · wᵀ for a few rows of x, with w in 4 or 8 bits (affine, by groups) or in 16.
//
// A block owns TALL · 16 rows of w; its warps take turns along k, a chunk of CHUNK bytes of every row at a time, each
// through a ring of its own in shared memory. Tensor cores multiply 16 rows of w by 8 columns (rows of x), always
// all 8, the unused ones zero. So a column is summed in an order that depends on w's shape alone: by 16 within a
// unit, by units within a warp, then over the warps. Neither the number of columns nor their neighbours matter.
//
// Codes enter the tensor cores as exact integers of type T; scale and bias meet float32 sums, once a unit:
//   Σ (scale · code + bias) · x = scale · Σ code · x + bias · Σ x
// Σ x comes from a tensor core too, as a product with ones: it then lies where Σ code · x lies.

namespace headstart {

template <typename T>
struct Pair; // two ones, and the exponent that turns a code in the low bits into an exact number

template <>
struct Pair<__nv_bfloat16> {
  static constexpr uint32_t ONES = 0x3F803F80, EXPONENT = 0x43004300, MINUS_EXPONENT = 0xC300C300; // 128
};

template <>
struct Pair<__half> {
  static constexpr uint32_t ONES = 0x3C003C00, EXPONENT = 0x64006400, MINUS_EXPONENT = 0xE400E400; // 1024
};

// What is added to every code on its way into the tensor cores: taken back through the bias, in float32.
template <typename T, int BITS>
constexpr float OFFSET = 0;
template <>
constexpr float OFFSET<__nv_bfloat16, 4> = 128;

// The p-th pair of weights out of a lane's words. Which two stand together is what masks cost least: in 4 bits
// (0, 4), (1, 5), (2, 6), (3, 7) of every eight, in 8 bits (0, 2), (1, 3) of every four.
template <typename T, int BITS>
__device__ __forceinline__ uint32_t weight_pair(const uint32_t* words, int p) {
  if constexpr (BITS == 16) {
    return words[p];
  } else if constexpr (BITS == 4) {
    uint32_t codes = masked(words[p / 4] >> (4 * (p % 4)), 0x000F000F, Pair<T>::EXPONENT);
    return OFFSET<T, 4> ? codes : add_pairs<T>(codes, Pair<T>::MINUS_EXPONENT);
  } else {
    uint32_t codes = words[p / 2] >> (8 * (p % 2));
    if constexpr (cuda::std::is_same_v<T, __half>) {
      return add_pairs<T>(masked(codes, 0x00FF00FF, Pair<T>::EXPONENT), Pair<T>::MINUS_EXPONENT);
    } else {
      // bfloat16 holds 7 bits below its leading one. The eighth becomes 128 or 256, less 256.
      uint32_t low = masked(codes, 0x007F007F, Pair<T>::EXPONENT);
      uint32_t high = masked(codes, 0x00800080, Pair<T>::EXPONENT);
      return add_pairs<T>(low, add_pairs<T>(high, 0xC380C380));
    }
  }
}

// The same two positions out of a lane's activations, which are packed in their natural order.
template <int BITS>
__device__ __forceinline__ uint32_t activation_pair(const uint32_t* x, int p) {
  if constexpr (BITS == 16) {
    return x[p];
  } else {
    constexpr int APART = BITS == 4 ? 2 : 1; // words between the two
    const uint32_t* here = x + p / (2 * APART) * 2 * APART + p % (2 * APART) / 2;
    return p % 2 ? high_halves(here[0], here[APART]) : low_halves(here[0], here[APART]);
  }
}

// Where a row keeps its sixteen-byte pieces: turned by row, so that the lanes of a warp read from different banks.
template <int CHUNK>
__device__ __forceinline__ int place(int row, int byte) {
  int turn = (((row >> 1) & 1) << 1 | ((row >> 2) & 1)) & (CHUNK / 16 - 1);
  return row * CHUNK + (((byte >> 4) ^ turn) << 4) + (byte & 15);
}

template <typename T, int BITS, int GROUP, int CHUNK>
struct Layout {
  static constexpr int CODES = CHUNK * 8 / BITS; // positions along k that a chunk covers
  static constexpr int UNIT = BITS == 16 || GROUP < 64 ? 32 : 64; // positions that share a scale, summed together
  static constexpr int UNITS = CODES / UNIT;
  static constexpr int EACH = UNIT / 4; // positions of a unit that a lane holds
  static constexpr int WORDS = EACH * BITS / 32;
};

// One block's share: the rows of w from `first` on, by 8 · WIDE columns. Column c goes to row outputs(c) of y, nowhere
// if that is negative, and comes from row outputs(c) / share of x.
template <typename T, int BITS, int GROUP, int CHUNK, int TALL, int WIDE, int WARPS, int STAGES, typename Outputs>
__device__ __forceinline__ void product(
    const T* x, const void* w, const T* scales, const T* biases, T* y, int N, int K, int first, int share,
    Outputs outputs) {
  using S = Layout<T, BITS, GROUP, CHUNK>;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int chunks = K / S::CODES, groups = BITS == 16 ? 0 : K / GROUP;
  unsigned char* ring = dynamic_shared + warp * STAGES * TALL * 16 * CHUNK;

  // The scales of a block's rows stand together, and so do their biases: all of them come first.
  T* block_scales = reinterpret_cast<T*>(dynamic_shared + WARPS * STAGES * TALL * 16 * CHUNK);
  if constexpr (BITS < 16) {
    const int bytes = 2 * groups * min(16 * TALL, N - first);
    for (int at = 16 * threadIdx.x; at < bytes; at += 16 * 32 * WARPS) {
      char* to = reinterpret_cast<char*>(block_scales) + at;
      const long long from = 2ll * first * groups + at;
      copy_16_bytes(to, reinterpret_cast<const char*>(scales) + from, min(16, bytes - at));
      copy_16_bytes(to + 32 * TALL * groups, reinterpret_cast<const char*>(biases) + from, min(16, bytes - at));
    }
    commit_copies();
  }

  // Each lane copies the same pieces of every chunk.
  const char* pieces[TALL * CHUNK / 32];
#pragma unroll
  for (int i = 0; i < TALL * CHUNK / 32; i++) {
    int row = (lane + 32 * i) / (CHUNK / 16), byte = (lane + 32 * i) % (CHUNK / 16) * 16;
    pieces[i] = static_cast<const char*>(w) + (long long)min(first + row, N - 1) * (K / 8 * BITS) + byte;
  }
  auto fetch = [&](int chunk, unsigned char* stage) {
#pragma unroll
    for (int i = 0; i < TALL * CHUNK / 32; i++) {
      int row = (lane + 32 * i) / (CHUNK / 16), byte = (lane + 32 * i) % (CHUNK / 16) * 16;
      copy_16_bytes(stage + place<CHUNK>(row, byte), pieces[i] + chunk * CHUNK);
    }
  };

#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    if (warp + i * WARPS < chunks) fetch(warp + i * WARPS, ring + i * TALL * 16 * CHUNK);
    commit_copies();
  }

  const T* columns[WIDE];
#pragma unroll
  for (int c = 0; c < WIDE; c++) {
    int output = outputs(8 * c + group);
    columns[c] = output < 0 ? nullptr : x + (long long)(output / share) * K + quarter * S::EACH;
  }

  if (BITS < 16) {
    wait_for_copies<STAGES>();
    __syncthreads();
  }

  float total[TALL][WIDE][4] = {};
  int turn = 0;
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    unsigned char* stage = ring + turn * TALL * 16 * CHUNK;
    uint32_t activations[S::UNITS][WIDE][S::EACH / 2];
#pragma unroll
    for (int u = 0; u < S::UNITS; u++)
#pragma unroll
      for (int c = 0; c < WIDE; c++)
#pragma unroll
        for (int i = 0; i < S::EACH / 8; i++) {
          uint4 eight = {0, 0, 0, 0};
          if (columns[c])
            eight = *reinterpret_cast<const uint4*>(columns[c] + chunk * S::CODES + u * S::UNIT + 8 * i);
          uint32_t* to = activations[u][c] + 4 * i;
          to[0] = eight.x, to[1] = eight.y, to[2] = eight.z, to[3] = eight.w;
        }
    wait_for_copies<STAGES - 1>();
    __syncwarp();

#pragma unroll
    for (int u = 0; u < S::UNITS; u++) {
      float sum[TALL][WIDE][4] = {}, ones[WIDE][4] = {};
      uint32_t words[TALL][2][S::WORDS];
#pragma unroll
      for (int r = 0; r < TALL; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int row = 16 * r + 8 * h + group, byte = (u * S::UNIT + quarter * S::EACH) * BITS / 8;
          struct alignas(4 * S::WORDS) Words { uint32_t word[S::WORDS]; };
          Words read = *reinterpret_cast<const Words*>(stage + place<CHUNK>(row, byte));
#pragma unroll
          for (int i = 0; i < S::WORDS; i++) words[r][h][i] = read.word[i];
        }
#pragma unroll
      for (int p = 0; p < S::EACH / 2; p += 2) {
        uint32_t b[WIDE][2];
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
          b[c][0] = activation_pair<BITS>(activations[u][c], p);
          b[c][1] = activation_pair<BITS>(activations[u][c], p + 1);
          if (BITS < 16) multiply<T>(ones[c], {Pair<T>::ONES, Pair<T>::ONES, Pair<T>::ONES, Pair<T>::ONES}, b[c]);
        }
#pragma unroll
        for (int r = 0; r < TALL; r++) {
          uint32_t a[4] = {
              weight_pair<T, BITS>(words[r][0], p), weight_pair<T, BITS>(words[r][1], p),
              weight_pair<T, BITS>(words[r][0], p + 1), weight_pair<T, BITS>(words[r][1], p + 1)};
#pragma unroll
          for (int c = 0; c < WIDE; c++) multiply<T>(BITS == 16 ? total[r][c] : sum[r][c], a, b[c]);
        }
      }
      if constexpr (BITS < 16) {
#pragma unroll
        for (int r = 0; r < TALL; r++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int at = (16 * r + 8 * h + group) * groups + (chunk * S::CODES + u * S::UNIT) / GROUP;
            float scale = block_scales[at], bias = block_scales[at + 16 * TALL * groups];
            bias -= OFFSET<T, BITS> * scale;
#pragma unroll
            for (int c = 0; c < WIDE; c++)
#pragma unroll
              for (int i = 2 * h; i < 2 * h + 2; i++)
                total[r][c][i] = fmaf(scale, sum[r][c][i], fmaf(bias, ones[c][i], total[r][c][i]));
          }
      }
    }
    __syncwarp();
    if (chunk + STAGES * WARPS < chunks) fetch(chunk + STAGES * WARPS, stage);
    commit_copies();
    turn = turn + 1 == STAGES ? 0 : turn + 1;
  }

  // The warps' sums meet in shared memory and are added in the order of the warps.
  __syncthreads();
  float* sums = reinterpret_cast<float*>(dynamic_shared);
#pragma unroll
  for (int r = 0; r < TALL; r++)
#pragma unroll
    for (int c = 0; c < WIDE; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[(((warp * TALL + r) * WIDE + c) * 4 + i) * 32 + lane] = total[r][c][i];
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < TALL * WIDE * 128; at += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i * TALL * WIDE * 128 + at];
    int i = at / 32 % 4, c = at / 128 % WIDE, r = at / (128 * WIDE);
    int row = first + 16 * r + i / 2 * 8 + group, output = outputs(8 * c + 2 * quarter + i % 2);
    if (row < N && output >= 0) y[(long long)output * N + row] = T(sum);
  }
}

} // namespace headstart
