// RMS norm of a sum, and the sum: a team of THREADS for a row of D elements, each thread some of its eights, or for a
// few rows side by side.

namespace headstart {

template <typename T>
struct alignas(16) Eight {
  T at[8];
};

// The sums over a team of N warps, each in one order.
template <int N, int COUNT>
__device__ __forceinline__ void over_team(const Team& team, float (&x)[COUNT]) {
  __shared__ float parts[COUNT][N];
#pragma unroll
  for (int step = 16; step; step /= 2)
#pragma unroll
    for (int c = 0; c < COUNT; ++c) x[c] += __shfl_xor_sync(0xffffffffu, x[c], step);
  team.sync();
#pragma unroll
  for (int c = 0; c < COUNT; ++c)
    if (team.thread % 32 == 0) parts[c][team.thread / 32] = x[c];
  team.sync();
#pragma unroll
  for (int c = 0; c < COUNT; ++c) {
    x[c] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) x[c] += parts[c][i];
  }
}

// Eight elements of a norm; `Ready` if `is_ready`.
template <typename T>
__device__ __forceinline__ void leave_norm(
    T* to, const float (&values)[8], float scale, const float (&weights)[8], bool is_ready) {
  Eight<T> plain, prepared;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    plain.at[j] = T(__fmul_rn(__fmul_rn(values[j], scale), weights[j]));
    leave(ready(prepared.at), j, plain.at[j]);
  }
  *reinterpret_cast<Eight<T>*>(to) = is_ready ? prepared : plain;
}

__device__ __forceinline__ void read_eight(float (&to)[8], const float* from) {
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + j);
    to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
  }
}

// sum = x + added(at), if it ADDS, rounded to T; normed = sum / rms(sum) · weight. All of one row; `added` gives eight.
template <int D, int THREADS, bool ADDS, typename T, typename Added>
__device__ __forceinline__ void norm_row(
    const Team& team, const T* x, Added added, const float* weight, float eps, T* sum, T* normed,
    bool is_ready = false) {
  constexpr int EACH = (D / 8 + THREADS - 1) / THREADS;
  float values[EACH][8], weights[EACH][8], squares[1] = {};
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (team.thread + i * THREADS);
    if (at < D) {
      read_eight(weights[i], weight + at);
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
        squares[0] = __fmaf_rn(values[i][j], values[i][j], squares[0]);
      }
    }
  }
  over_team<THREADS / 32>(team, squares);
  const float scale = rsqrtf(squares[0] / D + eps);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (team.thread + i * THREADS);
    if (at < D) leave_norm(normed + at, values[i], scale, weights[i], is_ready);
  }
}

// The same of up to MOST `rows`, summed side by side behind one barrier.
template <int D, int THREADS, int MOST, typename T>
__device__ __forceinline__ void norm_together(
    const Team& team, int rows, const T* x, const float* weight, float eps, T* normed, bool is_ready) {
  constexpr int EACH = (D / 8 + THREADS - 1) / THREADS;
  float weights[EACH][8], squares[MOST] = {};
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = 8 * (team.thread + i * THREADS);
    if (at < D) {
      read_eight(weights[i], weight + at);
      Eight<T> here[MOST];  // beyond the last row, the last once more
#pragma unroll
      for (int row = 0; row < MOST; ++row)
        here[row] = *reinterpret_cast<const Eight<T>*>(x + min(row, rows - 1) * D + at);
#pragma unroll
      for (int row = 0; row < MOST; ++row)
#pragma unroll
        for (int j = 0; j < 8 && row < rows; ++j)
          squares[row] = __fmaf_rn(float(here[row].at[j]), float(here[row].at[j]), squares[row]);
    }
  }
  over_team<THREADS / 32>(team, squares);
#pragma unroll 1  // the elements come again, from the L1 cache: that is less code than to keep them
  for (int row = 0; row < rows; ++row) {
    const float scale = rsqrtf(squares[0] / D + eps);
#pragma unroll
    for (int i = 1; i < MOST; ++i) squares[i - 1] = squares[i];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = 8 * (team.thread + i * THREADS);
      if (at >= D) continue;
      const Eight<T> here = *reinterpret_cast<const Eight<T>*>(x + row * D + at);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = float(here.at[j]);
      leave_norm(normed + row * D + at, values, scale, weights[i], is_ready);
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
