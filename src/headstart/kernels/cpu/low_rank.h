// What adapters of sequences add to a product: two products of low rank for every row, in float32.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "math.h"
#include "pool.h"

namespace headstart {

// `down · x` of every row of the output, for those whose sequence has an adapter: [rows · top, R].
template <typename T>
class LowRank {
 public:
  LowRank(const Product<T>& op, const Adapters& adapters) : op_(op), adapters_(adapters) {
    if (!adapters.slots) return;
    const long rows = op.rows * op.top, blocks = (rows + ROWS_OF_A_BLOCK - 1) / ROWS_OF_A_BLOCK;
    const long parts = blocks * ((adapters.R + SOME - 1) / SOME);
    made_.resize(rows * adapters.R);
    auto compute = [&](uint32_t part) { shrink(part % blocks * ROWS_OF_A_BLOCK, part / blocks * SOME); };
    if (rows * adapters.R * op.K >= LEAST_WORK) pool().run(parts, compute);
    else for (long part = 0; part < parts; ++part) compute(part);
  }

  // Add to `count` outputs of a row from `n` on, of N.
  void add(long row, long n, long count, long N, float* __restrict out) const {
    if (!adapters_.slots) return;
    const long at = matrix(row), R = adapters_.R;
    if (at < 0) return;
    for (long j = 0; j < rank(at); ++j) {
      const float by = made_[row * R + j];
      const float* __restrict up = adapters_.up + (at * R + j) * N + n;
      for (long c = 0; c < count; ++c) out[c] = fused(by, up[c], out[c]);
    }
  }

 private:
  // Outputs and rows of a part, which share a reading of `down`; what is worth another thread.
  static constexpr long SOME = 4, ROWS_OF_A_BLOCK = 16, LEAST_WORK = 1 << 13;

  // Which of the matrices a row is multiplied with, -1 for none.
  long matrix(long row) const {
    const long slot = adapters_.slots[row / op_.top * adapters_.B / op_.rows];
    return slot < 0 ? -1 : slot * adapters_.experts + (op_.experts ? op_.experts[row] : 0);
  }

  long rank(long matrix) const {
    return adapters_.ranks[matrix / adapters_.experts];
  }

  void shrink(long first_row, long first) {
    const long R = adapters_.R, K = op_.K, rows = std::min(ROWS_OF_A_BLOCK, op_.rows * op_.top - first_row);
    static thread_local std::vector<float> x;
    x.resize(rows * K);
    for (long r = 0; r < rows; ++r)
      for (long k = 0; k < K; ++k) x[r * K + k] = to_float(op_.x[(first_row + r) / op_.top * K + k]);
    for (long j = first; j < std::min(first + SOME, R); ++j)
      for (long r = 0; r < rows; ++r)
        if (const long at = matrix(first_row + r); at >= 0 && j < rank(at))
          made_[(first_row + r) * R + j] = dot(&x[r * K], adapters_.down + (at * R + j) * K, K);
  }

  const Product<T>& op_;
  const Adapters& adapters_;
  std::vector<float> made_;
};

}  // namespace headstart
