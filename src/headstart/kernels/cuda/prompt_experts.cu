// Products of a prompt's rows with the experts they chose: y = x · wᵀ, the rows sorted by expert.
//
// A block takes up to TOKENS rows of x that chose the same expert, and of each of its WARPS 32 rows of the expert's
// weights; of a gate and its `up`, 16 of each. Tensor cores multiply 16 rows of weights by 8 of x. A warp dequantises
// its weights in registers, once for all rows of x, to what `mx.dequantize` makes of them.
//
// K is taken 64 positions at a time, a chunk, through a ring in shared memory. Of a row of weights lanes 4g to 4g + 3
// have 16 codes of a chunk each, one after the other: they are the two columns that each lane has of its fragments of
// four products. So pair p of lane q's is pair 4p + q of a chunk for x, which is "arranged". A sum has one order, chunk
// by chunk and product by product: it does not depend on how many rows a block takes, nor on which.

namespace headstart {

// Which element stands at a position of an input of weights in BITS.
template <int BITS>
__device__ __forceinline__ int arranged_element(int position) {
  if (BITS == 0 || BITS == 16) return position;
  const int pair = position % 64 / 8, second = position % 2, chunk = position & ~63, lane = position / 2 % 4;
  const int element = BITS == 4   ? (pair & 4) * 2 + pair % 4 + 4 * second
                      : BITS == 8 ? (pair & 6) * 2 + pair % 2 + 2 * second
                                  : 2 * pair + second;
  return chunk + 16 * lane + element;
}

// silu(gate) · up, not rounded to a shorter type before.
__device__ __forceinline__ float wide_swiglu(float gate, float up) {
  return __fdividef(gate * up, 1.0f + power_of_two(gate * -1.44269504f));
}

// An expert's weights [N, K] and where they lie; with `up` it is a gate, and its product silu(gate) · up.
template <typename Scale>
struct Expert {
  const unsigned char *codes, *up_codes;
  const Scale *scales, *biases, *up_scales, *up_biases;
  int N, K;
  float whole, up_whole; // of nvfp4 what all of its numbers are multiplied by
};

// F: of the weights. PIECE: bytes of scales that are copied at a time. SPAN: positions that are, a chunk or
// two. GATED: the weights are a gate and `up`. ARRANGED: the bits of the weights whose input the product is, or 0.
// WARPGROUPS: by products of warpgroup.cu.
template <
    typename T_, typename F_, int PIECE_, int SPAN_, int WARPS_, int TOKENS_, int STAGES_, bool GATED_, int ARRANGED_,
    bool WARPGROUPS_>
struct PromptShape {
  using T = T_;
  using F = F_;
  using Scale = typename F::Scale;
  static constexpr int BITS = F::BITS, GROUP = F::GROUP, PIECE = PIECE_, SPAN = SPAN_, CHUNKS = SPAN / 64;
  static constexpr int SIZE = sizeof(Scale), BOTH = F::HAS_BIASES ? 2 : 1; // of a scale; scales, and biases
  static constexpr int WARPS = WARPS_, TOKENS = TOKENS_, STAGES = STAGES_;
  static constexpr bool GATED = GATED_, WARPGROUPS = WARPGROUPS_;
  static constexpr int THREADS = 32 * WARPS, OUTPUTS = GATED ? 16 : 32, STRIDE = WARPS * OUTPUTS; // of a warp, a block
  static constexpr int ROW = 8 * BITS, COPY = BITS % 2 ? 8 : 16, COPIES = CHUNKS * ROW / COPY; // of a row and span
  static constexpr int PANEL = TOKENS * 128, INPUTS = CHUNKS * PANEL; // bytes of a chunk, of a stage
  static constexpr int WEIGHTS = WARPS * 32 * CHUNKS * ROW;
  static constexpr int AHEAD = STAGES - (WARPGROUPS ? 2 : 1); // spans under way while one is multiplied
  static constexpr int EACH = BITS < 16 ? PIECE / SIZE * GROUP / SPAN : 1; // spans that a piece of scales is for
  static constexpr int SCALES = BITS < 16 ? 32 * PIECE : 0; // bytes of a warp's pieces of scales, and of biases
  static constexpr int PIECES = BITS < 16 ? 1 + (STAGES - 2 + EACH) / EACH : 0; // under way and in use
  static_assert(WARPS % 4 == 0 && AHEAD > 0 && EACH > 0);

