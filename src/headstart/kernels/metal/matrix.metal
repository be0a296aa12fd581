// The products of `products.metal` on 8 by 8 matrices: for three rows and more by the units of a GPU that multiply them,
// for one and two by a kernel with the same multiply-adds in the same order. So the bits of a row do not depend on how
// many there are; that the units sum in this order is checked on the machine, not promised by anyone.
//
// k is cut into blocks of BLOCK positions; slice s takes blocks s, s + CHAINS, ... A block is one chain of
// multiply-adds, from zero: step s of STEPS has positions s, s + STEPS, ... of it. That makes the weights that a lane
// has in all steps neighbours. Codes are whole numbers below 2^24, exact as float. The block's sum is then scaled and
// added to the slice's, and last the slices are added up in their order.

#include <metal_simdgroup_matrix>

namespace headstart {

constant constexpr int STEPS = BLOCK / 8;
constant constexpr int CHAINS = 8;  // slices of k
constant constexpr int LINES = COLUMNS / 8;

// One or two rows: a lane has a slice of LINES columns, and a simdgroup four times that.
template <typename T, int BITS, int GROUP, int ROWS, int SIMDGROUPS, bool GATED, bool NORMS, bool ADDS>
inline void chained_product(
    const device T* x, const device void* w, const device T* scales, const device T* biases, const device void* up,
    const device T* up_scales, const device T* up_biases, device T* y, int N, int K, int first, int rows,
    int first_row, const thread int (&inputs)[ROWS], const thread int (&)[ROWS], const device float* norm_weight,
    const threadgroup float* squares, float eps, const device T* residual,
    threadgroup float* sums,  // [CHAINS, ROWS, COLUMNS]
    int simdgroup, int lane) {
  constexpr int EACH = GATED ? COLUMNS / 2 : COLUMNS;
  const int slice = lane % CHAINS, slot = simdgroup * (32 / CHAINS) + lane / CHAINS;
  float total[ROWS][LINES], row_scales[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    row_scales[r] = NORMS ? row_scale(squares, r, K, eps) : 1.0f;
    for (int c = 0; c < LINES; ++c) total[r][c] = 0.0f;
  }
  for (int k = BLOCK * slice; k < K; k += BLOCK * CHAINS) {
    T columns[ROWS][BLOCK];
    float column_sums[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      const device T* from = x + static_cast<long>(inputs[r]) * K + k;
      float parts[8];  // by element of a step, then in pairs, as lanes add them up
      for (int j = 0; j < 8; ++j) {
        parts[j] = 0.0f;
        for (int i = STEPS * j; i < STEPS * (j + 1); ++i) {
          columns[r][i] = column<NORMS>(from[i], norm_weight, k + i, row_scales[r]);
          parts[j] += static_cast<float>(columns[r][i]);
        }
      }
      column_sums[r] =
          ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }
    for (int c = 0; c < LINES; ++c) {
      const bool gates = 8 * c < EACH;
      const long output = metal::min(first + (8 * c + slot) % EACH, N - 1);
      const long position = output * K + k;
      float weights[BLOCK];
      read_weights<T, BITS>(static_cast<const device char*>(gates ? w : up) + position * BITS / 8, weights);
      float scale = 1.0f, bias = 0.0f;
      if (BITS < 16) {
        scale = static_cast<float>(gates ? scales[position / GROUP] : up_scales[position / GROUP]);
        bias = static_cast<float>(gates ? biases[position / GROUP] : up_biases[position / GROUP]);
      }
      for (int r = 0; r < ROWS; ++r) {
        float sum = 0.0f;
        for (int s = 0; s < STEPS; ++s)
          for (int i = s; i < BLOCK; i += STEPS) sum = metal::fma(weights[i], static_cast<float>(columns[r][i]), sum);
        const float before = BITS < 16 ? metal::fma(bias, column_sums[r], total[r][c]) : total[r][c];
        total[r][c] = metal::fma(scale, sum, before);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < LINES; ++c) sums[(slice * ROWS + r) * COLUMNS + 8 * c + slot] = total[r][c];
  store_sums<T, ROWS, CHAINS, SIMDGROUPS, GATED, ADDS>(
      sums, y, residual, N, first, rows, first_row, simdgroup, lane);
}

// ROWS rows, whole tiles of 8, from first_row on. A simdgroup has a slice of all columns. Where a pipeline takes fewer
// threads there are fewer simdgroups, and each has several slices.
template <typename T, int BITS, int GROUP, int ROWS, int SIMDGROUPS, bool GATED, bool NORMS, bool ADDS>
inline void matrix_product(
    const device T* x, const device void* w, const device T* scales, const device T* biases, const device void* up,
    const device T* up_scales, const device T* up_biases, device T* y, int N, int K, int first, int rows,
    int first_row, const thread int (&)[ROWS], const thread int (&)[ROWS], const device float* norm_weight,
    const threadgroup float* squares, float eps, const device T* residual,
    threadgroup float* sums,  // [CHAINS, ROWS, COLUMNS]
    int simdgroup, int lane) {
  constexpr int EACH = GATED ? COLUMNS / 2 : COLUMNS, TILES = ROWS / 8;
  // A lane has two elements of a matrix: [line, pair] and [line, pair + 1]. Apple documents that nowhere; MLX's own
  // products rely on it (steel/gemm/mma.h).
  const int line = lane / 16 * 4 + lane / 2 % 4, pair = lane / 8 % 2 * 4 + lane % 2 * 2;
  float row_scales[TILES][2];
  for (int t = 0; t < TILES; ++t)
    for (int e = 0; e < 2; ++e) row_scales[t][e] = NORMS ? row_scale(squares, 8 * t + pair + e, K, eps) : 1.0f;

  for (int slice = simdgroup; slice < CHAINS; slice += SIMDGROUPS) {
    float total[TILES][LINES][2];
    for (int t = 0; t < TILES; ++t)
      for (int c = 0; c < LINES; ++c) total[t][c][0] = total[t][c][1] = 0.0f;
    for (int k = BLOCK * slice; k < K; k += BLOCK * CHAINS) {
      float values[TILES][2][STEPS], column_sums[TILES][2];
      for (int t = 0; t < TILES; ++t) {
        for (int e = 0; e < 2; ++e) {
          const int row = metal::min(first_row + 8 * t + pair + e, rows - 1), at = k + STEPS * line;
          const device T* from = x + static_cast<long>(row) * K + at;
          float sum = 0.0f;
          for (int s = 0; s < STEPS; ++s) {
            values[t][e][s] = static_cast<float>(column<NORMS>(from[s], norm_weight, at + s, row_scales[t][e]));
            sum += values[t][e][s];
          }
          sum += metal::simd_shuffle_xor(sum, static_cast<ushort>(2));  // over the lines
          sum += metal::simd_shuffle_xor(sum, static_cast<ushort>(4));
          sum += metal::simd_shuffle_xor(sum, static_cast<ushort>(16));
          column_sums[t][e] = sum;
        }
      }
      for (int c = 0; c < LINES; ++c) {
        const bool gates = 8 * c < EACH;
        const long output = metal::min(first + (8 * c + line) % EACH, N - 1);
        const long position = output * K + k + STEPS * pair;
        float weights[2 * STEPS];
        read_weights<T, BITS>(static_cast<const device char*>(gates ? w : up) + position * BITS / 8, weights);
        metal::simdgroup_matrix<float, 8, 8> made[TILES];
        for (int t = 0; t < TILES; ++t) made[t].thread_elements()[0] = made[t].thread_elements()[1] = 0.0f;
        for (int s = 0; s < STEPS; ++s) {
          metal::simdgroup_matrix<float, 8, 8> left, right;
          left.thread_elements()[0] = weights[s];
          left.thread_elements()[1] = weights[STEPS + s];
          for (int t = 0; t < TILES; ++t) {
            right.thread_elements()[0] = values[t][0][s];
            right.thread_elements()[1] = values[t][1][s];
            metal::simdgroup_multiply_accumulate(made[t], left, right, made[t]);
          }
        }
        float scale = 1.0f, bias = 0.0f;
        if (BITS < 16) {
          scale = static_cast<float>(gates ? scales[position / GROUP] : up_scales[position / GROUP]);
          bias = static_cast<float>(gates ? biases[position / GROUP] : up_biases[position / GROUP]);
        }
        for (int t = 0; t < TILES; ++t) {
          for (int e = 0; e < 2; ++e) {
            const float before = BITS < 16 ? metal::fma(bias, column_sums[t][e], total[t][c][e]) : total[t][c][e];
            total[t][c][e] = metal::fma(scale, made[t].thread_elements()[e], before);
          }
        }
      }
    }
    for (int t = 0; t < TILES; ++t)
      for (int c = 0; c < LINES; ++c)
        for (int e = 0; e < 2; ++e)
          sums[(slice * ROWS + 8 * t + pair + e) * COLUMNS + 8 * c + line] = total[t][c][e];
  }
  store_sums<T, ROWS, CHAINS, SIMDGROUPS, GATED, ADDS>(
      sums, y, residual, N, first, rows, first_row, simdgroup, lane);
}

}  // namespace headstart
