// Codes are taken for numbers as they are, two from one word by a mask: in the low bits of a bfloat16 a code is the
// number code · 2⁻¹³³, four bits higher 16 times that. So two codes of a pair are not neighbours: of every eight codes
// of 4 bits they are 0 and 4, 1 and 5, 2 and 6, 3 and 7; of 8 bits 0 and 2, 1 and 3, 4 and 6, 5 and 7.

namespace headstart {

template <int COUNT>
struct alignas(4 * COUNT) Words {
  uint32_t at[COUNT];
};

// Of scales: what begins at no multiple of four bytes is waited for.
template <int BYTES>
__device__ __forceinline__ void copy_piece(unsigned char* to, const void* from) {
  if constexpr (BYTES == 2)
    *reinterpret_cast<unsigned short*>(to) = *static_cast<const unsigned short*>(from);
  else
    copy_bytes<BYTES>(to, from);
}

template <typename W>
__device__ __forceinline__ W read_words(const unsigned char* from) {
  return *reinterpret_cast<const W*>(from);
}

// Sixteen codes: those of a lane in a row's chunk.
template <int BITS>
struct Codes {
  uint32_t words[(BITS + 1) / 2];

  __device__ __forceinline__ void read(const unsigned char* from) {
    if constexpr (BITS % 2) {
#pragma unroll
      for (int i = 0; i < BITS; i++) {
        const uint32_t half = *reinterpret_cast<const unsigned short*>(from + 2 * i);
        words[i / 2] = i % 2 ? words[i / 2] | half << 16 : half;
      }
    } else {
      constexpr int EACH = BITS == 6 ? 1 : BITS / 2; // words in one read
#pragma unroll
      for (int i = 0; i < BITS / 2; i += EACH) {
        const auto some = read_words<Words<EACH>>(from + 4 * i);
#pragma unroll
        for (int j = 0; j < EACH; j++) words[i + j] = some.at[j];
      }
    }
  }

  __device__ __forceinline__ uint32_t code(int i) const {
    const int word = i * BITS / 32, shift = i * BITS % 32;
    const uint32_t low = words[word] >> shift;
    return (shift + BITS > 32 ? low | words[word + 1] << (32 - shift) : low) & ((1u << BITS) - 1);
  }

  // The p-th pair of a half's eight codes; of 4-bit codes odd pairs stand four bits higher.
  __device__ __forceinline__ uint32_t pair(int half, int p) const {
    if constexpr (BITS == 8) return words[2 * half + p / 2] >> (8 * (p % 2)) & 0x00FF00FF;
    if constexpr (BITS == 4) return words[half] >> (8 * (p / 2)) & (p % 2 ? 0x00F000F0 : 0x000F000F);
    return code(8 * half + 2 * p) | code(8 * half + 2 * p + 1) << 16;
  }
};

// What a product's sums are multiplied by in the end.
template <typename T, typename F>
constexpr float RESTORE = !F::QUANTISED        ? 1.0f
                          : F::MODE == NVFP    ? UNSCALE<T, F>
                          : !WIDE_EXPONENT<T>  ? 1.0f
                          : F::MODE == AFFINE  ? 0x1p32f
                                               : 0x1p60f;

// A weight, rounded once. In bfloat16 codes are as small as they stand there, scales 2¹⁰¹ times as large and results 2⁻³²
// times (2⁻⁶⁰ of mx…, whose scales may be 2⁶¹); in float16, which has no such range, codes become whole numbers first.
// Scales of another type than T are multiplied in float32.
template <typename T, typename F>
struct Dequantiser {
  static constexpr int BITS = F::BITS;
  static constexpr bool WIDE = WIDE_EXPONENT<T>;
  static constexpr bool IN_FLOATS = F::MODE == AFFINE && !cuda::std::is_same_v<T, typename F::Scale>;
  uint32_t scale, high_scale, bias; // twice each; the second for pairs that stand four bits higher

  // Of what a word holds of scales and biases, the low number, or the high one.
  __device__ __forceinline__ Dequantiser(uint32_t scales, uint32_t biases, bool high) {
    if constexpr (IN_FLOATS) {
      scale = scales, bias = biases;
    } else if constexpr (F::MODE == NVFP) {
      scale = narrow_scales<T>(scales << 24 | scales << 8);
    } else if constexpr (F::MODE == MXFP && WIDE) {
      scale = uint32_t(min(int(scales) + (BITS == 4 ? 66 : 60), 254)) * 0x00800080;
    } else if constexpr (F::MODE == MXFP) {
      scale = round_pair<T>(power_of_byte(scales << 23), power_of_byte(scales << 23));
    } else {
      scale = high ? high_halves(scales, scales) : low_halves(scales, scales);
      bias = high ? high_halves(biases, biases) : low_halves(biases, biases);
      if constexpr (WIDE) {
        high_scale = multiply_pairs<T>(scale, 0x70007000); // 2⁹⁷
        scale = multiply_pairs<T>(scale, 0x72007200); // 2¹⁰¹
        bias = multiply_pairs<T>(bias, 0x2F802F80); // 2⁻³²
      }
    }
  }

  __device__ __forceinline__ uint32_t pair(const Codes<BITS>& codes, int half, int p) const {
    if constexpr (F::MODE != AFFINE) {
      uint32_t pair = code_pair<T, F, 16>(codes.words, 4 * half + p);
      if constexpr (F::MODE == MXFP && !WIDE) pair = multiply_pairs<T>(pair, BITS == 4 ? 0x74007400 : 0x5C005C00);
      return multiply_pairs<T>(pair, scale);
    }
    const bool high = BITS == 4 && p % 2;
    uint32_t pair = codes.pair(half, p);
    if constexpr (IN_FLOATS) {
      const float scale = __int_as_float(this->scale), bias = WIDE ? 0x1p-32f * __int_as_float(this->bias)
                                                                   : __int_as_float(this->bias);
      auto weight = [&](uint32_t code) { return fmaf(float(int(code)), WIDE ? 0x1p-32f * scale : scale, bias); };
      pair = high ? pair >> 4 : pair;
      return round_pair<T>(weight(pair & 0xFF), weight(pair >> 16 & 0xFF));
    }
    if constexpr (WIDE) return fma_pairs<T>(pair, high ? high_scale : scale, bias);
    pair |= 0x64006400; // 1024 +
    pair = high ? fma_pairs<T>(pair, 0x2C002C00, 0xD400D400) : fma_pairs<T>(pair, 0x3C003C00, 0xE400E400);
    return fma_pairs<T>(pair, scale, bias);
  }
};

} // namespace headstart