  // The output that row `row` of a warp's 32 makes, counted from the first of the four warps. After `transpose_matrix`
  // a lane has two neighbouring rows of every eight: together they are neighbours in the input of the next product.
  __device__ __forceinline__ static int output_of(int warp, int row) {
    const int eight = GATED ? row / 8 % 2 : row / 8;
    return arranged_element<ARRANGED_>(warp % 4 * OUTPUTS + (GATED ? 4 : 8) * (row % 8 / 2) + 2 * eight + row % 2);
  }
};

// What a warp multiplies of a span: fragments of its 32 rows of weights.
template <typename S>
struct WarpWeights {
  static constexpr int BITS = S::BITS, READS = S::GROUP < 64 || (S::GROUP == 64 && S::SIZE != 2) ? S::CHUNKS : 1; // of scales
  static constexpr bool PAIRS = S::GROUP == 64 && S::CHUNKS == 2 && S::SIZE == 2; // of scales in one read
  Codes<BITS < 16 ? BITS : 4> codes[S::CHUNKS][4]; // of rows 8r + lane / 4
  uint32_t scales[READS][4], biases[READS][4];
  const unsigned char* weights;

  __device__ __forceinline__ void read(const unsigned char* span_weights, const unsigned char* piece, int number) {
    weights = span_weights;
    if constexpr (BITS < 16) {
      const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
      piece += S::BOTH * (number / S::EACH % S::PIECES) * S::SCALES + number % S::EACH * S::SPAN / S::GROUP * S::SIZE;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int row = 8 * r + group;
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) codes[c][r].read(weights + (32 * c + row) * S::ROW + quarter * 2 * BITS);
#pragma unroll
        for (int c = 0; c < READS; c++) {
          const unsigned char* at = piece + row * S::PIECE + (64 * c + 16 * quarter) / S::GROUP * S::SIZE;
          scales[c][r] = read_number(at);
          if (S::F::HAS_BIASES) biases[c][r] = read_number(at + S::SCALES);
        }
      }
    }
  }

  // As a `Dequantiser` takes it: as it stands there, or in float32.
  __device__ __forceinline__ static uint32_t read_number(const unsigned char* at) {
    if constexpr (PAIRS) return *reinterpret_cast<const uint32_t*>(at);
    if constexpr (Dequantiser<typename S::T, typename S::F>::IN_FLOATS)
      return __float_as_int(float(*reinterpret_cast<const typename S::Scale*>(at)));
    if constexpr (S::SIZE == 1) return *at;
    return *reinterpret_cast<const unsigned short*>(at);
  }

  // Of a chunk's positions of two products: fragments of the first and of the last sixteen rows.
  __device__ __forceinline__ void fragments(int chunk, int half, uint32_t (&made)[4][4]) const {
    if constexpr (BITS < 16) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int c = READS > 1 ? chunk : 0;
        const Dequantiser<typename S::T, typename S::F> dequantiser(scales[c][r], biases[c][r], PAIRS && chunk);
#pragma unroll
        for (int p = 0; p < 4; p++)
          made[p / 2 * 2 + r / 2][p % 2 * 2 + r % 2] = dequantiser.pair(codes[chunk][r], half, p);
      }
    } else {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < 4; i++)
        load_matrices_4(
            made[i], weights + (32 * chunk + i % 2 * 16 + lane % 16) * 128 +
                         ((4 * half + i / 2 * 2 + lane / 16) ^ lane % 8) * 16);
    }
  }
};

// Copies a warp's rows of weights, and what scales them, span by span; after their last span those of the rows that
// are STRIDE further.
template <typename S>
struct WeightReader {
  const unsigned char* from[S::COPIES]; // a lane copies the same pieces of every span,
  const typename S::Scale *scales_from, *biases_from; // and the scales of a row
  int first, column = 0, number = 0; // of the warp's outputs; of a span in its rows, and of all

  __device__ __forceinline__ WeightReader(const Expert<typename S::Scale>& expert, int first) : first(first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_bytes = expert.K / 8 * S::BITS;
    first -= warp % 4 * S::OUTPUTS;
#pragma unroll
    for (int i = 0; i < S::COPIES; i++) {
      const int row = (lane + 32 * i) / S::COPIES, piece = (lane + 32 * i) % S::COPIES;
      from[i] = (S::GATED && row >= 16 ? expert.up_codes : expert.codes) +
                (long long)(first + S::output_of(warp, row)) * row_bytes + piece * S::COPY;
    }
    const bool of_up = S::GATED && lane >= 16;
    const long long at = (long long)(first + S::output_of(warp, lane)) * (expert.K / S::GROUP);
    scales_from = S::BITS < 16 ? (of_up ? expert.up_scales : expert.scales) + at : nullptr;
    biases_from = S::F::HAS_BIASES ? (of_up ? expert.up_biases : expert.biases) + at : nullptr;
  }

