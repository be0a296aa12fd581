// The products of `products.metal` by the matrix units that M5 has, through Metal Performance Primitives of macOS 26.
//
// How a tile's elements lie in the lanes is asked of the primitives, which document no layout. Any number of rows is
// computed in tiles of ROWS, one row too, so that its bits do not depend on their number. A simdgroup multiplies codes,
// exact in 16 bits, block by block of k, which it first copies into the threadgroup's memory; it takes every
// SIMDGROUPS-th block, scales its product, and adds it to the sums of the simdgroup.

#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

namespace headstart {

constant constexpr auto TILE = mpp::tensor_ops::matmul2d_descriptor(
    16, COLUMNS, BLOCK, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply);

template <typename T, int BITS, int GROUP, int ROWS, int SIMDGROUPS, bool GATED, bool NORMS, bool ADDS>
inline void tensor_product(
    const device T* x, const device void* w, const device T* scales, const device T* biases, const device void* up,
    const device T* up_scales, const device T* up_biases, device T* y, int N, int K, int first, int rows,
    int first_row, const thread int (&)[ROWS], const thread int (&)[ROWS], const device float* norm_weight,
    const threadgroup float* squares, float eps, const device T* residual,
    threadgroup float* sums,  // [SIMDGROUPS, ROWS, COLUMNS]
    int simdgroup, int lane,
    threadgroup T* tiles,      // [SIMDGROUPS, ROWS + COLUMNS, BLOCK]
    threadgroup float* lines)  // [SIMDGROUPS, ROWS + 2 * COLUMNS]
{
  constexpr int EACH = GATED ? COLUMNS / 2 : COLUMNS;
  threadgroup T* left = tiles + simdgroup * (ROWS + COLUMNS) * BLOCK;
  threadgroup T* right = left + ROWS * BLOCK;
  threadgroup float* row_sums = lines + simdgroup * (ROWS + 2 * COLUMNS);
  threadgroup float* column_scales = row_sums + ROWS;
  threadgroup float* column_biases = column_scales + COLUMNS;
  const metal::dextents<int, 2> row_tile(BLOCK, ROWS), column_tile(BLOCK, COLUMNS);
  metal::tensor<threadgroup T, metal::dextents<int, 2>, metal::tensor_inline> a(left, row_tile);
  metal::tensor<threadgroup T, metal::dextents<int, 2>, metal::tensor_inline> b(right, column_tile);
  mpp::tensor_ops::matmul2d<TILE, metal::execution_simdgroup> multiply;
  auto made = multiply.template get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  auto total = multiply.template get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
  for (ushort i = 0; i < total.get_capacity(); ++i) total[i] = 0.0f;

  // A lane copies half a block of a row, and a block of a column.
  const int r = lane % ROWS, half_block = lane / ROWS * (BLOCK / 2);
  const device T* from = x + static_cast<long>(metal::min(first_row + r, rows - 1)) * K;
  const float scale = NORMS ? row_scale(squares, r, K, eps) : 1.0f;
  const bool gates = lane < EACH;
  const long output = metal::min(first + lane % EACH, N - 1);
  for (int k = BLOCK * simdgroup; k < K; k += BLOCK * SIMDGROUPS) {
    float sum = 0.0f;
    for (int i = half_block; i < half_block + BLOCK / 2; ++i) {
      const T value = column<NORMS>(from[k + i], norm_weight, k + i, scale);
      left[r * BLOCK + i] = value;
      sum += static_cast<float>(value);
    }
    row_sums[r] = sum + metal::simd_shuffle_xor(sum, static_cast<ushort>(ROWS));
    const long position = output * K + k;
    float weights[BLOCK];
    read_weights<T, BITS>(static_cast<const device char*>(gates ? w : up) + position * BITS / 8, weights);
    for (int i = 0; i < BLOCK; ++i) right[lane * BLOCK + i] = static_cast<T>(weights[i]);
    if (BITS < 16) {
      column_scales[lane] = static_cast<float>(gates ? scales[position / GROUP] : up_scales[position / GROUP]);
      column_biases[lane] = static_cast<float>(gates ? biases[position / GROUP] : up_biases[position / GROUP]);
    }
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    multiply.run(a, b, made);
    for (ushort i = 0; i < total.get_capacity(); ++i) {
      if (!total.is_valid_element(i)) continue;
      const auto at = total.get_multidimensional_index(i);
      const float before = BITS < 16 ? metal::fma(column_biases[at[0]], row_sums[at[1]], total[i]) : total[i];
      total[i] = metal::fma(BITS < 16 ? column_scales[at[0]] : 1.0f, made[i], before);
    }
    metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  for (ushort i = 0; i < total.get_capacity(); ++i) {
    if (!total.is_valid_element(i)) continue;
    const auto at = total.get_multidimensional_index(i);
    sums[(simdgroup * ROWS + at[1]) * COLUMNS + at[0]] = total[i];
  }
  store_sums<T, ROWS, SIMDGROUPS, SIMDGROUPS, GATED, ADDS>(
      sums, y, residual, N, first, rows, first_row, simdgroup, lane);
}

}  // namespace headstart
