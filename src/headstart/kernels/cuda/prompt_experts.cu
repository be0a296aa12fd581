// Products of a prompt's rows with the experts they chose: y = x · wᵀ, the rows sorted by expert.
//
// A block takes up to TOKENS rows of x that chose the same expert, and of each of its WARPS 32 rows of the expert's
// weights; of a gate and its `up`, 16 of each. Tensor cores multiply 16 rows of weights by 8 of x. A warp dequantises
// its weights in registers, once for all rows of x, to what `mx.dequantize` makes of them.
//
// K is taken 64 positions at a time, a chunk, through a ring in shared memory. Of a row of weights, or of x, lanes
// 4g to 4g + 3 have 16 positions of a chunk each. A sum has one order: chunk by chunk, in a chunk first the first eight
// positions of every lane, then the others. It does not depend on how many rows a block takes, nor on which.
//
// Codes are taken for numbers as they are, two from one word by a mask: in the low bits of a bfloat16 a code is the
// number code · 2⁻¹³³, four bits higher 16 times that. So two codes that stand together are not neighbours, and x has
// the same order ("arranged"): of every eight elements in 4 bits 0 4 1 5 2 6 3 7, in 8 bits 0 2 1 3 4 6 5 7.

namespace headstart {

// Which element stands at a position of an input of weights in BITS.
template <int BITS>
__device__ __forceinline__ int arranged_element(int position) {
  if constexpr (BITS == 4) return (position & ~7) | (position & 6) >> 1 | (position & 1) << 2;
  if constexpr (BITS == 8) return (position & ~3) | (position & 2) >> 1 | (position & 1) << 1;
  return position;
}

template <int COUNT>
struct alignas(4 * COUNT) Words {
  uint32_t at[COUNT];
};

// Of scales: what begins at no multiple of four bytes is waited for.
template <int BYTES>
__device__ __forceinline__ void copy_piece(unsigned char* to, const void* from) {
  if constexpr (BYTES == 2)
    *reinterpret_cast<unsigned short*>(to) = *static_cast<const unsigned short*>(from);
  else
    copy_bytes<BYTES>(to, from);
}

template <typename W>
__device__ __forceinline__ W read_words(const unsigned char* from) {
  return *reinterpret_cast<const W*>(from);
}

// Sixteen codes, or weights: those of a lane in a row's chunk.
template <int BITS>
struct Codes {
  uint32_t words[(BITS + 1) / 2];

  __device__ __forceinline__ void read(const unsigned char* chunk, int row, int quarter) {
    const unsigned char* from = chunk + row * 8 * BITS + quarter * 2 * BITS;
    if constexpr (BITS == 16) { // the pieces of odd rows have changed places
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const auto piece = read_words<Words<4>>(from + 16 * (row & 1 ^ half));
#pragma unroll
        for (int i = 0; i < 4; i++) words[4 * half + i] = piece.at[i];
      }
    } else if constexpr (BITS % 2) {
#pragma unroll
      for (int i = 0; i < BITS; i++) {
        const uint32_t half = *reinterpret_cast<const unsigned short*>(from + 2 * i);
        words[i / 2] = i % 2 ? words[i / 2] | half << 16 : half;
      }
    } else {
      constexpr int EACH = BITS == 6 ? 1 : BITS / 2; // words in one read
#pragma unroll
      for (int i = 0; i < BITS / 2; i += EACH) {
        const auto some = read_words<Words<EACH>>(from + 4 * i);
#pragma unroll
        for (int j = 0; j < EACH; j++) words[i + j] = some.at[j];
      }
    }
  }

  __device__ __forceinline__ uint32_t code(int i) const {
    const int word = i * BITS / 32, shift = i * BITS % 32;
    const uint32_t low = words[word] >> shift;
    return (shift + BITS > 32 ? low | words[word + 1] << (32 - shift) : low) & ((1u << BITS) - 1);
  }

