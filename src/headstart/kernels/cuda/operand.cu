// Inputs of products, and how what computes them leaves them there.

namespace headstart {

// An element of an input that only products with 4-bit weights read, in bfloat16: what each of them would make of it
// first (see products.cu). Of every eight elements the order is 0 4 1 5 2 6 3 7, even ones are multiplied by 2⁶⁰, odd
// ones by 2⁵⁶.
template <typename T>
struct Ready {
  T value;
};

template <typename T>
__device__ __forceinline__ Ready<T>* ready(T* input) {
  return reinterpret_cast<Ready<T>*>(input);
}

template <typename T>
__device__ __forceinline__ void leave(T* input, long long i, T value) {
  input[i] = value;
}

template <typename T>
__device__ __forceinline__ void leave(Ready<T>* input, long long i, T value) {
  const int j = int(i) & 7;
  input[i - j + 2 * (j & 3) + j / 4].value = T(float(value) * (j & 1 ? 0x1p56f : 0x1p60f));
}

}  // namespace headstart
