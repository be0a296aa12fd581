// Attention as Python functions, alone and with a layer's projections.
#pragma once

#include "linear.h"

namespace headstart {

// What an attention layer has beside its projections. Null: it has none.
struct Heads {
  using Array = std::optional<mx::array>;
  using Tuple = std::tuple<int, int, float, float, Array, Array, Array, bool, float, float, Array, Array, int>;
  int count, kv_count;
  float scale, eps;               // of scores; of norms
  Array q_norm, k_norm;           // weights [DK]
  Array frequencies;              // [rotated / 2]
  bool interleaved;
  float rotation_scale, value_scale;
  Array sinks;                    // [count]
  Array query_scales;             // for every `period` positions
  int period;

  static Heads of(const Tuple& from) {
    return std::apply([](const auto&... each) { return Heads{each...}; }, from);
  }
};

// What it knows of earlier positions, and where the window is. `caches`: keys and values [B, HKV, capacity, D], in eight
// bits with their scales.
struct Past {
  Arrays caches;
  mx::array offset;
  int window;
  std::optional<mx::array> angles, last;

  int batch() const {
    return caches.at(0).shape(0);
  }
  int size(int cache) const {
    return caches.at(cache).shape(3);
  }
};

inline bool holds(const std::optional<mx::array>& array, size_t size, mx::Dtype type) {
  return !array || (array->size() == size && array->dtype() == type);
}
inline bool holds(const std::optional<mx::array>& array, size_t size) {
  return !array || array->size() == size;
}

// Caches as kernels write them, and whether they could not be written in place.
struct Written {
  std::vector<Slot> before, after;
  std::vector<size_t> bytes;

