// Drawing tokens as a Python function.
#pragma once

#include <nanobind/stl/pair.h>

#include "linear.h"

namespace headstart {

// How the sequences of a batch draw: params, words, lengths, rounds; with XTC its probability, threshold and the tokens
// that it does not exclude.
struct Sampling {
  Arrays arrays;

  struct Slots {
    std::vector<Slot> at;
    long specials;
  };

  Slots slots(Chain& chain, int B) const {
    require(arrays.size() == 4 || arrays.size() == 7, "arrays are missing");
    require(arrays[0].shape() == mx::Shape{B, 5} && arrays[0].dtype() == mx::float32, "unknown parameters");
    require(arrays[1].shape() == mx::Shape{B, 6} && arrays[1].dtype() == mx::uint32, "unknown words");
    for (int i : {2, 3}) require(arrays[i].size() == size_t(B) && arrays[i].dtype() == mx::int32, "must be integers");
    Slots slots;
    for (const mx::array& array : arrays) slots.at.push_back(chain.input(array));
    slots.at.resize(7);
    slots.specials = arrays.size() == 7 ? arrays[6].size() / B : 0;
    return slots;
  }
};

template <typename T>
void fill(Draws<T>& op, const Memory& memory, const Sampling::Slots& slots) {
  op.params = memory.get<DrawParams>(slots.at[0]), op.words = memory.get<NoiseWords>(slots.at[1]);
  op.lengths = memory.get<int>(slots.at[2]), op.rounds = memory.get<int>(slots.at[3]);
  op.xtc_probability = memory.get<float>(slots.at[4]), op.xtc_threshold = memory.get<float>(slots.at[5]);
  op.special = memory.get<int>(slots.at[6]), op.specials = slots.specials;
}

// Logits [B, W, V] → tokens, whether their largest logit is finite, and what they were drawn from [B, W, 6]. `draft`:
// which draft the first is, or -1 for the target's own.
inline Arrays py_draw(const mx::array& logits, const Arrays& sampling, int draft) {
  require(logits.ndim() == 3, "logits must be [B, W, V]");
  const int B = logits.shape(0), W = logits.shape(1);
  Chain chain;
  const Slot from = chain.input(logits), tokens = chain.output({B, W}, mx::int32);
  const Slot finite = chain.output({B, W}, mx::int32), drawn = chain.output({B, W, 6}, mx::int32);
  const Sampling::Slots slots = Sampling{sampling}.slots(chain, B);
  by_type(logits.dtype(), [&]<typename T>(T) {
    chain.add([=, V = long(logits.shape(2))](const Memory& memory) {
      Draws<T> op = {B, W, V, std::max(draft, 0), draft < 0 ? NEXT : DRAFT, memory.get<T>(from)};
      fill(op, memory, slots);
      op.tokens = memory.get<int>(tokens), op.finite = memory.get<int>(finite), op.drawn = memory.get<Drawn>(drawn);
      draw(op);
    });
  });
  return chain.make("HeadstartDraw");
}

// The target's logits [B, W, V] for a window [B, W] → tokens, whether their largest logit is finite, and how many drafts
// of each sequence the ratio rule accepts. `sources`: logits [B, w, V] and what w drafts each were drawn from, [B, w, 6].
inline Arrays py_verify(
    const mx::array& logits, const Arrays& sampling, const mx::array& window, const mx::array& max_k,
    const mx::array& remaining, const std::vector<std::pair<mx::array, mx::array>>& sources) {
  require(logits.ndim() == 3 && window.ndim() == 2, "logits must be [B, W, V]");
  const int B = logits.shape(0), W = logits.shape(1), k = W - 1;
  for (const mx::array& each : {window, max_k, remaining}) require(each.dtype() == mx::int32, "must be integers");
  require(window.shape() == mx::Shape{B, W} && max_k.size() == size_t(B) && remaining.size() == size_t(B), "unknown shape");
  Chain chain;
  const Slot from = chain.input(logits), drafts = chain.input(window), most = chain.input(max_k);
  const Slot left = chain.input(remaining), tokens = chain.output({B, W}, mx::int32);
  const Slot finite = chain.output({B, W}, mx::int32), accepted = chain.output({B}, mx::int32);
  const Slot drawn = chain.scratch(B * W * sizeof(Drawn)), drafters = chain.scratch(std::max(B * k, 1) * sizeof(Drawn));
  const Sampling::Slots slots = Sampling{sampling}.slots(chain, B);
  std::vector<std::pair<Slot, Slot>> pairs;
  std::vector<long> widths, places, which;
  for (const auto& [each, from_what] : sources) {
    const long w = from_what.shape(1);
    require(from_what.shape() == mx::Shape{B, int(w), 6} && from_what.dtype() == mx::int32, "unknown drafts");
    require(each.size() == 1 || (each.dtype() == logits.dtype() && each.size() == B * w * size_t(logits.shape(2))), "unknown logits");
    pairs.emplace_back(chain.input(each), chain.input(from_what));
    for (long i = 0; i < w; ++i) widths.push_back(w), places.push_back(i), which.push_back(pairs.size() - 1);
  }
  require(long(which.size()) == k, "every draft must have a source");
  by_type(logits.dtype(), [&]<typename T>(T) {
    chain.add([=, V = long(logits.shape(2))](const Memory& memory) {
      Draws<T> op = {B, W, V, 0, NEXT, memory.get<T>(from)};
      fill(op, memory, slots);
      op.tokens = memory.get<int>(tokens), op.finite = memory.get<int>(finite), op.drawn = memory.get<Drawn>(drawn);
      draw(op);
      std::vector<const T*> each(k);
      Drawn* all = memory.get<Drawn>(drafters);
      for (long i = 0; i < k; ++i) {
        each[i] = memory.get<T>(pairs[which[i]].first);
        const Drawn* of = memory.get<Drawn>(pairs[which[i]].second);
        for (long b = 0; b < B; ++b) all[b * k + i] = of[b * widths[i] + places[i]];
      }
      verify(Verification<T>{
          op, memory.get<int>(drafts), memory.get<int>(most), memory.get<int>(left), all, each.data(), widths.data(),
          places.data(), memory.get<int>(accepted)});
    });
  });
  return chain.make("HeadstartVerify");
}

}  // namespace headstart
