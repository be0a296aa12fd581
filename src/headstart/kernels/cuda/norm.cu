// RMS norm of a sum, and the sum: one team of THREADS per row of D elements, each thread some of its eights.

namespace headstart {

template <typename T>
struct alignas(16) Eight {
  T at[8];
};

// The sum over a team of N warps, in one order.
template <int N>
__device__ __forceinline__ float over_team(const Team& team, float x) {
  __shared__ float parts[N];
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  team.sync();
  if (team.thread % 32 == 0) parts[team.thread / 32] = x;
  team.sync();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += parts[i];
  return sum;
}

// sum = x + added(at), if it ADDS, rounded to T; normed = sum / rms(sum) · weight. All of one row; `added` gives eight.
template <int D, int THREADS, bool ADDS, typename T, typename N, typename Added>
__device__ __forceinline__ void norm_row(
    const Team& team, const T* x, Added added, const float* weight, float eps, T* sum, N* normed) {
  constexpr int EACH = (D / 8 + THREADS - 1) / THREADS;
  float values[EACH][8], weights[EACH][8], squares = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (team.thread + i * THREADS);
    if (at < D) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(weight + at + j);
        weights[i][j] = four.x, weights[i][j + 1] = four.y, weights[i][j + 2] = four.z, weights[i][j + 3] = four.w;
      }
      Eight<T> here = *reinterpret_cast<const Eight<T>*>(x + at);
      if constexpr (ADDS) {
        const Eight<T> more = added(at);
#pragma unroll
        for (int j = 0; j < 8; ++j) here.at[j] = T(float(here.at[j]) + float(more.at[j]));
        *reinterpret_cast<Eight<T>*>(sum + at) = here;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[i][j] = float(here.at[j]);
        squares = __fmaf_rn(values[i][j], values[i][j], squares);
      }
    }
  }
  const float scale = rsqrtf(over_team<THREADS / 32>(team, squares) / D + eps);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (team.thread + i * THREADS);
    if (at < D) {
      Eight<N> out;
#pragma unroll
      for (int j = 0; j < 8; ++j) leave(out.at, j, T(__fmul_rn(__fmul_rn(values[i][j], scale), weights[i][j])));
      *reinterpret_cast<Eight<N>*>(normed + at) = out;
    }
  }
}

// The same in a kernel of its own, a block per row; `added` may be null.
template <int D, int THREADS, bool ADDS, typename T>
__device__ void norm(const T* x, const T* added, const float* weight, float eps, T* sum, T* normed) {
  const long long row = static_cast<long long>(blockIdx.x) * D;
  auto more = [&](int at) { return *reinterpret_cast<const Eight<T>*>(added + row + at); };
  norm_row<D, THREADS, ADDS>(Team::block(0, 1), x + row, more, weight, eps, sum + row, normed + row);
}

} // namespace headstart