  Written(Chain& chain, const Arrays& caches) {
    for (const mx::array& cache : caches) {
      before.push_back(chain.input(cache)), after.push_back(chain.output_over(before.back()));
      bytes.push_back(cache.nbytes());
    }
  }
  void copy(const Memory& memory) const {
    for (size_t i = 0; i < after.size(); ++i)
      if (char *from = memory.get<char>(before[i]), *to = memory.get<char>(after[i]); from != to)
        std::memcpy(to, from, bytes[i]);
  }
};

// Refuse caches whose shapes and types no layer with activations of T has.
template <typename T>
void check(const Past& past) {
  require(past.caches.size() == 2 || past.caches.size() == 4, "caches are keys and values, or these and their scales");
  const bool eight = past.caches.size() == 4;
  const int B = past.batch();
  for (int i = 0; i < 2; ++i) {
    const mx::array& cache = past.caches[i];
    require(cache.ndim() == 4 && cache.shape(0) == B && cache.shape(2) == past.caches[0].shape(2), "unknown shape");
    require(cache.itemsize() == (eight ? 1 : sizeof(T)), "the cache must have the type of the input");
    if (!eight) continue;
    const mx::array& scales = past.caches[2 + i];
    require(cache.shape(3) % 32 == 0 && scales.size() * 32 == cache.size() && scales.itemsize() == sizeof(T), "unknown scales");
  }
  require(holds(past.offset, B, mx::int32), "offset must be [B] integers");
  require(holds(past.last, B, mx::int32), "last must be [B] integers");
}

// → a function that gives an operation everything but its input and output; behind the outputs that are there already: the
// caches with the window's keys and values in them.
template <typename T>
std::function<Attention<T>(const Memory&)> attending(Chain& chain, int W, const Heads& heads, const Past& past) {
  check<T>(past);
  const int B = past.batch(), H = heads.count, HKV = past.caches[0].shape(1);
  const int rotated = heads.frequencies ? 2 * heads.frequencies->size() : 0;
  require(HKV == heads.kv_count && H % HKV == 0 && past.caches[1].shape(1) == HKV, "unknown shape");
  require(holds(heads.sinks, H), "sinks must be [H]");
  require(holds(past.angles, size_t(B) * W * rotated / 2, mx::float32), "angles must be [B, W, rotated / 2] of float32");
  require(!heads.query_scales || (heads.period > 0 && heads.query_scales->size()), "scales must be of periods");
  const Slot q_weight = chain.weight(heads.q_norm, true), k_weight = chain.weight(heads.k_norm, true);
  const Slot frequencies = chain.weight(heads.frequencies, true), angles = chain.input(past.angles);
  const Slot sinks = chain.weight(heads.sinks, true), scales = chain.weight(heads.query_scales, true);
  const Slot offset = chain.shared(past.offset), last = chain.input(past.last);
  const Written caches(chain, past.caches);
  Attention<T> op = {B, W, H, HKV, past.caches[0].shape(2), past.window, heads.eps, heads.scale, heads.value_scale};
  op.rotation = {rotated, heads.interleaved, heads.rotation_scale};
  op.period = heads.period, op.periods = heads.query_scales ? heads.query_scales->size() : 0;
  op.keys.D = past.size(0), op.values.D = past.size(1);
  return [=](const Memory& memory) {
    caches.copy(memory);
    auto f = [&](Slot slot) { return memory.get<float>(slot); };
    Attention<T> filled = op;
    filled.q_weight = f(q_weight), filled.k_weight = f(k_weight);
    filled.rotation.frequencies = f(frequencies), filled.rotation.angles = f(angles);
    filled.query_scales = f(scales), filled.sinks = f(sinks);
    filled.offset = memory.get<int>(offset), filled.last = memory.get<int>(last);
    filled.keys.at = memory.get<void>(caches.after[0]), filled.values.at = memory.get<void>(caches.after[1]);
    if (caches.after.size() > 2)
      filled.keys.scales = memory.get<T>(caches.after[2]), filled.values.scales = memory.get<T>(caches.after[3]);
    return filled;
  };
}

// Queries, which may have gates behind them or in an array of their own, keys, values → out [B, W or 1, H · DV].
template <typename T>
void attend_window(
    Chain& chain, Slot q, Slot k, Slot v, Slot gates, bool gated, int W, const Heads& heads, const Past& past, Slot out) {
  const int DK = past.size(0);
  require(holds(heads.q_norm, DK) && holds(heads.k_norm, DK), "norms must be [DK]");
  require((!gated || DK == past.size(1)) && (!heads.frequencies || 2 * heads.frequencies->size() <= DK), "unknown shape");
  chain.add([=, held = attending<T>(chain, W, heads, past)](const Memory& memory) {
    Attention<T> op = held(memory);
    op.q = memory.get<T>(q), op.k = memory.get<T>(k), op.v = memory.get<T>(v);
    op.gates = memory.get<T>(gates), op.gated = gated, op.out = memory.get<T>(out);
    attention(op);
  });
}

// → what is attended to, and the caches.
inline Arrays py_attention(
    const mx::array& q, const mx::array& k, const mx::array& v, const std::optional<mx::array>& gates,
    const Heads::Tuple& given, const Arrays& caches, const mx::array& offset, int window,
    const std::optional<mx::array>& angles, const std::optional<mx::array>& last) {
  const Heads heads = Heads::of(given);
  const Past past = {caches, offset, window, angles, last};
  const int B = q.shape(0), W = q.shape(1), H = heads.count, DK = past.size(0), DV = past.size(1);
  const bool gated = q.shape(2) == 2 * H * DK;
  require(past.batch() == B && (gated || q.shape() == mx::Shape{B, W, H * DK}), "unknown shape");
  require(k.shape() == mx::Shape{B, W, heads.kv_count * DK}, "unknown shape");
  require(v.shape() == mx::Shape{B, W, heads.kv_count * DV}, "unknown shape");
  require(k.dtype() == q.dtype() && v.dtype() == q.dtype(), "queries, keys and values must have one type");
  require(holds(gates, size_t(B) * W * H, q.dtype()), "gates must be [B, W, H]");
  Chain chain;
  const Slot a = chain.input(q), b = chain.input(k), c = chain.input(v), d = chain.input(gates);
  const Slot out = chain.output({B, last ? 1 : W, H * DV}, q.dtype());
  by_type(q.dtype(), [&]<typename T>(T) { attend_window<T>(chain, a, b, c, d, gated, W, heads, past, out); });
  return chain.make("HeadstartAttention");
}

// A whole attention layer; `layers` are the projections to queries, keys and values, and to gates of heads where it has
// these → the caches, then the layer's output.
inline void attention_layer(
    Chain& chain, const Part& x, const Layers& layers, const Layer& out, const Heads& heads, const Past& past,
    const Finisher& finisher) {
  const Linears projections(layers.begin(), layers.end());
  require(projections.size() == 3 || projections.size() == 4, "layers are missing");
  const int B = x.shape[0], W = x.shape[1], H = heads.count, DK = past.size(0), DV = past.size(1);
  const int asked = past.last ? 1 : W;
  const bool gated = projections[0].outputs() == 2 * H * DK;
  require(past.batch() == B && (gated || projections[0].outputs() == H * DK), "unknown shape");
  require(projections[1].outputs() == heads.kv_count * DK, "unknown shape");
  require(projections[2].outputs() == heads.kv_count * DV, "unknown shape");
  require(projections.size() == 3 || projections[3].outputs() == H, "unknown shape");
  const long rows = long(B) * W;
  by_type(x.type, [&]<typename T>(T) {
    std::vector<Slot> made;
    for (const Linear& layer : projections) made.push_back(chain.scratch(rows * layer.outputs() * sizeof(T)));
    const Rows y = scratch_rows<T>(chain, long(B) * asked, H * DV);
    multiply<T>(chain, x.rows(), projections, made);
    made.resize(4);
    attend_window<T>(chain, made[0], made[1], made[2], made[3], gated, W, heads, past, y.at);
    finish<T>(chain, y, out, finisher, {B, asked, 0}, x.type);
  });
}

}  // namespace headstart
