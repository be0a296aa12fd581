// What a hyper-connection makes of its products: one thread per row of (2 + S) S of them.
// MLX passes an array of fewer than eight numbers, as the three of `scale`, as a constant.

namespace headstart {

template <int S>
inline void stream_weights(
    const device float* products, const constant float* scale, const device float* base, int iterations, float eps,
    device float* mean, device float* shares, device float* mixture, int row) {
  const device float* from = products + row * (2 + S) * S;
  for (int s = 0; s < S; ++s) {
    mean[row * S + s] = 1.0f / (1.0f + metal::precise::exp(-(from[s] * scale[0] + base[s]))) + eps;
    shares[row * S + s] = 2.0f / (1.0f + metal::precise::exp(-(from[S + s] * scale[1] + base[S + s])));
  }
  float m[S * S];
  for (int s = 0; s < S; ++s) {
    float most = -INFINITY, sum = 0.0f;
    for (int t = 0; t < S; ++t) {
      const int at = (2 + s) * S + t;
      m[s * S + t] = from[at] * scale[2] + base[at];
      most = metal::max(most, m[s * S + t]);
    }
    for (int t = 0; t < S; ++t) {
      m[s * S + t] = metal::precise::exp(m[s * S + t] - most);
      sum += m[s * S + t];
    }
    for (int t = 0; t < S; ++t) m[s * S + t] = m[s * S + t] / sum + eps;
  }
  for (int n = 0; n < 2 * iterations - 1; ++n)
    for (int s = 0; s < S; ++s) {  // columns first
      float sum = 0.0f;
      for (int t = 0; t < S; ++t) sum += n % 2 ? m[s * S + t] : m[t * S + s];
      for (int t = 0; t < S; ++t) {
        if (n % 2) m[s * S + t] /= sum + eps;
        else m[t * S + s] /= sum + eps;
      }
    }
  for (int i = 0; i < S * S; ++i) mixture[row * S * S + i] = m[i];
}

}  // namespace headstart
