// What tokens of a chunk are to each other, for delta_chunks.cu: of all chunks side by side.

namespace headstart {

// A chunk's triangle [CHUNK, CHUNK] in float32, in shared memory. Nothing is read above its cells.
struct Triangle {
  static constexpr int LINE = CHUNK + 4;
  float at[CHUNK * LINE];

  __device__ __forceinline__ float2& pair(int row, int column) {
    return *reinterpret_cast<float2*>(at + row * LINE + column);
  }

  // The left side of a product: sixteen lines and columns from these, column j times scale(j).
  template <typename T, typename Scale>
  __device__ __forceinline__ SplitRows<T> left(int line, int column, Scale scale) {
    const int lane = threadIdx.x % 32, r = line + lane / 4, c = column + 2 * (lane % 4);
    float half[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = scale(c + 8 * i), y = scale(c + 8 * i + 1);
      const float2 upper = pair(r, c + 8 * i), lower = pair(r + 8, c + 8 * i);
      half[i][0] = __fmul_rn(upper.x, x), half[i][1] = __fmul_rn(upper.y, y);
      half[i][2] = __fmul_rn(lower.x, x), half[i][3] = __fmul_rn(lower.y, y);
    }
    return {half[0], half[1]};
  }

  // sums += left · sixteen lines and columns from these, column j times scale(j). What is smallest is added first.
  template <typename T, typename Scale>
  __device__ __forceinline__ void add_product(
      float (&sum)[4], float (&beside)[4], const SplitRows<T>& left, int line, int column, Scale scale) const {
    const int lane = threadIdx.x % 32, c = column + lane / 4;
    const float* const from = at + (line + 2 * (lane % 4)) * LINE + c;
    uint32_t high[2][2], low[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float factor = scale(c + 8 * n);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = from[8 * i * LINE + 8 * n], y = from[(8 * i + 1) * LINE + 8 * n];
        split<T>(__fmul_rn(x, factor), __fmul_rn(y, factor), high[n][i], low[n][i]);
      }
    }
    multiply<T>(sum, left.low, high[0]);
    multiply<T>(beside, left.low, high[1]);
    multiply<T>(sum, left.high, low[0]);
    multiply<T>(beside, left.high, low[1]);
    multiply<T>(sum, left.high, high[0]);
    multiply<T>(beside, left.high, high[1]);
  }
};

// (I + A)⁻¹ of a chunk's triangle, in place, by 4 warps: cells on the diagonal column by column, then those below, as
// sums of products, from the upper to the lower. No number on the way is large where the result is not.
template <typename T>
__device__ __forceinline__ void invert(Triangle& triangle) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 16;
  float* const cell = triangle.at + 16 * warp * (Triangle::LINE + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) sum = __fmaf_rn(-cell[i * Triangle::LINE + j], x[j], sum);
    x[i] = sum;
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) cell[i * Triangle::LINE + column] = x[i];
  }
  __syncthreads();

  auto as_is = [](int) { return 1.0f; };
#pragma unroll 1
  for (int row = 1; row < 4; ++row) {  // of cells, a warp for each
    float sum[2][4] = {};
#pragma unroll 1
    for (int k = warp; k < row; ++k) {
      float product[2][4] = {};
      const SplitRows<T> own = triangle.left<T>(16 * row, 16 * row, as_is);
      triangle.add_product(product[0], product[1], own, 16 * row, 16 * k, as_is);
      const SplitRows<T> left(product[0], product[1]);
      triangle.add_product(sum[0], sum[1], left, 16 * k, 16 * warp, as_is);
    }
    __syncthreads();
    if (warp < row) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int r = 16 * row + lane / 4, c = 16 * warp + 8 * n + 2 * (lane % 4);
        triangle.pair(r, c) = {-sum[n][0], -sum[n][1]};
        triangle.pair(r + 8, c) = {-sum[n][2], -sum[n][3]};
      }
    }
    __syncthreads();
  }
}

// Shared memory of a block of `make_triangle`.
template <int D, typename T>
struct TriangleRoom {
  T queries[CHUNK * D], keys[CHUNK * D];
  Triangle triangle;
  float sums[CHUNK], betas[CHUNK];  // of log2(decay) up to a token
};

