// A quantised matrix as it is multiplied by many rows: dequantised, for a product of its own.

namespace headstart {

// Eight weights [.., 8·i, 8·i + 8), whose codes are BITS bytes in a row: scale · code + bias, rounded once.
template <int BITS, int GROUP, typename T>
__device__ __forceinline__ void dequantise_eight(
    const unsigned char* codes, const T* scales, const T* biases, T* out, long long i) {
  const unsigned char* from = codes + i * BITS;
  unsigned long long bits = 0;
  if constexpr (BITS == 8)
    bits = *reinterpret_cast<const unsigned long long*>(from);
  else if constexpr (BITS == 4)
    bits = *reinterpret_cast<const uint32_t*>(from);
  else
#pragma unroll
    for (int byte = 0; byte < BITS; ++byte) bits |= (unsigned long long)from[byte] << (8 * byte);
  const float scale = float(scales[i * 8 / GROUP]), bias = float(biases[i * 8 / GROUP]);
  struct alignas(16) Eight {
    T at[8];
  } made;
#pragma unroll
  for (int j = 0; j < 8; ++j) made.at[j] = T(fmaf(float(int(bits >> (BITS * j) & ((1 << BITS) - 1))), scale, bias));
  *reinterpret_cast<Eight*>(out + 8 * i) = made;
}

}  // namespace headstart
