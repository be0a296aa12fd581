// What a hyper-connection makes of its products: one thread per row of (2 + S) S of them.

namespace headstart {

template <int S>
__device__ __forceinline__ void stream_weights(
    const float* products, const float* scale, const float* base, int iterations, float eps,
    float* mean, float* shares, float* mixture, int row) {
  const float* from = products + row * (2 + S) * S;
  for (int s = 0; s < S; ++s) {
    mean[row * S + s] = 1.0f / (1.0f + expf(-(from[s] * scale[0] + base[s]))) + eps;
    shares[row * S + s] = 2.0f / (1.0f + expf(-(from[S + s] * scale[1] + base[S + s])));
  }
  float m[S * S];
  for (int s = 0; s < S; ++s) {
    float most = -INFINITY, sum = 0.0f;
    for (int t = 0; t < S; ++t) {
      const int at = (2 + s) * S + t;
      m[s * S + t] = from[at] * scale[2] + base[at];
      most = fmaxf(most, m[s * S + t]);
    }
    for (int t = 0; t < S; ++t) {
      m[s * S + t] = expf(m[s * S + t] - most);
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
