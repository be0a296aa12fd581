// Functions that C libraries round differently, out of operations that are rounded alike everywhere.
//
// They are written without branches, so that compilers turn loops over them into vector code.
#pragma once

#include <cstdint>
#include <cstring>

namespace headstart {

// a · b + c, rounded once.
inline float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

// e^x to two units in the last place; 0 below -87, e^88 above 88.
[[gnu::always_inline]] inline float exponential(float x) {
  float y = x < -87.0f ? -87.0f : x;
  y = y > 88.0f ? 88.0f : y;
  const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, which lies in the lower bits
  const float shifted = fused(y, 1.44269504088896341f, magic), n = shifted - magic;
  float r = fused(n, -0.693359375f, y);
  r = fused(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fused(p, r, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = fused(p * r, r, r) + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits - 0x4b400000u + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return x < -87.0f ? 0.0f : p * scale;
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + exponential(-x));
}

inline float silu(float x) {
  return x * sigmoid(x);
}

// log(1 + e^x). With u = e^-|x|, log(1 + u) = 2 · atanh(u / (2 + u)), whose argument is at most a third.
inline float softplus(float x) {
  const double u = exponential(x > 0.0f ? -x : x), s = u / (2.0 + u), square = s * s;
  double sum = 1.0 / 19;
  for (int n = 17; n >= 1; n -= 2) sum = sum * square + 1.0 / n;
  return (x > 0.0f ? x : 0.0f) + float(2.0 * s * sum);
}

// Sine and cosine of an angle below 2^30, in double up to the last rounding.
inline void sine_and_cosine(float angle, float& sine, float& cosine) {
  const double magic = 6755399441055744.0;  // 1.5 · 2^52
  const double x = angle, quarters = (x * 0.63661977236758134308 + magic) - magic;
  const double r = (x - quarters * 1.5707963267341256) - quarters * 6.0771005065061922e-11;  // π/2 in two parts
  const double square = r * r;
  double s = -2.5052108385441720e-08, c = 2.0876756987868100e-09;
  s = s * square + 2.7557319223985893e-06, c = c * square - 2.7557319223985888e-07;
  s = s * square - 1.9841269841269841e-04, c = c * square + 2.4801587301587302e-05;
  s = s * square + 8.3333333333333333e-03, c = c * square - 1.3888888888888889e-03;
  s = s * square - 1.6666666666666667e-01, c = c * square + 4.1666666666666667e-02;
  s = s * square * r + r, c = (c * square - 0.5) * square + 1.0;
  const long long quadrant = (long long)quarters & 3;
  const double a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
  sine = float(quadrant & 2 ? -a : a);
  cosine = float((quadrant + 1) & 2 ? -b : b);
}

}  // namespace headstart
