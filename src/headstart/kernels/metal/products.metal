// y = x * transpose(w) for a few rows of x, with w in 4 or 8 bits (affine, by groups) or in 16.
//
// OUTPUTS outputs of up to ROWS rows are computed together, so each weight is read once for all of them: by SLICES
// simdgroups that split k, or (SLICES = 1) by one. A lane takes VALUES consecutive positions of every
// SLICES * 32 * VALUES. A row is summed by lane, then over the lanes of a simdgroup, then over the simdgroups. ROWS only
// says how many rows are computed side by side; it does not change the operations of a row.
//
// GATED: half of the outputs are those of a gate, and half of what it gates: y = silu(gate) * up. NORMS: x is normed
// first, by every threadgroup for itself, in the order of `norm`. ADDS: y = residual + product. All with the bits of
// separate kernels.

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

// What the elements of some rows are multiplied by to norm them. By all SIMDGROUPS of a threadgroup.
template <int ROWS, int SIMDGROUPS, typename T>
inline void row_scales(
    const device T* x, const thread int (&inputs)[ROWS], int K, float eps,
    threadgroup float* parts,  // [ROWS, 8]
    thread float (&scales)[ROWS], int simdgroup, int lane) {
  const int groups = metal::min(8, (K + 31) / 32);  // of `norm`, which has a thread for each of their lanes
  for (int r = 0; r < ROWS; ++r) {
    const device T* line = x + static_cast<long>(inputs[r]) * K;
    for (int group = simdgroup; group < groups; group += SIMDGROUPS) {
      float squares = 0.0f;
      for (int at = group * 32 + lane; at < K; at += groups * 32) {
        const float value = static_cast<float>(line[at]);
        squares = metal::fma(value, value, squares);
      }
      squares = sum_over_simdgroup(squares);
      if (lane == 0) parts[r * 8 + group] = squares;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0.0f;
    for (int group = 0; group < groups; ++group) sum += parts[r * 8 + group];
    scales[r] = 1.0f / metal::precise::sqrt(sum / K + eps);
  }
}

// An output, or silu(gate) * up, of sums as T has them.
template <typename T, bool GATED>
inline T finished(float sum, float up) {
  if (!GATED) return static_cast<T>(sum);
  const float gate = static_cast<float>(static_cast<T>(sum));
  return static_cast<T>(gate * sigmoid(gate) * static_cast<float>(static_cast<T>(up)));
}

// Outputs first .. first + OUTPUTS - 1 of w [N, K], or half as many of w and `up`. Row r comes from row inputs[r] of x
// and goes to row outputs[r] of y; where outputs[r] is negative it is not stored.
template <typename T, int BITS, int GROUP, int ROWS, int SLICES, bool GATED, bool NORMS, bool ADDS>
inline void product(
    const device T* x, const device void* w,
    const device T* scales,  // [N, K / GROUP]
    const device T* biases, const device void* up, const device T* up_scales, const device T* up_biases, device T* y,
    int N, int K, int first, const thread int (&inputs)[ROWS],
    const thread int (&outputs)[ROWS],
    const device float* norm_weight,        // [K], where x is normed
    const thread float (&row_scales)[ROWS],  // likewise
    const device T* residual,                // as y, where it is added
    threadgroup float* sums,  // [SLICES, ROWS, OUTPUTS], where there are several slices
    int slice, int lane) {
  constexpr int EACH = GATED ? OUTPUTS / 2 : OUTPUTS;  // outputs of a row that are stored
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
        columns[r][i] =
            NORMS ? static_cast<T>(static_cast<float>(from[i]) * row_scales[r] * norm_weight[k + i]) : from[i];
        if (BITS < 16) column_sums[r] += static_cast<float>(columns[r][i]);
      }
    }
    for (int o = 0; o < OUTPUTS; ++o) {
      const bool gates = !GATED || o < EACH;
      const long output = metal::min(first + o % EACH, N - 1);
      const long position = output * K + k;
      float weights[VALUES];
      read_weights<T, BITS>(static_cast<const device char*>(gates ? w : up) + position * BITS / 8, weights);
      float scale = 1.0f, bias = 0.0f;
      if (BITS < 16) {
        scale = static_cast<float>(gates ? scales[position / GROUP] : up_scales[position / GROUP]);
        bias = static_cast<float>(gates ? biases[position / GROUP] : up_biases[position / GROUP]);
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
      total[r][o] = sum_over_simdgroup(total[r][o]);
      if (SLICES > 1 && lane == 0) sums[(slice * ROWS + r) * OUTPUTS + o] = total[r][o];
    }
    for (int o = 0; o < EACH; ++o) {
      if (SLICES > 1 || lane != 0 || first + o >= N || outputs[r] < 0) continue;
      const long at = static_cast<long>(outputs[r]) * N + first + o;
      const T made = finished<T, GATED>(total[r][o], total[r][(o + EACH) % OUTPUTS]);
      y[at] = ADDS ? static_cast<T>(static_cast<float>(residual[at]) + static_cast<float>(made)) : made;
    }
  }
  if (SLICES == 1) return;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int thread_index = slice * 32 + lane;
  for (int r = 0; r < ROWS; ++r) {
    const int o = thread_index - r * EACH;
    if (o < 0 || o >= EACH || first + o >= N || outputs[r] < 0) continue;
    float sum = 0.0f, gated = 0.0f;
    for (int s = 0; s < SLICES; ++s) {
      sum += sums[(s * ROWS + r) * OUTPUTS + o];
      gated += sums[(s * ROWS + r) * OUTPUTS + (o + EACH) % OUTPUTS];
    }
    const long at = static_cast<long>(outputs[r]) * N + first + o;
    const T made = finished<T, GATED>(sum, gated);
    y[at] = ADDS ? static_cast<T>(static_cast<float>(residual[at]) + static_cast<float>(made)) : made;
  }
}

}  // namespace headstart
