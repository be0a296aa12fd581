// The gated delta rule over a prompt's pass, in chunks of 64 tokens from its first: what is computed of all chunks side
// by side, before and after the recurrence of delta_chunks.cu. Nothing depends on later tokens or on the pass's width.

namespace headstart {

constexpr int CHUNK = 64;
constexpr int CELLS = 10;  // of 16×16 elements on and below the diagonal of a chunk's triangle

// Neighbouring elements, read and written at once.
template <typename T, int N>
struct alignas(N * sizeof(T)) Few {
  T at[N];
};

template <typename T>
__device__ __forceinline__ float low_of(uint32_t pair) {
  return static_cast<float>(reinterpret_cast<const Few<T, 2>*>(&pair)->at[0]);
}

template <typename T>
__device__ __forceinline__ float high_of(uint32_t pair) {
  return static_cast<float>(reinterpret_cast<const Few<T, 2>*>(&pair)->at[1]);
}

// Two numbers, and what rounding them to type T leaves of them.
template <typename T>
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack<T>(x, y);
  low = pack<T>(__fsub_rn(x, low_of<T>(high)), __fsub_rn(y, high_of<T>(high)));
}

// The left side of a product: sixteen rows of sixteen numbers, and what rounding leaves.
template <typename T>
struct SplitRows {
  uint32_t high[4], low[4];

  // From the sums of a product.
  __device__ __forceinline__ SplitRows(const float (&left)[4], const float (&right)[4]) {
    split<T>(left[0], left[1], high[0], low[0]);
    split<T>(left[2], left[3], high[1], low[1]);
    split<T>(right[0], right[1], high[2], low[2]);
    split<T>(right[2], right[3], high[3], low[3]);
  }
};

// The unit of 16 bytes of a tile [CHUNK, D] where `column` of a token begins.
template <int D>
__device__ __forceinline__ int unit_of_token(int token, int column) {
  return token * D + ((column / 8) ^ (token % 8)) * 8;
}

// Head `head` (of queries, then of keys, then of values) of a chunk's tokens, by a block of 8 warps: convolution, silu,
// and queries and keys to unit length, the queries over √D besides. Inputs after the last are zero.
template <int HK, int HV, int D, int TAPS, typename T>
__device__ __forceinline__ void prepare_tokens(
    int head,
    int chunk,
    int chunks,
    int b,
    int W,
    const T* qkv,          // [B, W, C]
    const T* conv,         // [B, TAPS - 1, C]
    const T* conv_weight,  // [C, TAPS]
    T* queries_and_keys,   // [B, chunks, 2·HK, CHUNK, D], units of a token in the order of `unit_of_token`
    T* values,             // [B, chunks, HV, CHUNK / 8, D, 8]
    T* new_conv) {
  constexpr int C = (2 * HK + HV) * D, EACH = D / 32, HISTORY = TAPS - 1;
  using Part = Few<T, EACH>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane * EACH, channel = head * D + column;
  const int begin = chunk * CHUNK + 8 * warp;
  auto input = [&](int t) {
    if (t >= W) return Part{};
    const T* const from = t < 0 ? conv + ((long long)b * HISTORY + t + HISTORY) * C : qkv + ((long long)b * W + t) * C;
    return *reinterpret_cast<const Part*>(from + channel);
  };

  Part inputs[HISTORY + 8], taps[TAPS];
#pragma unroll
  for (int i = 0; i < HISTORY + 8; ++i) inputs[i] = input(begin - HISTORY + i);
#pragma unroll
  for (int i = 0; i < TAPS; ++i) taps[i] = reinterpret_cast<const Part*>(conv_weight + channel * TAPS)[i];
  if (chunk == chunks - 1 && warp < HISTORY)
    *reinterpret_cast<Part*>(new_conv + ((long long)b * HISTORY + warp) * C + channel) = input(W - HISTORY + warp);

  float made[8][EACH];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < TAPS; ++j) {
        const float tap = static_cast<float>(taps[(e * TAPS + j) / EACH].at[(e * TAPS + j) % EACH]);
        sum = __fmaf_rn(tap, static_cast<float>(inputs[i + j].at[e]), sum);
      }
      made[i][e] = __fmul_rn(sum, sigmoid(sum));
    }
  }

  if (head >= 2 * HK) {
    T* const to = values + ((((long long)b * chunks + chunk) * HV + head - 2 * HK) * 8 + warp) * (8 * D);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const uint4 tokens = {
          pack<T>(made[0][e], made[1][e]), pack<T>(made[2][e], made[3][e]), pack<T>(made[4][e], made[5][e]),
          pack<T>(made[6][e], made[7][e])};
      *reinterpret_cast<uint4*>(to + (column + e) * 8) = tokens;
    }
    return;
  }
  T* const to = queries_and_keys + (((long long)b * chunks + chunk) * (2 * HK) + head) * (CHUNK * D);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) sum = __fmaf_rn(made[i][e], made[i][e], sum);
    const float length = __fsqrt_rn(__fadd_rn(across<32>(sum), 1e-6f));
    const float scale = __fdiv_rn(1.0f, head < HK ? __fmul_rn(length, __fsqrt_rn(float(D))) : length);
    Part out;
#pragma unroll
    for (int e = 0; e < EACH; ++e) out.at[e] = static_cast<T>(__fmul_rn(made[i][e], scale));
    *reinterpret_cast<Part*>(to + unit_of_token<D>(8 * warp + i, column) + column % 8) = out;
  }
}

// Output heads `item` and the three after it of all [B, W, HV]: RMS norm and gate, by a warp for each.
template <int D, typename T, typename N>
__device__ __forceinline__ void norm_and_gate(
    long long item, long long items, const T* outputs, const T* z, const N* norm_weight, float eps, T* y) {
  constexpr int EACH = D / 32, COUNT = 4;
  using Part = Few<T, EACH>;
  const int column = threadIdx.x % 32 * EACH;
  Part out[COUNT], gates[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (item + i >= items) continue;
    out[i] = *reinterpret_cast<const Part*>(outputs + (item + i) * D + column);
    gates[i] = *reinterpret_cast<const Part*>(z + (item + i) * D + column);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (item + i >= items) continue;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const float x = static_cast<float>(out[i].at[e]);
      sum = __fmaf_rn(x, x, sum);
    }
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(across<32>(sum), float(D)), eps)));
    Part made;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const float gate = static_cast<float>(gates[i].at[e]);
      const float normed = __fmul_rn(
          __fmul_rn(static_cast<float>(out[i].at[e]), scale), static_cast<float>(norm_weight[column + e]));
      made.at[e] = static_cast<T>(__fmul_rn(normed, __fmul_rn(gate, sigmoid(gate))));
    }
    *reinterpret_cast<Part*>(y + (item + i) * D + column) = made;
  }
}

}  // namespace headstart
