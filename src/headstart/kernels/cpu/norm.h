// RMS norm with a float32 weight, with the residual's addition before it.
#pragma once

#include <vector>

#include "lanes.h"
#include "pool.h"

namespace headstart {

template <typename T>
void norm(const T* x, const T* added, const float* weight, float eps, long rows, long D, T* total, T* out) {
  constexpr long SOME = 16;  // rows of a part
  pool().run((rows + SOME - 1) / SOME, [&](uint32_t part) {
    static thread_local std::vector<float> memory;
    memory.resize(D);
    float* row = memory.data();
    for (long r = part * SOME; r < std::min<long>(rows, (part + 1) * SOME); ++r) {
      const T* from = x + r * D;
      if (added) {
        for (long i = 0; i < D; ++i) assign(total[r * D + i], to_float(from[i]) + to_float(added[r * D + i]));
        from = total + r * D;
      }
      for (long i = 0; i < D; ++i) row[i] = to_float(from[i]);
      const float scale = 1.0f / std::sqrt(dot(row, row, D) / float(D) + eps);
      for (long i = 0; i < D; ++i) assign(out[r * D + i], (row[i] * scale) * weight[i]);
    }
  });
}

}  // namespace headstart
