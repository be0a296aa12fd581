// y = x * transpose(w) for a few rows of x, with w in 4 or 8 bits (affine, by groups) or in 16.
//
// OUTPUTS outputs of up to ROWS rows are computed together, so each weight is read once for all of them: by SLICES
// simdgroups that split k, or (SLICES = 1) by one. A lane takes VALUES consecutive positions of every
// SLICES * 32 * VALUES. A row is summed by lane, then over the lanes of a simdgroup, then over the simdgroups. ROWS only
// says how many rows are computed side by side; it does not change the operations of a row.

namespace headstart {

constant constexpr int OUTPUTS = 4;
constant constexpr int VALUES = 16;  // per lane and step; a quantisation group has a multiple of it

// Weights of one lane's positions in one output, as float: codes of quantised weights, or the weights themselves.
template <typename T, int BITS>
inline void read_weights(const device void* from, thread float (&out)[VALUES]) {
  if (BITS == 16) {
    const device T* weights = static_cast<const device T*>(from);
    for (int i = 0; i < VALUES; ++i) out[i] = static_cast<float>(weights[i]);
  } else {
    const device uint* words = static_cast<const device uint*>(from);
    for (int i = 0; i < VALUES * BITS / 32; ++i) {
      const uint word = words[i];
      for (int j = 0; j < 32 / BITS; ++j) {
        out[i * (32 / BITS) + j] = static_cast<float>((word >> (BITS * j)) & ((1u << (BITS % 32)) - 1u));
      }
    }
  }
}

// Outputs first .. first + OUTPUTS - 1 of w [N, K]. Row r comes from row inputs[r] of x and goes to row outputs[r] of
// y; where outputs[r] is negative it is not stored.
template <typename T, int BITS, int GROUP, int ROWS, int SLICES, typename Scales>
inline void product(
    const device T* x, const device void* w,
    Scales scales,  // [N, K / GROUP]; MLX passes arrays of fewer than 8 elements as `constant`
    Scales biases, device T* y, int N, int K, int first, const thread int (&inputs)[ROWS],
    const thread int (&outputs)[ROWS],
    threadgroup float* sums,  // [SLICES, ROWS, OUTPUTS], where there are several slices
    int slice, int lane) {
  float total[ROWS][OUTPUTS];
  for (int r = 0; r < ROWS; ++r)
    for (int o = 0; o < OUTPUTS; ++o) total[r][o] = 0.0f;

  for (int k = VALUES * (slice * 32 + lane); k < K; k += VALUES * 32 * SLICES) {
    T columns[ROWS][VALUES];
    float column_sums[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const device T* from = x + static_cast<long>(inputs[r]) * K + k;
      column_sums[r] = 0.0f;
      for (int i = 0; i < VALUES; ++i) {
        columns[r][i] = from[i];
        if (BITS < 16) column_sums[r] += static_cast<float>(columns[r][i]);
      }
    }
    for (int o = 0; o < OUTPUTS; ++o) {
      const long output = metal::min(first + o, N - 1);
      const long position = output * K + k;
      float weights[VALUES];
      read_weights<T, BITS>(static_cast<const device char*>(w) + position * BITS / 8, weights);
      float scale = 1.0f, bias = 0.0f;
      if (BITS < 16) {
        scale = static_cast<float>(scales[position / GROUP]);
        bias = static_cast<float>(biases[position / GROUP]);
      }
      for (int r = 0; r < ROWS; ++r) {
        float sum = BITS == 16 ? total[r][o] : 0.0f;
        for (int i = 0; i < VALUES; ++i) sum = metal::fma(weights[i], static_cast<float>(columns[r][i]), sum);
        total[r][o] = BITS == 16 ? sum : metal::fma(scale, sum, metal::fma(bias, column_sums[r], total[r][o]));
      }
    }
  }

  for (int r = 0; r < ROWS; ++r) {
    for (int o = 0; o < OUTPUTS; ++o) {
      const float sum = sum_over_simdgroup(total[r][o]);
      if (lane != 0) continue;
      if (SLICES > 1) {
        sums[(slice * ROWS + r) * OUTPUTS + o] = sum;
      } else if (first + o < N && outputs[r] >= 0) {
        y[static_cast<long>(outputs[r]) * N + first + o] = static_cast<T>(sum);
      }
    }
  }
  if (SLICES == 1) return;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int thread_index = slice * 32 + lane;
  for (int r = 0; r < ROWS; ++r) {
    const int o = thread_index - r * OUTPUTS;
    if (o < 0 || o >= OUTPUTS || first + o >= N || outputs[r] < 0) continue;
    float sum = 0.0f;
    for (int s = 0; s < SLICES; ++s) sum += sums[(s * ROWS + r) * OUTPUTS + o];
    y[static_cast<long>(outputs[r]) * N + first + o] = static_cast<T>(sum);
  }
}

}  // namespace headstart
