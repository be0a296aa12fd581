// A quantised matrix as it is multiplied by many rows: dequantised, for a product of its own.

namespace headstart {

// Eight weights [.., 8·i, 8·i + 8): scale · code + bias, rounded once.
template <typename F, typename T>
__device__ __forceinline__ void dequantise_eight(
    const unsigned char* codes, const typename F::Scale* scales, const typename F::Scale* biases, T* out, long long i) {
  float numbers[8], scale;
  eight_codes<F>(codes, scales, i, numbers, scale);
  const float bias = F::HAS_BIASES ? float(biases[i * 8 / F::GROUP]) : 0.0f;
  struct alignas(16) Eight {
    T at[8];
  } made;
#pragma unroll
  for (int j = 0; j < 8; ++j) made.at[j] = T(fmaf(numbers[j], scale, bias));
  *reinterpret_cast<Eight*>(out + 8 * i) = made;
}

}  // namespace headstart