  __device__ __forceinline__ void fetch(
      const Expert<typename S::Scale>& expert, unsigned char* weights, unsigned char* scales) {
    const int lane = threadIdx.x % 32;
    if (first < expert.N) {
#pragma unroll
      for (int i = 0; i < S::COPIES; i++) {
        const int row = (lane + 32 * i) / S::COPIES, byte = (lane + 32 * i) % S::COPIES * S::COPY;
        const int turn = S::BITS == 16 ? row % 8 * 16 : 0;
        copy_bytes<S::COPY>(weights + (32 * (byte / S::ROW) + row) * S::ROW + (byte % S::ROW ^ turn), from[i]);
        from[i] += S::CHUNKS * S::ROW;
      }
      if (S::BITS < 16 && number % S::EACH == 0) {
        unsigned char* to = scales + S::BOTH * (number / S::EACH % S::PIECES) * S::SCALES + lane * S::PIECE;
        copy_piece<S::PIECE>(to, scales_from);
        if (S::F::HAS_BIASES) copy_piece<S::PIECE>(to + S::SCALES, biases_from);
        scales_from += S::PIECE / S::SIZE, biases_from += S::PIECE / S::SIZE;
      }
    }
    number++;
    if (++column < expert.K / S::SPAN) return;
    column = 0, first += S::STRIDE;
#pragma unroll
    for (int i = 0; i < S::COPIES; i++) from[i] += (long long)(S::STRIDE - 1) * (expert.K / 8 * S::BITS);
    const int groups = (S::STRIDE - 1) * (expert.K / S::GROUP);
    scales_from += groups, biases_from += groups;
  }
};

// total [32, 8 · FRAGMENTS] of a warp += its weights · x of a span.
template <typename S, int FRAGMENTS>
__device__ __forceinline__ void add_span(
    float (&total)[2][FRAGMENTS][4], const WarpWeights<S>& weights, const unsigned char* inputs,
    uint32_t (&a)[2][4][4]) {
  using T = typename S::T;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * S::CHUNKS; i++) {
    const int chunk = i / 2, half = i % 2;
    if constexpr (S::WARPGROUPS) {
      wait_for_products<1>(); // those that read these fragments before
      hold(a[half]);
      weights.fragments(chunk, half, a[half]);
      hold(a[half]), hold(total[0]), hold(total[1]);
      begin_products();
#pragma unroll
      for (int j = 0; j < 4; j++)
        multiply_by_lines<T>(
            total[j % 2], a[half][j], describe_panel(inputs) + chunk * S::PANEL / 16 + 4 * half + j / 2 * 2);
      commit_products();
    } else {
      weights.fragments(chunk, half, a[0]);
      constexpr int TOGETHER = FRAGMENTS % 4 || FRAGMENTS > 8 ? 2 : 4; // whose products do not wait for one another
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f += TOGETHER) {
        uint32_t b[TOGETHER][4];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
          load_matrices_4(
              b[j], inputs + chunk * S::PANEL + (f + j) * 1024 + lane % 8 * 128 +
                        ((4 * half + lane / 8) ^ lane % 8) * 16);
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
          for (int j = 0; j < TOGETHER; j++)
#pragma unroll
            for (int m = 0; m < 2; m++)
              multiply<T>(total[m][f + j], a[0][2 * step + m], {b[j][2 * step], b[j][2 * step + 1]});
      }
    }
  }
}

// Rows of x, span by span, from the first span again after the last one: a thread copies a piece of every chunk of every
// row that is THREADS / 8 after another.
template <typename S, int FRAGMENTS>
struct InputReader {
  static constexpr int APART = S::THREADS / 8, EACH = (8 * FRAGMENTS + APART - 1) / APART;
  unsigned rows[EACH]; // where they begin, in pieces
  int column = 0;

  template <typename Source>
  __device__ __forceinline__ InputReader(int K, int count, Source source) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int row = threadIdx.x / 8 + i * APART;
      rows[i] = row < count ? unsigned(source(row)) * (K / 8) + threadIdx.x % 8 : 0;
    }
  }

  __device__ __forceinline__ void fetch(const typename S::T* x, int K, int count, unsigned char* inputs) {
    const int row = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (row + i * APART < count) {
        const typename S::T* from = x + 8ll * (rows[i] + 8 * S::CHUNKS * column);
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++)
          copy_16_bytes(
              inputs + c * S::PANEL + (row + i * APART) * 128 + (threadIdx.x % 8 ^ row % 8) * 16, from + 64 * c);
      }
    column = column + 1 == K / S::SPAN ? 0 : column + 1;
  }
};

