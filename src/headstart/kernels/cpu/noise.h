// Counter-based random numbers, as sampling/noise.py has them.
#pragma once

#include <cmath>
#include <cstdint>

namespace headstart {

// What noise is keyed by.
struct Keys {
  uint32_t first, second;
};

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline Keys fold(Keys keys, uint32_t word) {
  return {mix(keys.first ^ (word * 0x9e3779b9u)), mix(keys.second + mix(word ^ keys.first))};
}

// In (0, 1).
inline float unit(Keys keys, uint32_t id) {
  const float word = float(mix(mix(keys.first ^ id) + keys.second)), u = (word + 0.5f) * 0x1p-32f;
  return u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f;
}

// By the C library's logarithms, as MLX has it: the same token is drawn, to the last bit.
inline float gumbel(float unit) {
  return -std::log(-std::log1p(-unit));
}

}  // namespace headstart
