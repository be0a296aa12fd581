// Activations, arranged to meet weights in the order in which these are unpacked.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace headstart {

// Codes of 1, 2, 4 and 8 bits are taken out of sixteen words of 32 bits at a time, one to a lane: first the lowest code of
// every word, then the next one. They are masked and not shifted, so the activation is divided by the power of two
// instead. Floating-point codes of 4 bits are taken out the same way, and looked up; those of 8 bits in pairs of lanes, as
// bfloat16 is. Other codes are unpacked in their order, and dense weights in pairs of lanes.
struct Arrangement {
  int bits = 0, group = 0;  // of the weights; 0: dense
  Number scale = Number::BFLOAT;  // type of their scales and biases

  constexpr bool floats() const {
    return scales_floats(scale);
  }
  constexpr bool pairs() const {
    return floats() && bits == 8;
  }
  constexpr int per_word() const {
    return bits && 32 % bits == 0 && !pairs() ? 32 / bits : 0;
  }
  // Elements that share a loop: with quantised weights also one scaling.
  long block() const {
    return !bits ? PAIR : per_word() ? LANES * per_word() : group;
  }
  long blocks(long K) const {
    return (K + block() - 1) / block();
  }
};

// Memory that begins with a cache line: a register's worth of it then never lies in two.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t LINE{64};
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), LINE));
  }
  void deallocate(T* at, size_t) {
    ::operator delete(at, LINE);
  }
  bool operator==(const LineAllocator&) const = default;
};
using FloatLines = std::vector<float, LineAllocator<float>>;

// Rows of activations as float32, arranged, with zeros up to a whole block. With quantised weights also the sum of every
// group, in pairs: biases are dense weights of these.
template <typename T>
class Activations {
 public:
  Activations(const T* x, long rows, long K, Arrangement order)
      : K_(K), order_(order), padded_(order.blocks(K) * order.block()),
        groups_(order.bits && !order.floats() ? (K / order.group + PAIR - 1) / PAIR * PAIR : 0), values_(rows * padded_),
        sums_(rows * groups_) {
    const long some = std::max(1l, (1 << 14) / K);  // rows of a part
    pool().run((rows + some - 1) / some, [&](uint32_t part) {
      for (long r = part * some; r < std::min<long>(rows, (part + 1) * some); ++r) {
        if (!order_.bits) in_pairs(x + r * K, row(r));
        else if (order_.pairs()) in_byte_pairs(x + r * K, row(r));
        else by_codes(x + r * K, row(r), sums_.data() + r * groups_);
      }
    });
  }

  float* row(long r) {
    return values_.data() + r * padded_;
  }
  const float* sums(long r) const {
    return sums_.data() + r * groups_;
  }

 private:
  void in_pairs(const T* from, float* to) const {
    long k = 0;
    for (; k + PAIR <= K_; k += PAIR) {
      const Pair pair = load_pair(from + k);
      store(to + k, pair.first), store(to + k + LANES, pair.second);
    }
    for (; k < K_; ++k) to[place<T>(k)] = to_float(from[k]);
  }

  // Even elements of every 32, and odd ones.
  void in_byte_pairs(const T* from, float* to) const {
    for (long k = 0; k < K_; ++k) to[place<bfloat>(k)] = to_float(from[k]);
  }

  void by_codes(const T* from, float* to, float* sums) const {
    static thread_local FloatLines memory;
    memory.assign(padded_, 0.0f);
    float* wide = order_.per_word() ? memory.data() : to;
    for (long k = 0; k < K_; ++k) wide[k] = to_float(from[k]);
    for (long g = 0; !order_.floats() && g < K_ / order_.group; ++g) {
      Lanes total = splat(0.0f);
      for (long k = g * order_.group; k < (g + 1) * order_.group; k += LANES) total = total + load(wide + k);
      sums[order_.scale == Number::BFLOAT ? place<bfloat>(g) : g] = sum(total);
    }
    for (long k = 0; order_.per_word() && k < padded_; k += order_.block()) in_words(wide + k, to + k);
  }

  // A block: element j of every word, over 2^(bits · j); the last one as it is, since its code is shifted, and all of
  // them where codes are looked up.
  void in_words(const float* __restrict from, float* __restrict to) const {
    const int per = order_.per_word();
    float scale = 1.0f;
    for (int j = 0; j < per; ++j, scale /= float(1u << order_.bits)) {
      const float by = j == per - 1 || order_.floats() ? 1.0f : scale;
      for (int word = 0; word < LANES; ++word) to[j * LANES + word] = from[word * per + j] * by;
    }
  }

  long K_;
  Arrangement order_;
  long padded_, groups_;
  FloatLines values_, sums_;
};

}  // namespace headstart
