// Helpers shared by the kernels.
//
// Every kernel sums in an order that depends on the shapes of the weights alone, written out with fma and shuffles.
// Together with math_mode "safe", which forbids reordering, a row has the same bits whatever runs beside it.

#pragma METAL fp contract(off)

namespace headstart {

// Sum over the 32 lanes of a simdgroup; every lane gets it.
inline float sum_over_simdgroup(float x) {
  for (ushort step = 1; step < 32; step *= 2) x += metal::simd_shuffle_xor(x, step);
  return x;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + metal::precise::exp(-x)); }

}  // namespace headstart
