// The matrices of a launch, cut into tiles of TALL · 16 rows.

namespace headstart {

// One of the matrices of a launch, [N, K], and where its product goes. With `up` it is a gate, and the product is
// silu(gate) · up: such a tile has sixteen rows of each. With `residual` the product is added to that.
template <typename T, typename Y = T>
struct Matrix {
  const void *w, *scales, *biases;
  int N;
  Y* y;
  const void *up = nullptr, *up_scales = nullptr, *up_biases = nullptr;
  const T* residual = nullptr;
  const float *whole = nullptr, *up_whole = nullptr; // a scale for all of its numbers
};

// What a tile is of: a matrix, of which it takes the rows from `first` on; of a gate's, 16 · TALL / 2.
template <typename M>
struct Part : M {
  int first;
};

template <int TALL, typename M>
__device__ __forceinline__ int count_tiles(const M& matrix) {
  const int each = matrix.up ? 8 * TALL : 16 * TALL;
  return (matrix.N + each - 1) / each;
}

// The first row of a tile. With WHOLE tiles the last one ends where the matrix ends, and repeats some of the rows of the
// one before it.
template <int TALL, bool WHOLE, typename M>
__device__ __forceinline__ int first_row(const M& matrix, int tile) {
  const int each = matrix.up ? 8 * TALL : 16 * TALL;
  return WHOLE ? min(tile * each, matrix.N - each) : tile * each;
}

// Tile number `tile` of several matrices, one after the other.
template <int TALL, bool WHOLE, typename M, int COUNT>
__device__ __forceinline__ Part<M> tile_of(const M (&matrices)[COUNT], int tile) {
  Part<M> part = {matrices[0], 0};
#pragma unroll
  for (int i = 1; i < COUNT; i++) {
    const int before = count_tiles<TALL>(part);
    if (tile < before) break;
    tile -= before, part = {matrices[i], 0};
  }
  part.first = first_row<TALL, WHOLE>(part, tile);
  return part;
}

template <typename T>
__device__ __forceinline__ T swiglu(float gate, float up) {
  gate = float(T(gate)), up = float(T(up));
  return T(__fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up));
}

} // namespace headstart