  // The p-th pair of a half's eight codes, as they are arranged; of 4-bit codes odd pairs stand four bits higher.
  __device__ __forceinline__ uint32_t pair(int half, int p) const {
    if constexpr (BITS == 16) return words[4 * half + p];
    if constexpr (BITS == 8) return words[2 * half + p / 2] >> (8 * (p % 2)) & 0x00FF00FF;
    if constexpr (BITS == 4) return words[half] >> (8 * (p / 2)) & (p % 2 ? 0x00F000F0 : 0x000F000F);
    return code(8 * half + 2 * p) | code(8 * half + 2 * p + 1) << 16;
  }
};

template <typename T>
constexpr bool IS_BFLOAT16 = cuda::std::is_same_v<T, __nv_bfloat16>;

// What a product's sums are multiplied by in the end.
template <typename T, int BITS>
constexpr float RESTORE = IS_BFLOAT16<T> && BITS < 16 ? 0x1p32f : 1.0f;

// scale · code + bias, rounded once. In bfloat16 codes are as small as they stand there, scales 2¹⁰¹ times as large and
// results 2⁻³² times; in float16, which has no such range, codes become whole numbers first.
template <typename T, int BITS>
struct Dequantiser {
  uint32_t scale, high_scale, bias; // twice each; the second for pairs that stand four bits higher

  __device__ __forceinline__ void read(const unsigned short* scale_at, const unsigned short* bias_at) {
    scale = *scale_at, bias = *bias_at;
    scale = low_halves(scale, scale), bias = low_halves(bias, bias);
    if constexpr (IS_BFLOAT16<T>) {
      high_scale = multiply_pairs<T>(scale, 0x70007000); // 2⁹⁷
      scale = multiply_pairs<T>(scale, 0x72007200); // 2¹⁰¹
      bias = multiply_pairs<T>(bias, 0x2F802F80); // 2⁻³²
    }
  }

  __device__ __forceinline__ uint32_t pair(const Codes<BITS>& codes, int half, int p) const {
    const bool high = BITS == 4 && p % 2;
    uint32_t pair = codes.pair(half, p);
    if constexpr (IS_BFLOAT16<T>) return fma_pairs<T>(pair, high ? high_scale : scale, bias);
    pair |= 0x64006400; // 1024 +
    pair = high ? fma_pairs<T>(pair, 0x2C002C00, 0xD400D400) : fma_pairs<T>(pair, 0x3C003C00, 0xE400E400);
    return fma_pairs<T>(pair, scale, bias);
  }
};

template <typename T>
__device__ __forceinline__ uint32_t pack(T a, T b) {
  return uint32_t(reinterpret_cast<unsigned short&>(b)) << 16 | reinterpret_cast<unsigned short&>(a);
}

// As `swiglu` in matrix.cu, with a quotient that is right to two units of its last place before it is rounded to T.
template <typename T>
__device__ __forceinline__ T quick_swiglu(float gate, float up) {
  gate = float(T(gate)), up = float(T(up));
  return T(__fdividef(gate, 1.0f + __expf(-gate)) * up);
}

// An expert's weights [N, K] and where they lie; with `up` it is a gate, and its product silu(gate) · up.
template <typename T>
struct Expert {
  const unsigned char *codes, *up_codes;
  const T *scales, *biases, *up_scales, *up_biases;
  int N, K;
};

// BITS, GROUP: of the weights. PIECE: bytes of scales that are copied at a time. GATED: the weights are a gate and `up`.
// ARRANGED: the bits of the weights whose input the product is, or 0.
template <typename T_, int BITS_, int GROUP_, int PIECE_, int WARPS_, int TOKENS_, int STAGES_, bool GATED_, int ARRANGED_>
struct PromptShape {
  using T = T_;
  static constexpr int BITS = BITS_, GROUP = GROUP_, PIECE = PIECE_, WARPS = WARPS_, TOKENS = TOKENS_, STAGES = STAGES_;
  static constexpr bool GATED = GATED_;
  static constexpr int THREADS = 32 * WARPS, OUTPUTS = GATED ? 16 : 32; // of a warp
  static constexpr int ROW = 8 * BITS, COPY = BITS % 2 ? 8 : 16, COPIES = ROW / COPY; // of a row's chunk of codes
  static constexpr int INPUTS = TOKENS * 128, WEIGHTS = WARPS * 32 * ROW; // bytes of a stage
  static constexpr int EACH = BITS < 16 ? PIECE / 2 * GROUP / 64 : 1; // chunks that a piece of scales is for
  static constexpr int SCALES = BITS < 16 ? 32 * PIECE : 0; // bytes of a warp's pieces of scales, and of biases
  static constexpr int PIECES = BITS < 16 ? 1 + (STAGES - 2 + EACH) / EACH : 0; // under way and in use
  static_assert(BITS == 16 || EACH > 0);

