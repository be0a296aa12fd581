// RMS norm of a sum, and the sum: one block per row of D elements, each thread some of its eights.

namespace headstart {

template <typename T>
struct alignas(16) Eight {
  T at[8];
};

// The sum over a block of WARPS warps, in one order.
template <int WARPS>
__device__ __forceinline__ float over_block(float x) {
  __shared__ float parts[WARPS];
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += parts[i];
  return sum;
}

// sum = x + added (if there is any), rounded to T; normed = sum / rms(sum) · weight.
template <int D, int THREADS, typename T>
__device__ void norm(const T* x, const T* added, const float* weight, float eps, T* sum, T* normed) {
  constexpr int EACH = (D / 8 + THREADS - 1) / THREADS;
  const long long row = static_cast<long long>(blockIdx.x) * D;
  float values[EACH][8], squares = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (threadIdx.x + i * THREADS);
    if (at < D) {
      Eight<T> here = *reinterpret_cast<const Eight<T>*>(x + row + at);
      if (added) {
        const Eight<T> more = *reinterpret_cast<const Eight<T>*>(added + row + at);
#pragma unroll
        for (int j = 0; j < 8; ++j) here.at[j] = T(float(here.at[j]) + float(more.at[j]));
        *reinterpret_cast<Eight<T>*>(sum + row + at) = here;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[i][j] = float(here.at[j]);
        squares = __fmaf_rn(values[i][j], values[i][j], squares);
      }
    }
  }
  const float scale = rsqrtf(over_block<THREADS / 32>(squares) / D + eps);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (threadIdx.x + i * THREADS);
    if (at < D) {
      Eight<T> out;
#pragma unroll
      for (int j = 0; j < 8; ++j) out.at[j] = T(__fmul_rn(__fmul_rn(values[i][j], scale), weight[at + j]));
      *reinterpret_cast<Eight<T>*>(normed + row + at) = out;
    }
  }
}

} // namespace headstart