// What a chunk's tokens are to each other in value head `hv`, by a block of 4 warps. With r = v - (decay from the
// chunk's begin) · S k of all tokens, S the state at its begin, their differences are M r, and what they add to the
// outputs is N r: M = (I + A)⁻¹ · beta, A strictly lower beta · kᵢ·kⱼ · decay from j to i, and N = (qᵢ·kⱼ · decay) · M.
template <int HK, int HV, int D, typename T, typename A, typename B>
__device__ __forceinline__ void make_triangle(
    TriangleRoom<D, T>& shared,
    int hv,
    int chunk,
    int chunks,
    int row_of_batch,
    int W,
    const T* queries_and_keys,
    const T* b,        // [B, W, HV]
    const T* a,        // [B, W, HV]
    const A* A_log,    // [HV]
    const B* dt_bias,  // [HV]
    uint32_t* cells,   // [B, chunks, HV, 3, CELLS, 32, 4]: M, what rounding leaves of it, N, as right sides of products
    float* decays) {   // [B, chunks, HV, 2, CHUNK]: from the chunk's begin to a token, from a token to the chunk's end
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, hk = hv / (HV / HK);
  const long long place = (long long)row_of_batch * chunks + chunk;
  Triangle& triangle = shared.triangle;
  const T* const from = queries_and_keys + (place * (2 * HK) + hk) * (CHUNK * D);
#pragma unroll
  for (int i = 0; i < CHUNK * D; i += 128 * 8) {
    copy_16_bytes(shared.queries + i + 8 * thread, from + i + 8 * thread);
    copy_16_bytes(shared.keys + i + 8 * thread, from + HK * (CHUNK * D) + i + 8 * thread);
  }
  commit_copies();

  float log_decay = 0.0f;
  if (thread < CHUNK) {
    const int t = chunk * CHUNK + thread;
    const long long at = ((long long)row_of_batch * W + t) * HV + hv;
    shared.betas[thread] = t < W ? sigmoid(static_cast<float>(b[at])) : 0.0f;
    if (t < W) {
      const float x = __fadd_rn(static_cast<float>(a[at]), static_cast<float>(dt_bias[hv]));
      log_decay = __fmul_rn(-1.44269504f, __fmul_rn(expf(static_cast<float>(A_log[hv])), softplus(x)));
      log_decay = fmaxf(log_decay, -160.0f);  // where a decay is 0; sums of larger numbers have larger errors
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_sync(0xffffffffu, log_decay, lane < step ? lane : lane - step);
      if (lane >= step) log_decay = __fadd_rn(log_decay, before);
    }
    shared.sums[thread] = log_decay;
  }
  __syncthreads();
  const float first_half = shared.sums[31];
  __syncthreads();
  if (thread >= 32 && thread < CHUNK) shared.sums[thread] = __fadd_rn(log_decay, first_half);
  wait_for_copies<0>();
  __syncthreads();
  if (thread < CHUNK) {
    float* const to = decays + (place * HV + hv) * (2 * CHUNK) + thread;
    to[0] = power_of_two(shared.sums[thread]);
    to[CHUNK] = power_of_two(__fsub_rn(shared.sums[CHUNK - 1], shared.sums[thread]));
  }

  float of_keys[8][4] = {}, of_queries[8][4] = {};
  const int left_unit = unit_of_token<D>(16 * warp + lane % 16, 8 * (lane / 16));
  const int right_unit = unit_of_token<D>(lane % 8 + 8 * (lane / 16), 8 * (lane / 8 % 2));
#pragma unroll 2
  for (int d = 0; d < D; d += 16) {
    uint32_t k[4], q[4], right[4];
    load_matrices_4(k, shared.keys + (left_unit ^ d));
    load_matrices_4(q, shared.queries + (left_unit ^ d));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      if (n > 2 * warp) continue;
      load_matrices_4(right, shared.keys + 8 * n * D + (right_unit ^ d));
      multiply<T>(of_keys[n], k, {right[0], right[1]});
      multiply<T>(of_keys[n + 1], k, {right[2], right[3]});
      multiply<T>(of_queries[n], q, {right[0], right[1]});
      multiply<T>(of_queries[n + 1], q, {right[2], right[3]});
    }
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n > 2 * warp + 1) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * warp + lane / 4 + 8 * (e / 2), j = 8 * n + 2 * (lane % 4) + e % 2;
      const float decay = power_of_two(__fsub_rn(shared.sums[i], shared.sums[j]));
      of_keys[n][e] = i > j ? __fmul_rn(shared.betas[i], __fmul_rn(of_keys[n][e], decay)) : 0.0f;
      of_queries[n][e] = i >= j ? __fmul_rn(of_queries[n][e], decay) : 0.0f;
    }
    const int r = 16 * warp + lane / 4, c = 8 * n + 2 * (lane % 4);
    triangle.pair(r, c) = {of_keys[n][0], of_keys[n][1]};
    triangle.pair(r + 8, c) = {of_keys[n][2], of_keys[n][3]};
  }
  __syncthreads();
  invert<T>(triangle);

  float sum[8][4] = {};
  auto beta = [&](int j) { return shared.betas[j]; };
  uint4* const to = reinterpret_cast<uint4*>(cells) + (place * HV + hv) * (3 * CELLS * 32) + lane;
  auto cell = [&](int kind, int k) { return to + (kind * CELLS + warp * (warp + 1) / 2 + k) * 32; };
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k > warp) continue;
    const SplitRows<T> own = triangle.left<T>(16 * warp, 16 * k, beta);
    *cell(0, k) = {own.high[0], own.high[2], own.high[1], own.high[3]};
    *cell(1, k) = {own.low[0], own.low[2], own.low[1], own.low[3]};
    const SplitRows<T> left(of_queries[2 * k], of_queries[2 * k + 1]);
#pragma unroll
    for (int n = 0; n <= 2 * k; n += 2) triangle.add_product(sum[n], sum[n + 1], left, 16 * k, 8 * n, beta);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k > warp) continue;
    *cell(2, k) = {
        pack<T>(sum[2 * k][0], sum[2 * k][1]), pack<T>(sum[2 * k + 1][0], sum[2 * k + 1][1]),
        pack<T>(sum[2 * k][2], sum[2 * k][3]), pack<T>(sum[2 * k + 1][2], sum[2 * k + 1][3])};
  }
}

}  // namespace headstart