// What is summed up, to outputs from `first` on of the rows target(0), target(1), ... of y.
template <typename S, int FRAGMENTS, typename T, typename Target>
__device__ __forceinline__ void leave_tile(
    const float (&total)[2][FRAGMENTS][4], T* y, const Expert<typename S::Scale>& expert, int first, int count,
    Target target) {
  constexpr float RESTORED = RESTORE<T, typename S::F>;
  const float whole = S::F::WHOLE ? RESTORED * expert.whole : RESTORED;
  const float up_whole = S::F::WHOLE ? RESTORED * expert.up_whole : RESTORED;
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    constexpr int COUNT = S::GATED ? 2 : 4; // eights of outputs
    Words<COUNT> made;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      float two[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float sum = total[S::GATED ? 0 : i / 2][f][i % 2 * 2 + e] * whole;
        two[e] = S::GATED ? wide_swiglu(sum, total[1][f][i % 2 * 2 + e] * up_whole) : sum;
      }
      made.at[i] = transpose_matrix(round_pair<T>(two[0], two[1]));
    }
    const int row = 8 * f + group;
    if (row < count)
      *reinterpret_cast<Words<COUNT>*>(y + (long long)target(row) * expert.N + first + 2 * COUNT * quarter) = made;
  }
}

// `count` rows of x, at most 8 · FRAGMENTS: row i is x[source(i)], its product y[target(i)]. The outputs are STRIDE
// times `rounds` from `first` on.
template <typename S, int FRAGMENTS, typename T, typename Source, typename Target>
__device__ __forceinline__ void prompt_tile(
    unsigned char* shared, const T* x, const Expert<typename S::Scale>& expert, T* y, int first, int rounds, int count, Source source,
    Target target) {
  constexpr int STAGES = S::STAGES, AHEAD = S::AHEAD;
  const int warp = threadIdx.x / 32, K = expert.K, spans = K / S::SPAN;
  const int all = min(rounds, (expert.N - first + S::STRIDE - 1) / S::STRIDE) * spans;
  unsigned char* inputs = shared;
  unsigned char* weights = shared + STAGES * S::INPUTS + warp * 32 * S::CHUNKS * S::ROW;
  unsigned char* scales = shared + STAGES * (S::INPUTS + S::WEIGHTS) + warp * S::BOTH * S::PIECES * S::SCALES;
  first += warp * S::OUTPUTS;

  // All weights of the first spans are under way before it is known which rows of x these are.
  WeightReader<S> weight_reader(expert, first);
#pragma unroll 1
  for (int i = 0; i < min(AHEAD, all); i++) weight_reader.fetch(expert, weights + i * S::WEIGHTS, scales);
  InputReader<S, FRAGMENTS> input_reader(K, count, source);
#pragma unroll 1
  for (int i = 0; i < AHEAD; i++) {
    if (i < all) input_reader.fetch(x, K, count, inputs + i * S::INPUTS);
    commit_copies();
  }

  int stage = 0, ahead = AHEAD, number = 0;
#pragma unroll 1
  while (number < all) {
    float total[2][FRAGMENTS][4] = {};
    uint32_t a[2][4][4];
    const int end = number + spans;
#pragma unroll 1
    for (; number < end; number++) {
      wait_for_copies<AHEAD - 1>();
      if constexpr (S::WARPGROUPS) show_to_tensor_cores();
      __syncthreads();
      if (number + AHEAD < all) {
        input_reader.fetch(x, K, count, inputs + ahead * S::INPUTS);
        weight_reader.fetch(expert, weights + ahead * S::WEIGHTS, scales);
      }
      commit_copies();
      WarpWeights<S> mine;
      mine.read(weights + stage * S::WEIGHTS, scales, number);
      add_span<S, FRAGMENTS>(total, mine, inputs + stage * S::INPUTS, a);
      stage = stage + 1 == STAGES ? 0 : stage + 1, ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    }
    if constexpr (S::WARPGROUPS) wait_for_products<0>();
    hold(total[0]), hold(total[1]);
    if (first < expert.N) leave_tile<S>(total, y, expert, first, count, target);
    first += S::STRIDE;
  }
}

// By the number of rows, in sixteens, or as products of warpgroups are there for.
template <typename S, int FRAGMENTS, typename... Given>
__device__ __forceinline__ void prompt_tile_of(int count, Given... given) {
  constexpr int LEAST = S::WARPGROUPS ? 4 : 2;
  if (count > 8 * (FRAGMENTS - LEAST) || FRAGMENTS == LEAST)
    prompt_tile<S, FRAGMENTS>(given...);
  else if constexpr (FRAGMENTS > LEAST)
    prompt_tile_of<S, FRAGMENTS - LEAST>(count, given...);
}

} // namespace headstart
