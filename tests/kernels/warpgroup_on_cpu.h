// What src/headstart/kernels/cuda/warpgroup.cu says in PTX, for cuda_on_cpu.h. Products read and write when they are
// waited for, as late as they may.

namespace headstart {
inline void show_to_tensor_cores() {}
inline void begin_products() {}
template <typename X>
void hold(X&) {}
inline void commit_products() { ++self->product_groups; }
template <int N>
void wait_for_products() {
  run_products(N);
}
inline unsigned long long describe_panel(const void* begin, int next = 0) {
  const auto place = static_cast<unsigned long long>(static_cast<const unsigned char*>(begin) - shared_room);
  return 1ull << 62 | 1024ull / 16 << 32 | static_cast<unsigned long long>(next / 16) << 16 | place / 16;
}
// The element of a tile at `across` of its rows (or columns, if those lie side by side) and `k`, as the PTX manual
// lays it out with a swizzle of 128 bytes.
template <typename T>
double tile_element(unsigned long long described, int across, int k, bool side_by_side) {
  auto field = [&](int bit) { return int(described >> bit & 0x3FFF) * 16; };
  const int line = side_by_side ? k : across, column = side_by_side ? across % 64 : k;
  int place = field(0) + line / 8 * field(32) + line % 8 * 128 + column * 2;
  if (side_by_side) place += across / 64 * field(16);
  uint16_t bits;
  std::memcpy(&bits, shared_room + (place ^ (place >> 7 & 7) << 4), 2);
  return half_of<T>(bits, 0);
}
template <typename T>
void multiply_panels(float (&c)[8][4], unsigned long long a, unsigned long long b, bool adds) {
  const int row0 = threadIdx.x / 32 % 4 * 16 + self->lane / 4, column0 = 2 * (self->lane % 4);
  run_later([=, &c] {
    for (int j = 0; j < 8; ++j)
      for (int e = 0; e < 4; ++e) {
        float sum = adds ? c[j][e] : 0.0f;
        for (int k = 0; k < 16; ++k)
          sum = float(tile_element<T>(a, row0 + e / 2 * 8, k, false) *
                      tile_element<T>(b, 8 * j + column0 + e % 2, k, false) + sum);
        c[j][e] = sum;
      }
  });
}
template <typename T, bool SIDE_BY_SIDE, int N>
void multiply_later(float (&c)[N][4], const uint32_t (&a)[4], unsigned long long b) {
  run_later([=, &c, &a] {
    Warp& warp = *self->warp;
    for (int i = 0; i < 4; ++i) warp.words[self->lane][i] = a[i];
    __syncwarp();
    double left[2][16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k)
        left[half][k] = half_of<T>(warp.words[self->lane / 4 * 4 + k % 8 / 2][half + 2 * (k / 8)], k % 2);
    for (int j = 0; j < N; ++j)
      for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
          const double right = tile_element<T>(b, 8 * j + 2 * (self->lane % 4) + e % 2, k, SIDE_BY_SIDE);
          c[j][e] = float(left[e / 2][k] * right + c[j][e]);
        }
    __syncwarp();
  });
}
template <typename T, int N>
void multiply_by_panels(float (&c)[N][4], const uint32_t (&a)[4], unsigned long long b) {
  multiply_later<T, true>(c, a, b);
}
template <typename T, int N>
void multiply_by_lines(float (&c)[N][4], const uint32_t (&a)[4], unsigned long long b) {
  multiply_later<T, false>(c, a, b);
}
}  // namespace headstart
