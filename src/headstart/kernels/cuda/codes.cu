// Quantised weights as tensor cores take them, one reader for each way to keep them ("mode"): pairs of codes become
// pairs of numbers of type T that hold them exactly, and scales and biases meet float32 sums, or the numbers.
//
//   affine   Codes as they are: in the low eight bits of a bfloat16 a code is code · 2⁻¹³³ (the numbers below the first
//            power of two and those after it stand equally far apart), and `OFFSET` bits higher so much more, which the
//            activations make up for. Of a float16, the low eleven bits; 2⁻²⁴.
//   E2M1     4-bit floats (mxfp4, nvfp4), E4M3 8-bit floats (mxfp8): sign, exponent and mantissa where the type has them.
//            Its bias is another one, so the number is too small by a power of two; subnormal codes become subnormal ones.
// Σ (scale · code + bias) · x = scale · Σ code · x + bias · Σ x, of the positions that share a scale ("group").
//   affine, mx…  Scale and bias meet a group's sum; mx… has powers of two (E8M0) and no bias.
//   nvfp4        A group has 16 positions, and scale (E4M3) · code has six bits: the product is exact in T, and summed.

namespace headstart {

constexpr int AFFINE = 0, MXFP = 1, NVFP = 2;
constexpr float WHOLE_MOST = 448.0f * 6.0f; // of which MLX has the scale of a whole matrix

// How a matrix is kept: Scale is the type of its scales, and biases. WHOLE: nvfp4 with a scale for all numbers.
template <int MODE_, int BITS_, int GROUP_, typename Scale_, bool WHOLE_ = false>
struct Format {
  using Scale = Scale_;
  static constexpr int MODE = MODE_, BITS = BITS_, GROUP = GROUP_;
  static constexpr bool QUANTISED = BITS < 16, WHOLE = WHOLE_;
  static constexpr bool HAS_BIASES = QUANTISED && MODE == AFFINE;
  static constexpr bool SCALES_SUMS = QUANTISED && MODE != NVFP; // or codes
  static constexpr bool IS_STREAM = BITS < 8 && BITS != 4; // codes do not begin where bytes or halves of them do
};

// Whether T has the exponents of a float32. Then activations are multiplied so that products are not too small for one.
// Of activations of 2⁶⁸ and more nothing is left.
template <typename T>
constexpr bool WIDE_EXPONENT = cuda::std::is_same_v<T, __nv_bfloat16>;

// What a product's sums are multiplied by.
template <typename T, typename F>
constexpr float UNSCALE = !F::QUANTISED       ? 1.0f
                          : F::MODE == NVFP   ? (WIDE_EXPONENT<T> ? 0x1p9f : 0x1p7f)
                          : F::MODE == AFFINE ? (WIDE_EXPONENT<T> ? 0x1p73f : 0x1p24f)
                          : F::BITS == 4      ? (WIDE_EXPONENT<T> ? 0x1p66f : 0x1p14f)
                                              : (WIDE_EXPONENT<T> ? 0x1p60f : 0x1p8f);

// Which positions of a lane stand together in a pair: what masks cost least. In 4 bits (0, 4), (1, 5), (2, 6), (3, 7)
// of every eight, in 8 bits (0, 2), (1, 3) of every four; of a stream, position p and that of the second half.
// APART: how many words of activations lie between the two.
template <typename F, int EACH>
constexpr int APART = F::IS_STREAM ? EACH / 4 : F::BITS == 4 ? 2 : 1;

// Of a stream, code p of each half: the byte in which it begins, the bit there, and how far it is moved down. In a
// bfloat16 it may end up anywhere in the low eight bits.
template <typename T, typename F>
struct InStream {
  static constexpr int BITS = F::BITS;
  __device__ static constexpr int byte(int p) { return p * BITS / 8; }
  __device__ static constexpr int bit(int p) { return p * BITS % 8; }
  __device__ static constexpr int shift(int p) {
    return !WIDE_EXPONENT<T> ? bit(p) : bit(p) + BITS > 8 ? bit(p) + BITS - 8 : 0;
  }
  __device__ static constexpr int offset(int p) { return bit(p) - shift(p); }
};

// How many bits too high the codes of a pair are.
template <typename T, typename F>
__device__ constexpr int offset_of(int p) {
  if (F::MODE != AFFINE || !F::QUANTISED) return 0;
  if (F::IS_STREAM) return InStream<T, F>::offset(p);
  return F::BITS == 4 && WIDE_EXPONENT<T> && p % 2 ? 4 : 0;
}

// 16 bits of a lane's words from bit `at` on, and whatever follows.
template <int WORDS>
__device__ __forceinline__ uint32_t bits_from(const uint32_t (&words)[WORDS], int at) {
  const int word = min(at / 32, WORDS - 1), last = min(word + 1, WORDS - 1);
  return at % 32 ? __funnelshift_r(words[word], words[last], at % 32) : words[word];
}

// Bytes first, first + 1, second and second + 1 of a lane's words: what lies behind these is not looked at.
template <int WORDS>
__device__ __forceinline__ uint32_t two_of_bytes(const uint32_t (&words)[WORDS], int first, int second) {
  const int a = first / 4, b = min((first + 1) / 4, WORDS - 1), c = min(second / 4, WORDS - 1);
  const int d = min((second + 1) / 4, WORDS - 1), low = first % 4 | (first + 1) % 4 << 4;
  const int high = second % 4 | (second + 1) % 4 << 4;
  if (a == b && c == d) return __byte_perm(words[a], words[c], low | (high | 0x44) << 8);
  if (a == b) return __byte_perm(words[a], __byte_perm(words[c], words[d], high + 0x40), low | 0x5400);
  const uint32_t both = __byte_perm(words[a], words[b], low + 0x40);
  if (c == d) return __byte_perm(both, words[c], (high | 0x44) << 8 | 0x10);
  return low_halves(both, __byte_perm(words[c], words[d], high + 0x40));
}

// The p-th pair of a stream of EACH codes.
template <typename T, typename F, int EACH, int WORDS>
__device__ __forceinline__ uint32_t stream_pair(const uint32_t (&words)[WORDS], int p) {
  using In = InStream<T, F>;
  constexpr int HALF = EACH / 2 * F::BITS; // bits
  uint32_t pair;
  if constexpr (HALF % 8 == 0)
    pair = two_of_bytes(words, In::byte(p), In::byte(p) + HALF / 8);
  else
    pair = low_halves(bits_from(words, 8 * In::byte(p)), bits_from(words, 8 * In::byte(p) + HALF));
  return pair >> In::shift(p) & ((1 << F::BITS) - 1) * 0x10001 << In::offset(p);
}

// The p-th pair of numbers out of the words of a lane's EACH codes, without scale.
template <typename T, typename F, int EACH, int WORDS>
__device__ __forceinline__ uint32_t code_pair(const uint32_t (&words)[WORDS], int p) {
  constexpr bool WIDE = WIDE_EXPONENT<T>;
  if constexpr (!F::QUANTISED) {
    return words[p];
  } else if constexpr (F::MODE != AFFINE && F::BITS == 8) { // E4M3, to bits 15 and 4 to 10 (7 to 13 of a float16)
    const uint32_t pair = p % 2 ? words[p / 2] : words[p / 2] << 8;
    return (pair & 0x80008000) | (pair >> (WIDE ? 4 : 1) & (WIDE ? 0x07F007F0 : 0x3F803F80));
  } else if constexpr (F::MODE != AFFINE && WIDE) { // E2M1, to bits 15 and 6 to 8: moved twice by one multiplication
    const int low = 4 * (p % 4), down = max(0, low - 6); // where a code begins, how far it is moved down before
    if (low == 12) return (words[p / 4] & 0x80008000) | (words[p / 4] >> 6 & 0x01C001C0);
    const uint32_t codes = words[p / 4] >> down & 0x000F000Fu << (low - down);
    return codes * (65u << (6 - (low - down))) & 0x81C081C0;
  } else if constexpr (F::MODE != AFFINE) { // to bits 15 and 9 to 11
    const int low = 4 * (p % 4);
    const uint32_t word = words[p / 4], numbers = low < 9 ? word << (9 - low) : word >> (low - 9);
    return (word << (12 - low) & 0x80008000) | (numbers & 0x0E000E00);
  } else if constexpr (F::IS_STREAM) {
    return stream_pair<T, F, EACH>(words, p);
  } else if constexpr (F::BITS == 8) {
    return words[p / 2] >> (8 * (p % 2)) & 0x00FF00FF;
  } else if constexpr (WIDE) {
    return words[p / 4] >> (8 * (p % 4 / 2)) & (p % 2 ? 0x00F000F0 : 0x000F000F);
  } else {
    return words[p / 4] >> (4 * (p % 4)) & 0x000F000F;
  }
}

// Two codes that are 1, as `code_pair` finds them.
template <typename T, typename F>
__device__ __forceinline__ uint32_t pair_of_ones(int p) {
  return 0x00010001u << offset_of<T, F>(p);
}

// What activations of the p-th pair are multiplied by, twice; 0 if by nothing: 2⁶⁰, less where codes are higher.
template <typename T, typename F>
__device__ constexpr uint32_t activation_scale(int p) {
  if (!F::SCALES_SUMS || !WIDE_EXPONENT<T>) return 0;
  return (0x5D80u - 0x80u * offset_of<T, F>(p)) * 0x10001u;
}

// What a lane multiplies by in a unit: a sum, or pairs of codes.
template <typename F>
using UnitScale = cuda::std::conditional_t<F::MODE == NVFP, uint32_t, float>;

// The power of two that a byte in bits 23 to 30 says (E8M0); the least is subnormal.
__device__ __forceinline__ float power_of_byte(uint32_t bits) {
  return __int_as_float(max(int(bits & 0x7F800000), 0x00400000));
}

// nvfp4's scales, E4M3 in the upper bytes of both halves, as numbers that times a code of `code_pair` are the weight
// times 2⁻⁹, or 2⁻⁷ in float16, exactly.
template <typename T>
__device__ __forceinline__ uint32_t narrow_scales(uint32_t bytes) {
  constexpr bool WIDE = WIDE_EXPONENT<T>;
  const uint32_t pair = (bytes & 0x80008000) | (bytes >> (WIDE ? 4 : 1) & (WIDE ? 0x07F007F0 : 0x3F803F80));
  if constexpr (!WIDE) return multiply_pairs<T>(pair, 0x78007800); // 2¹⁵
  return multiply_pairs<T>(multiply_pairs<T>(pair, 0x7F007F00), 0x76807680); // 2¹²⁷, 2¹¹⁰
}

// The number that a code is, E2M1 in four bits or E4M3 in eight.
template <int BITS>
__device__ __forceinline__ float float_of(uint32_t code) {
  constexpr uint32_t SIGN = 1 << (BITS - 1);
  const uint32_t bits = (code & SIGN) << (32 - BITS) | (code & (SIGN - 1)) << (BITS == 4 ? 22 : 20);
  return __int_as_float(bits) * (BITS == 4 ? 0x1p126f : 0x1p120f);
}

// The i-th eight codes of a matrix as numbers, and the scale that they share.
template <typename F>
__device__ __forceinline__ void eight_codes(
    const unsigned char* codes, const typename F::Scale* scales, long long i, float (&numbers)[8], float& scale) {
  constexpr int BITS = F::BITS;
  const unsigned char* from = codes + i * BITS;
  unsigned long long bits = 0;
  if constexpr (BITS == 8)
    bits = *reinterpret_cast<const unsigned long long*>(from);
  else if constexpr (BITS == 4)
    bits = *reinterpret_cast<const uint32_t*>(from);
  else
#pragma unroll
    for (int byte = 0; byte < BITS; ++byte) bits |= (unsigned long long)from[byte] << (8 * byte);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t code = bits >> (BITS * j) & ((1 << BITS) - 1);
    if constexpr (F::MODE == AFFINE)
      numbers[j] = float(int(code));
    else
      numbers[j] = float_of<BITS>(code);
  }
  if constexpr (F::MODE == MXFP)
    scale = power_of_byte(uint32_t(scales[i * 8 / F::GROUP]) << 23);
  else if constexpr (F::MODE == NVFP)
    scale = float_of<8>(scales[i * 8 / F::GROUP]);
  else
    scale = float(scales[i * 8 / F::GROUP]);
}

} // namespace headstart
