// The products of a prompt's attention: a tile of queries by tiles of keys and values, all in shared memory, in panels as
// warpgroup.cu has them. In WARPGROUPS they run on while the warps do, until they are waited for; else mma.sync.

namespace headstart {

constexpr int ROWS = 128, KEYS = 64;
constexpr int READERS = 8;  // warps, of sixteen queries each
constexpr int PANEL = 64;   // columns of a panel, see warpgroup.cu

template <int D>
constexpr int PANELS = (D + PANEL - 1) / PANEL;

// The unit of 16 bytes of a tile's line where `column` begins.
template <typename T, int LINES>
__device__ __forceinline__ T* unit_of(T* tile, int line, int column) {
  return tile + (column / PANEL * LINES + line) * PANEL + ((column / 8 % 8) ^ (line % 8)) * 8;
}

// LINES of D elements into a tile. A thread copies 16 bytes of lines `first` + i, from `place_of(i)`, all at its column.
// Lines that are not `there` are zero.
template <int D, int LINES>
struct LineCopy {
  static constexpr int UNITS = PANELS<D> * PANEL / 8, AT_ONCE = 32 / UNITS;  // of a line; lines of a warp
  int first, column;

  __device__ __forceinline__ LineCopy()
      : first(threadIdx.x / 32 * AT_ONCE + threadIdx.x % 32 / UNITS), column(8 * (threadIdx.x % 32 % UNITS)) {}

  template <typename T, typename Place>
  __device__ __forceinline__ void run(T* tile, Place place_of, int there) const {
    if (AT_ONCE * UNITS < 32 && threadIdx.x % 32 >= AT_ONCE * UNITS) return;
    T* const to = unit_of<T, LINES>(tile, first, column);  // of a line that is a multiple of 8 further, as much further
    there = D % PANEL == 0 || column < D ? there - first : 0;
#pragma unroll
    for (int i = 0; i < LINES; i += READERS * AT_ONCE) {
      copy_16_bytes(to + i * PANEL, place_of(i), i < there ? 16 : 0);
    }
  }
};

// Of sixteen queries of each warp and a step's keys.
template <int D, bool WARPGROUPS, typename T>
__device__ __forceinline__ void begin_scores(float (&scores)[KEYS / 8][4], const T* queries, const T* keys) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (WARPGROUPS) {
    const int group = __shfl_sync(0xffffffffu, warp / 4, 0);  // the same in all lanes, and the compiler knows it
    const unsigned long long a = describe_panel(queries + group * 64 * PANEL), b = describe_panel(keys);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
      const int unit = k % PANEL / 8;
      multiply_panels<T>(scores, a + k / PANEL * ROWS * 8 + unit, b + k / PANEL * KEYS * 8 + unit, k > 0);
    }
    commit_products();
  } else {
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[j][e] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < D; k += 16) {
      uint32_t a[4], b[4];
      load_matrices_4(a, unit_of<const T, ROWS>(queries, 16 * warp + lane % 16, k + 8 * (lane / 16)));
#pragma unroll
      for (int j = 0; j < KEYS / 8; j += 2) {
        load_matrices_4(b, unit_of<const T, KEYS>(keys, 8 * j + lane % 8 + 8 * (lane / 16), k + 8 * (lane / 8 % 2)));
        multiply<T>(scores[j], a, {b[0], b[1]});
        multiply<T>(scores[j + 1], a, {b[2], b[3]});
      }
    }
  }
}

// sum += p · values.
template <int D, bool WARPGROUPS, typename T>
__device__ __forceinline__ void begin_sum(
    float (&sum)[PANELS<D> * PANEL / 8][4], const uint32_t (&p)[KEYS / 16][4], const T* values) {
  const int lane = threadIdx.x % 32;
  if constexpr (WARPGROUPS) {
    const unsigned long long b = describe_panel(values, KEYS * PANEL * 2);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) multiply_by_panels<T>(sum, p[k], b + k * 16 * 8);
    commit_products();
  } else {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
      for (int j = 0; j < D / 8; j += 2) {
        uint32_t b[4];
        load_matrices_4_transposed(b, unit_of<const T, KEYS>(values, 16 * k + lane % 16, 8 * j + 8 * (lane / 16)));
        multiply<T>(sum[j], p[k], {b[0], b[1]});
        multiply<T>(sum[j + 1], p[k], {b[2], b[3]});
      }
  }
}

}  // namespace headstart
