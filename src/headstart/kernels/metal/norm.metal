// RMS norm of a sum, and the sum: one threadgroup of THREADS per row of D elements.

namespace headstart {

// total = x + added, rounded to T, where there is `added`; normed = total / rms(total) * weight.
template <int D, int THREADS, bool ADDS, typename T>
inline void norm(
    const device T* x, const device T* added, const device float* weight, float eps, device T* total,
    device T* normed, threadgroup float* parts,  // [THREADS / 32]
    int row, int index) {
  constexpr int EACH = (D + THREADS - 1) / THREADS;
  const long begin = static_cast<long>(row) * D;
  float values[EACH], squares = 0.0f;
  for (int i = 0; i < EACH; ++i) {
    const int at = index + i * THREADS;
    values[i] = 0.0f;
    if (at < D) {
      T here = x[begin + at];
      if (ADDS) {
        here = static_cast<T>(static_cast<float>(here) + static_cast<float>(added[begin + at]));
        total[begin + at] = here;
      }
      values[i] = static_cast<float>(here);
      squares = metal::fma(values[i], values[i], squares);
    }
  }
  squares = sum_over_simdgroup(squares);
  if (index % 32 == 0) parts[index / 32] = squares;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (int i = 0; i < THREADS / 32; ++i) sum += parts[i];
  const float scale = 1.0f / metal::precise::sqrt(sum / D + eps);
  for (int i = 0; i < EACH; ++i) {
    const int at = index + i * THREADS;
    if (at < D) normed[begin + at] = static_cast<T>(values[i] * scale * weight[at]);
  }
}

}  // namespace headstart