  // The output that row `row` of a warp's 32 makes, counted from the warp's first. After `transpose_matrix` a lane has
  // two neighbouring rows of every eight: together they are neighbouring outputs, in the order of the next product.
  __device__ __forceinline__ static int output_of(int row) {
    const int eight = GATED ? row / 8 % 2 : row / 8;
    return arranged_element<ARRANGED_>((GATED ? 4 : 8) * (row % 8 / 2) + 2 * eight + row % 2);
  }
};

// `count` rows of x, at most 8 · FRAGMENTS: row i is x[source(i)], its product y[target(i)]. The block's first output is
// `first`.
template <typename S, int FRAGMENTS, typename T, typename Source, typename Target>
__device__ __forceinline__ void prompt_tile(
    unsigned char* shared, const T* x, const Expert<T>& expert, T* y, int first, int count, Source source,
    Target target) {
  constexpr int BITS = S::BITS, STAGES = S::STAGES;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = lane / 4, quarter = lane % 4;
  const int K = expert.K, chunks = K / 64, groups = K / S::GROUP, row_bytes = K / 8 * BITS;
  unsigned char* inputs = shared;
  unsigned char* weights = shared + STAGES * S::INPUTS + warp * 32 * S::ROW;
  unsigned char* scales = shared + STAGES * (S::INPUTS + S::WEIGHTS) + warp * 2 * S::PIECES * S::SCALES;
  first += warp * S::OUTPUTS;
  const bool works = first < expert.N;

  // A lane copies the same pieces of every chunk of its warp's weights,
  const unsigned char* from[S::COPIES];
#pragma unroll
  for (int i = 0; i < S::COPIES; i++) {
    const int row = (lane + 32 * i) / S::COPIES, piece = (lane + 32 * i) % S::COPIES;
    from[i] = (S::GATED && row >= 16 ? expert.up_codes : expert.codes) +
              (long long)(first + S::output_of(row)) * row_bytes + piece * S::COPY;
  }
  // the scales of a row,
  const bool of_up = S::GATED && lane >= 16;
  const long long scales_at = (long long)(first + S::output_of(lane)) * groups;
  const T* scales_from = BITS < 16 ? (of_up ? expert.up_scales : expert.scales) + scales_at : nullptr;
  const T* biases_from = BITS < 16 ? (of_up ? expert.up_biases : expert.biases) + scales_at : nullptr;
  // and a thread those of every row of x that is THREADS / 8 after another.
  constexpr int APART = S::THREADS / 8, INPUTS_EACH = (8 * FRAGMENTS + APART - 1) / APART;
  unsigned rows[INPUTS_EACH]; // where they begin, in pieces
  const int put = thread / 8 * 128 + 16 * (thread % 8 ^ thread / 8 % 2);

  auto fetch_weights = [&](int chunk, int stage) {
    if (!works || chunk >= chunks) return;
#pragma unroll
    for (int i = 0; i < S::COPIES; i++) {
      const int at = (lane + 32 * i) * S::COPY, turn = BITS == 16 ? at / 128 % 2 * 16 : 0;
      copy_bytes<S::COPY>(weights + stage * S::WEIGHTS + (at ^ turn), from[i] + chunk * S::ROW);
    }
    if constexpr (BITS < 16) {
      if (chunk % S::EACH) return;
      const int piece = chunk / S::EACH;
      unsigned char* to = scales + 2 * (piece % S::PIECES) * S::SCALES + lane * S::PIECE;
      copy_piece<S::PIECE>(to, scales_from + piece * (S::PIECE / 2));
      copy_piece<S::PIECE>(to + S::SCALES, biases_from + piece * (S::PIECE / 2));
    }
  };
  auto fetch_inputs = [&](int chunk, int stage) {
    if (chunk >= chunks) return;
#pragma unroll
    for (int i = 0; i < INPUTS_EACH; i++)
      if (thread / 8 + i * APART < count)
        copy_16_bytes(inputs + stage * S::INPUTS + put + i * APART * 128, x + 8ll * (rows[i] + 8 * chunk));
  };

  // All weights of the first chunks are under way before it is known which rows of x these are.
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; stage++) fetch_weights(stage, stage);
#pragma unroll
  for (int i = 0; i < INPUTS_EACH; i++) {
    const int row = thread / 8 + i * APART;
    rows[i] = row < count ? unsigned(source(row)) * (K / 8) + thread % 8 : 0;
  }
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; stage++) fetch_inputs(stage, stage), commit_copies();

  float total[FRAGMENTS][2][4] = {};
  int stage = 0, ahead = STAGES - 1;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    fetch_inputs(chunk + STAGES - 1, ahead);
    fetch_weights(chunk + STAGES - 1, ahead);
    commit_copies();
    if (works) {
      Codes<BITS> codes[4]; // of rows 8r + group
      Dequantiser<T, BITS> dequantisers[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        codes[r].read(weights + stage * S::WEIGHTS, 8 * r + group, quarter);
        if constexpr (BITS < 16) {
          const int piece = chunk / S::EACH % S::PIECES, at = (chunk % S::EACH * 64 + 16 * quarter) / S::GROUP;
          const auto* piece_at = reinterpret_cast<const unsigned short*>(
              scales + 2 * piece * S::SCALES + (8 * r + group) * S::PIECE) + at;
          dequantisers[r].read(piece_at, piece_at + S::SCALES / 2);
        }
      }
      const unsigned char* columns = inputs + stage * S::INPUTS + group * 128 + 32 * quarter;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32_t a[2][2][4]; // of sixteen rows, sixteen positions
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
          for (int p = 0; p < 4; p++) {
            if constexpr (BITS == 16)
              a[r / 2][p / 2][p % 2 * 2 + r % 2] = codes[r].pair(half, p);
            else
              a[r / 2][p / 2][p % 2 * 2 + r % 2] = dequantisers[r].pair(codes[r], half, p);
          }
        constexpr int TOGETHER = FRAGMENTS % 4 || FRAGMENTS > 8 ? 2 : 4; // whose products do not wait for one another
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f += TOGETHER) {
          Words<4> b[TOGETHER];
#pragma unroll
          for (int i = 0; i < TOGETHER; i++)
            b[i] = read_words<Words<4>>(columns + (f + i) * 1024 + 16 * (group & 1 ^ half));
#pragma unroll
          for (int step = 0; step < 2; step++)
#pragma unroll
            for (int i = 0; i < TOGETHER; i++)
#pragma unroll
              for (int m = 0; m < 2; m++)
                multiply<T>(total[f + i][m], a[m][step], {b[i].at[2 * step], b[i].at[2 * step + 1]});
        }
      }
    }
    ahead = stage, stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  if (!works) return;

#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    constexpr int COUNT = S::GATED ? 2 : 4; // eights of outputs
    Words<COUNT> made;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      T two[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float sum = total[f][S::GATED ? 0 : i / 2][i % 2 * 2 + e] * RESTORE<T, BITS>;
        two[e] = S::GATED ? quick_swiglu<T>(sum, total[f][1][i * 2 % 4 + e] * RESTORE<T, BITS>) : T(sum);
      }
      made.at[i] = transpose_matrix(pack(two[0], two[1]));
    }
    const int row = 8 * f + group;
    if (row < count)
      *reinterpret_cast<Words<COUNT>*>(y + (long long)target(row) * expert.N + first + 2 * COUNT * quarter) = made;
  }
}

// By the number of rows, in sixteens.
template <typename S, int FRAGMENTS, typename... Given>
__device__ __forceinline__ void prompt_tile_of(int count, Given... given) {
  if (count > 8 * FRAGMENTS - 16 || FRAGMENTS == 2)
    prompt_tile<S, FRAGMENTS>(given...);
  else if constexpr (FRAGMENTS > 2)
    prompt_tile_of<S, FRAGMENTS - 2>(count, given...);
}

} // namespace headstart
