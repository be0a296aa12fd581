// Floating-point numbers of four and eight bits, as codes of weights and as scales.
//
// An E4M3 is read as the float16 with its bits in the upper places, which is 2^8 smaller: 256 times the result is exact.
#pragma once

#include "lanes.h"

namespace headstart {

// A sign, four bits of exponent, three of mantissa.
struct e4m3 {
  uint8_t bits;
};
// A power of two.
struct e8m0 {
  uint8_t bits;
};

// The number over 256.
inline float to_float(e4m3 x) {
  return to_float(half{uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
inline float to_float(e8m0 x) {
  const uint32_t bits = x.bits ? uint32_t(x.bits) << 23 : 0x400000;  // 2^-127 is no normal number
  float made;
  std::memcpy(&made, &bits, 4);
  return made;
}

// A sign, two bits of exponent, one of mantissa: the lowest bits of every lane.
inline Floats e2m1(Bits codes) {
#if !defined(HEADSTART_PORTABLE) && defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(
      0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return _mm512_permutexvar_ps((__m512i)codes, numbers);
#elif !defined(HEADSTART_PORTABLE) && defined(__AVX2__)
  const __m256 numbers = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const Bits sign = (codes << 28) & 0x80000000u;
  return (Floats)((Bits)_mm256_permutevar8x32_ps(numbers, (__m256i)codes) ^ sign);
#else
  static constexpr float NUMBERS[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  Floats made;
  for (int i = 0; i < NATIVE; ++i) made[i] = NUMBERS[codes[i] & 15];
  return made;
#endif
}

// Two times sixteen of 32 codes over 256: the even ones and the odd ones.
inline Pair load_pair(const e4m3* from) {
#if !defined(HEADSTART_PORTABLE) && defined(__AVX512F__)
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), mask = _mm256_set1_epi16(short(0xbf80));
  const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), mask);
  const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(both, 1), mask);
  return {_mm512_cvtph_ps(even), _mm512_cvtph_ps(odd)};
#elif !defined(HEADSTART_PORTABLE) && defined(__AVX2__) && defined(__F16C__)
  Floats made[2][2];
  for (int i = 0; i < 2; ++i) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i), mask = _mm_set1_epi16(short(0xbf80));
    made[0][i] = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(both, 8), 1), mask));
    made[1][i] = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(both, 1), mask));
  }
  return {{{made[0][0]}, {made[0][1]}}, {{made[1][0]}, {made[1][1]}}};
#else
  float made[2][LANES];
  for (int i = 0; i < PAIR; ++i) made[i % 2][i / 2] = to_float(from[i]);
  return {load(made[0]), load(made[1])};
#endif
}

#if !defined(HEADSTART_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
inline __m256 eight_e8m0(const char* from) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(0x400000)));
}
// Over 256.
inline __m256 eight_e4m3(const char* from) {
#if defined(__F16C__)
  const __m128i words = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(short(0xbf80))));
#else
  float made[8];
  for (int i = 0; i < 8; ++i) made[i] = to_float(reinterpret_cast<const e4m3*>(from)[i]);
  return _mm256_loadu_ps(made);
#endif
}
#endif

}  // namespace headstart
