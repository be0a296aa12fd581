// What is made of tokens before the first product: rows of an embedding and their norms. A block per row.

namespace headstart {

// Write row `token` of an embedding of D elements, each rounded once, as MLX's is. Each thread writes the elements that
// it reads in `norm_row`.
template <int D, int THREADS, typename F, typename T, typename Word>
__device__ __forceinline__ void embed_row(
    int token, const Word* weight, const typename F::Scale* scales, const typename F::Scale* biases, T* out) {
  const long long row = static_cast<long long>(token) * D;
  for (int at = 8 * threadIdx.x; at < D; at += 8 * THREADS) {
    Eight<T> here;
    if constexpr (!F::QUANTISED) {
      here = *reinterpret_cast<const Eight<T>*>(weight + row + at);
    } else {
      float numbers[8], scale;
      eight_codes<F>(reinterpret_cast<const unsigned char*>(weight), scales, (row + at) / 8, numbers, scale);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if constexpr (cuda::std::is_same_v<T, typename F::Scale>)
          here.at[j] = __hfma(T(scale), T(numbers[j]), biases[(row + at) / F::GROUP]);
        else
          here.at[j] = T(fmaf(numbers[j], scale, F::HAS_BIASES ? float(biases[(row + at) / F::GROUP]) : 0.0f));
      }
    }
    *reinterpret_cast<Eight<T>*>(out + at) = here;
  }
}

template <int D, int THREADS, typename T>
__device__ __forceinline__ void norm_alone(const T* x, const float* weight, float eps, T* normed) {
  auto none = [](int) { return Eight<T>{}; };
  norm_row<D, THREADS, false>(Team::block(0, 1), x, none, weight, eps, static_cast<T*>(nullptr), normed);
}

// x = embedding of tokens [rows], and its norm.
template <int D, int THREADS, typename F, typename T, typename Word>
__device__ void embed(
    const int* tokens, const Word* weight, const typename F::Scale* scales, const typename F::Scale* biases,
    const float* norm, float eps, T* x, T* normed) {
  const long long row = static_cast<long long>(blockIdx.x) * D;
  embed_row<D, THREADS, F>(tokens[blockIdx.x], weight, scales, biases, x + row);
  norm_alone<D, THREADS>(x + row, norm, eps, normed + row);
}

// out [rows, 2, D] = the norms of the tokens' embedding and of `hidden` [rows, D], or the other way round.
template <int D, int THREADS, typename F, bool EMBEDDING_FIRST, typename T, typename Word>
__device__ void draft_input(
    const int* tokens, const T* hidden, const Word* weight, const typename F::Scale* scales,
    const typename F::Scale* biases, const float* norm, float eps, const float* hidden_norm, float hidden_eps, T* out) {
  T* const half = out + (2ll * blockIdx.x + blockIdx.y) * D;
  if (blockIdx.y == (EMBEDDING_FIRST ? 0 : 1)) {
    embed_row<D, THREADS, F>(tokens[blockIdx.x], weight, scales, biases, half);
    norm_alone<D, THREADS>(half, norm, eps, half);
  } else {
    norm_alone<D, THREADS>(hidden + static_cast<long long>(blockIdx.x) * D, hidden_norm, hidden_eps, half);
  }
}

}  // namespace headstart
