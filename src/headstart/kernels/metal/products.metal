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
// Of kernels that multiply matrices:
constant constexpr int BLOCK = 32;    // positions; a quantisation group has a multiple of it
constant constexpr int COLUMNS = 32;  // outputs of a threadgroup, or half as many gates, and what they gate

// COUNT consecutive weights of one output, as float: codes of quantised weights, or the weights themselves.
template <typename T, int BITS, int COUNT>
inline void read_weights(const device void* from, thread float (&out)[COUNT]) {
  if (BITS == 16) {
    const device T* weights = static_cast<const device T*>(from);
    for (int i = 0; i < COUNT; ++i) out[i] = static_cast<float>(weights[i]);
  } else {
    const device uint* words = static_cast<const device uint*>(from);
    for (int i = 0; i < COUNT * BITS / 32; ++i) {
      const uint word = words[i];
      for (int j = 0; j < 32 / BITS; ++j) {
        out[i * (32 / BITS) + j] = static_cast<float>((word >> (BITS * j)) & ((1u << (BITS % 32)) - 1u));
      }
    }
  }
}

// The squares of rows first .. first + ROWS - 1 of x, summed by group of 32 threads of `norm`. By all SIMDGROUPS of a
// threadgroup. Beyond the last of `rows` it is taken again.
template <int ROWS, int SIMDGROUPS, typename T>
inline void sum_squares(
    const device T* x, int rows, int first, int K,
    threadgroup float* squares,  // [ROWS, 8]
    int simdgroup, int lane) {
  const int groups = metal::min(8, (K + 31) / 32);  // of `norm`, which has a thread for each of their lanes
  for (int r = 0; r < ROWS; ++r) {
    const device T* line = x + static_cast<long>(metal::min(first + r, rows - 1)) * K;
    for (int group = simdgroup; group < groups; group += SIMDGROUPS) {
      float sum = 0.0f;
      for (int at = group * 32 + lane; at < K; at += groups * 32) {
        const float value = static_cast<float>(line[at]);
        sum = metal::fma(value, value, sum);
      }
      sum = sum_over_simdgroup(sum);
      if (lane == 0) squares[r * 8 + group] = sum;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// What the elements of a row are multiplied by to norm them.
inline float row_scale(const threadgroup float* squares, int row, int K, float eps) {
  float sum = 0.0f;
  for (int group = 0; group < metal::min(8, (K + 31) / 32); ++group) sum += squares[row * 8 + group];
  return 1.0f / metal::precise::sqrt(sum / K + eps);
}

// Element k of a row, normed or as it is.
template <bool NORMS, typename T>
inline T column(T x, const device float* norm_weight, int k, float scale) {
  return NORMS ? static_cast<T>(static_cast<float>(x) * scale * norm_weight[k]) : x;
}

// Store an output, or silu(gate) * up, of sums.
template <typename T, bool GATED, bool ADDS>
inline void store(device T* y, const device T* residual, long at, float sum, float up) {
  T made = static_cast<T>(sum);
  if (GATED) {
    const float gate = static_cast<float>(made);
    made = static_cast<T>(gate * sigmoid(gate) * static_cast<float>(static_cast<T>(up)));
  }
  y[at] = ADDS ? static_cast<T>(static_cast<float>(residual[at]) + static_cast<float>(made)) : made;
}

// Store column o of row r from the sums of all slices. Of COLUMNS, those of `up` are the second half.
template <typename T, int ROWS, int SLICES, int COLUMNS, bool GATED, bool ADDS>
inline void store_sum(
    const threadgroup float* sums,  // [SLICES, ROWS, COLUMNS]
    device T* y, const device T* residual, long at, int r, int o) {
  float sum = 0.0f, up = 0.0f;
  for (int s = 0; s < SLICES; ++s) {
    sum += sums[(s * ROWS + r) * COLUMNS + o];
    if (GATED) up += sums[(s * ROWS + r) * COLUMNS + o + COLUMNS / 2];
  }
  store<T, GATED, ADDS>(y, residual, at, sum, up);
}

// Store all columns of the rows from first_row on. By all SIMDGROUPS of a threadgroup.
template <typename T, int ROWS, int SLICES, int SIMDGROUPS, bool GATED, bool ADDS>
inline void store_sums(
    const threadgroup float* sums,  // [SLICES, ROWS, COLUMNS]
    device T* y, const device T* residual, int N, int first, int rows, int first_row, int simdgroup, int lane) {
  constexpr int EACH = GATED ? COLUMNS / 2 : COLUMNS;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int i = simdgroup * 32 + lane; i < ROWS * EACH; i += SIMDGROUPS * 32) {
    const int r = i / EACH, o = i % EACH;
    if (first + o >= N || first_row + r >= rows) continue;
    const long at = static_cast<long>(first_row + r) * N + first + o;
    store_sum<T, ROWS, SLICES, COLUMNS, GATED, ADDS>(sums, y, residual, at, r, o);
  }
}

// Outputs first .. of w [N, K], or half as many of w and `up`, and as many more for the next simdgroup where one has
// them alone. Row r comes from row inputs[r] of x and goes to row outputs[r] of y; where outputs[r] is negative it is
// not stored.
template <typename T, int BITS, int GROUP, int ROWS, int SLICES, bool GATED, bool NORMS, bool ADDS>
inline void product(
    const device T* x, const device void* w,
    const device T* scales,  // [N, K / GROUP]
    const device T* biases, const device void* up, const device T* up_scales, const device T* up_biases, device T* y,
    int N, int K, int first, int, int, const thread int (&inputs)[ROWS], const thread int (&outputs)[ROWS],
    const device float* norm_weight,   // [K], where x is normed
    const threadgroup float* squares,  // likewise, of `sum_squares`
    float eps,
    const device T* residual,  // as y, where it is added
    threadgroup float* sums,   // [SLICES, ROWS, OUTPUTS], where there are several slices
    int simdgroup, int lane) {
  constexpr int EACH = GATED ? OUTPUTS / 2 : OUTPUTS;  // outputs of a row that are stored
  const int slice = SLICES > 1 ? simdgroup : 0;
  if (SLICES == 1) first += EACH * simdgroup;
  float total[ROWS][OUTPUTS], row_scales[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    row_scales[r] = NORMS ? row_scale(squares, r, K, eps) : 1.0f;
    for (int o = 0; o < OUTPUTS; ++o) total[r][o] = 0.0f;
  }

  for (int k = VALUES * (slice * 32 + lane); k < K; k += VALUES * 32 * SLICES) {
    T columns[ROWS][VALUES];
    float column_sums[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const device T* from = x + static_cast<long>(inputs[r]) * K + k;
      column_sums[r] = 0.0f;
      for (int i = 0; i < VALUES; ++i) {
        columns[r][i] = column<NORMS>(from[i], norm_weight, k + i, row_scales[r]);
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
      store<T, GATED, ADDS>(y, residual, at, total[r][o], total[r][(o + EACH) % OUTPUTS]);
    }
  }
  if (SLICES == 1) return;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int r = 0; r < ROWS; ++r) {
    const int o = slice * 32 + lane - r * EACH;
    if (o < 0 || o >= EACH || first + o >= N || outputs[r] < 0) continue;
    const long at = static_cast<long>(outputs[r]) * N + first + o;
    store_sum<T, ROWS, SLICES, OUTPUTS, GATED, ADDS>(sums, y, residual, at, r, o);
  }
}

}  // namespace headstart
