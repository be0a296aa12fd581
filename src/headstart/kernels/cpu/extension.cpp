// The kernels as Python functions over MLX arrays, alone and chained to whole parts of a decoder layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <tuple>

#include "kernels.h"
#include "operation.h"

namespace nb = nanobind;
using namespace headstart;

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// f(float{}) or f(bfloat{}), by the type of the activations.
template <typename F>
void by_type(const mx::array& x, F f) {
  require(x.dtype() == mx::bfloat16 || x.dtype() == mx::float32, "activations must be bfloat16 or float32");
  if (x.dtype() == mx::bfloat16) f(bfloat{});
  else f(float{});
}

// The weights of a linear layer [N, K], or of one for each expert [experts, N, K]: dense, or quantised with scales and
// biases for every `group` of inputs.
struct Linear {
  using Tuple = std::tuple<mx::array, std::optional<mx::array>, std::optional<mx::array>, int, int>;
  mx::array weight;
  std::optional<mx::array> scales, biases;
  int bits, group;

  Linear(const Tuple& from)
      : weight(std::get<0>(from)), scales(std::get<1>(from)), biases(std::get<2>(from)), bits(std::get<3>(from)),
        group(std::get<4>(from)) {
    require(weight.ndim() == 2 || weight.ndim() == 3, "weights must be [N, K], with experts [experts, N, K]");
    require(bool(scales) == bool(bits) && bool(biases) == bool(bits), "a layer must be dense or have scales and biases");
    if (!bits) return;
    require(bits >= 2 && bits <= 8 && bits != 7, "unknown bits");
    require(group >= 32 && (group & (group - 1)) == 0, "unknown group");
    require(weight.dtype() == mx::uint32 && weight.shape(-1) * 32l % (long(bits) * group) == 0, "unknown codes");
    require(scales->dtype() == mx::float32 || scales->dtype() == mx::bfloat16, "unknown scales");
    require(biases->dtype() == scales->dtype() && biases->shape() == scales->shape(), "unknown biases");
    require(scales->shape(-1) * long(group) == inputs() && scales->shape(-2) == outputs(), "unknown scales");
  }

  int outputs() const {
    return weight.shape(-2);
  }
  long inputs() const {
    return bits ? weight.shape(-1) * 32l / bits : weight.shape(-1);
  }
  bool alike(const Linear& other) const {
    return bits == other.bits && group == other.group && (!bits || scales->dtype() == other.scales->dtype());
  }
};
using Linears = std::vector<Linear>;
using Layer = Linear::Tuple;  // as Python passes it
using Layers = std::vector<Layer>;

// An activation [rows, size] in an operation.
struct Rows {
  Slot at;
  long rows, size;
};

// Experts chosen for each row [rows, top]; `own`: each expert has a row of its own as its input.
struct Choice {
  Slot indices;
  long top;
  bool own;
};

// x by every layer → out[i]. `gated`: of two layers silu(first) · second → out[0].
template <typename T>
void multiply(
    Chain& chain, Rows x, const Linears& layers, const std::vector<Slot>& out, bool gated = false,
    std::optional<Choice> choice = {}) {
  struct Held {
    Slot weight, scales, biases;
  };
  for (size_t first = 0, end; first < layers.size(); first = end) {
    end = first;
    std::vector<Matrix> matrices;
    std::vector<Held> held;
    for (; end < layers.size() && layers[end].alike(layers[first]); ++end) {
      const Linear& layer = layers[end];
      require(layer.inputs() == x.size, "weights must be [N, K] where the input is [..., K]");
      require(layer.weight.ndim() == (choice ? 3 : 2), "weights must be [N, K], with experts [experts, N, K]");
      require(layer.bits || layer.weight.itemsize() == sizeof(T), "weights must have the type of the input");
      const bool wide = layer.bits && layer.scales->dtype() == mx::float32;
      matrices.push_back({nullptr, layer.outputs(), layer.bits, layer.group, wide});
      held.push_back({chain.input(layer.weight), {}, {}});
      if (layer.bits) held.back().scales = chain.input(*layer.scales), held.back().biases = chain.input(*layer.biases);
    }
    require(!gated || matrices.size() == 2, "a gate has two layers of one kind");
    const std::vector<Slot> to(out.begin() + first, out.begin() + (gated ? 1 : end));
    chain.add([=](const Memory& memory) {
      std::vector<Matrix> filled = matrices;
      std::vector<T*> outputs;
      for (size_t i = 0; i < filled.size(); ++i) {
        filled[i].w = memory.get<void>(held[i].weight);
        if (!filled[i].bits) continue;
        filled[i].scales = memory.get<void>(held[i].scales), filled[i].biases = memory.get<void>(held[i].biases);
      }
      for (Slot slot : to) outputs.push_back(memory.get<T>(slot));
      products<T>(
          {memory.get<T>(x.at), x.rows, x.size, choice && !choice->own ? choice->top : 1, int(filled.size()),
           filled.data(), outputs.data(), gated, choice ? memory.get<uint32_t>(choice->indices) : nullptr});
    });
  }
}

template <typename T>
Rows scratch_rows(Chain& chain, long rows, long size) {
  return {chain.scratch(rows * size * sizeof(T)), rows, size};
}

mx::Shape with_last(mx::Shape shape, int size) {
  shape.back() = size;
  return shape;
}

// What a part of a layer is added to, and the weight and epsilon of the norm of that sum.
using Residual = std::tuple<mx::array, mx::array, float>;

// Add x [rows, D] to the residual → the sum and its norm, as outputs.
template <typename T>
void add_and_norm(Chain& chain, Rows x, const Residual& residual) {
  const auto& [added, weight, eps] = residual;
  require(added.size() == size_t(x.rows * x.size) && added.itemsize() == sizeof(T), "the sum's parts must be alike");
  require(weight.ndim() == 1 && weight.shape(0) == x.size, "weight must be [D] where the input is [..., D]");
  const Slot other = chain.input(added), by = chain.input(weight, true);
  const Slot total = chain.output(added.shape(), added.dtype()), normed = chain.output(added.shape(), added.dtype());
  chain.add([=, eps = eps](const Memory& memory) {
    norm<T>(
        memory.get<T>(other), memory.get<T>(x.at), memory.get<float>(by), eps, x.rows, x.size, memory.get<T>(total),
        memory.get<T>(normed));
  });
}

// The last product of a part of a layer → its output [shape[:-1], N], or with a residual their sum and its norm.
template <typename T>
void finish(Chain& chain, Rows x, const Linear& layer, const std::optional<Residual>& residual, mx::Shape shape, mx::Dtype type) {
  if (!residual) return multiply<T>(chain, x, {layer}, {chain.output(with_last(shape, layer.outputs()), type)});
  const Rows part = scratch_rows<T>(chain, x.rows, layer.outputs());
  multiply<T>(chain, x, {layer}, {part.at});
  add_and_norm<T>(chain, part, *residual);
}

// `layers` by one input. With `experts` [..., top] x is [..., K], or where `own` is set [..., top, K], and the result
// is [..., top, N].
Arrays py_products(
    const mx::array& x, const Layers& given, bool gated, const std::optional<mx::array>& experts, bool own) {
  const Linears layers(given.begin(), given.end());
  Chain chain;
  const Rows in = {chain.input(x), long(x.size() / x.shape(-1)), x.shape(-1)};
  std::optional<Choice> choice;
  if (experts) {
    const long top = experts->shape(-1), chosen = experts->size();
    require(experts->dtype() == mx::uint32 && chosen == in.rows * (own ? 1 : top), "unknown experts");
    choice = {chain.input(*experts), top, own};
  }
  mx::Shape shape = experts ? experts->shape() : x.shape();
  if (experts) shape.push_back(0);
  std::vector<Slot> out;
  for (size_t i = 0; i < (gated ? 1 : layers.size()); ++i)
    out.push_back(chain.output(with_last(shape, layers[i].outputs()), x.dtype()));
  by_type(x, [&]<typename T>(T) { multiply<T>(chain, in, layers, out, gated, choice); });
  return chain.make("HeadstartProducts");
}

// The norm of x; with `added` x + added and the norm of that.
Arrays py_norm(const mx::array& x, const mx::array& weight, float eps, const std::optional<mx::array>& added) {
  Chain chain;
  const long D = x.shape(-1), rows = x.size() / D;
  require(weight.ndim() == 1 && weight.shape(0) == D, "weight must be [D] where the input is [..., D]");
  require(!added || (added->shape() == x.shape() && added->dtype() == x.dtype()), "the sum's parts must be alike");
  const Slot in = chain.input(x);
  by_type(x, [&]<typename T>(T) {
    if (added) return add_and_norm<T>(chain, {in, rows, D}, {*added, weight, eps});
    const Slot by = chain.input(weight, true), out = chain.output(x.shape(), x.dtype());
    chain.add([=](const Memory& memory) {
      norm<T>(
          memory.get<T>(in), nullptr, memory.get<float>(by), eps, rows, D, static_cast<T*>(nullptr), memory.get<T>(out));
    });
  });
  return chain.make("HeadstartNorm");
}

// An MLP with SwiGLU.
Arrays py_mlp(
    const mx::array& x, const Layer& gate, const Layer& up, const Layer& down,
    const std::optional<Residual>& residual) {
  Chain chain;
  const Rows in = {chain.input(x), long(x.size() / x.shape(-1)), x.shape(-1)};
  by_type(x, [&]<typename T>(T) {
    const Rows hidden = scratch_rows<T>(chain, in.rows, Linear(gate).outputs());
    multiply<T>(chain, in, {gate, up}, {hidden.at}, true);
    finish<T>(chain, hidden, down, residual, x.shape(), x.dtype());
  });
  return chain.make("HeadstartMLP");
}

// A mixture of experts: a router and the gate of the shared expert; gate, up and down of the shared expert; those of the
// experts.
Arrays py_mixture(
    const mx::array& x, const Layers& gates, const Layers& shared_layers, const Layers& expert_layers, int top,
    bool normed, const std::optional<Residual>& residual) {
  require(gates.size() == 2 && shared_layers.size() == 3 && expert_layers.size() == 3, "layers are missing");
  const Linear router = gates[0], shared_gate = gates[1];
  const Linears shared(shared_layers.begin(), shared_layers.end()), experts(expert_layers.begin(), expert_layers.end());
  require(top >= 1 && top <= router.outputs() && router.outputs() == experts[0].weight.shape(0), "unknown experts");
  Chain chain;
  const Rows in = {chain.input(x), long(x.size() / x.shape(-1)), x.shape(-1)};
  const long rows = in.rows, E = router.outputs(), N = in.size;
  require(shared[2].outputs() == N && experts[2].outputs() == N && shared_gate.outputs() == 1, "unknown shape");
  by_type(x, [&]<typename T>(T) {
    const Slot logits = chain.scratch(rows * E * sizeof(T)), weight = chain.scratch(rows * sizeof(T));
    const Rows shared_hidden = scratch_rows<T>(chain, rows, shared[0].outputs());
    const Rows hidden = scratch_rows<T>(chain, rows * top, experts[0].outputs());
    const Slot common = chain.scratch(rows * N * sizeof(T)), parts = chain.scratch(rows * top * N * sizeof(T));
    const Slot indices = chain.scratch(rows * top * 4), scores = chain.scratch(rows * top * 4);
    multiply<T>(chain, in, {router, shared_gate}, {logits, weight});
    chain.add([=](const Memory& memory) {
      route<T>(memory.get<T>(logits), rows, E, top, normed, memory.get<uint32_t>(indices), memory.get<float>(scores));
    });
    multiply<T>(chain, in, {shared[0], shared[1]}, {shared_hidden.at}, true);
    multiply<T>(chain, shared_hidden, {shared[2]}, {common});
    multiply<T>(chain, in, {experts[0], experts[1]}, {hidden.at}, true, Choice{indices, top, false});
    multiply<T>(chain, hidden, {experts[2]}, {parts}, false, Choice{indices, top, true});
    const Rows out = residual ? scratch_rows<T>(chain, rows, N) : Rows{chain.output(x.shape(), x.dtype()), rows, N};
    chain.add([=](const Memory& memory) {
      combine<T>(
          memory.get<T>(parts), memory.get<float>(scores), memory.get<T>(common), memory.get<T>(weight), rows, top, N,
          memory.get<T>(out.at));
    });
    if (residual) add_and_norm<T>(chain, out, *residual);
  });
  return chain.make("HeadstartMixture");
}

// What a GatedDeltaNet layer holds, beside its projections. `weights`: convolution, A_log, dt_bias, norm; `pending`: qkv,
// k, v, g, beta of the last window's drafts, or nothing.
struct Recurrence {
  Arrays weights;
  float eps;
  mx::array state, conv, accepted;
  Arrays pending;
  int certain;
};

// qkv, z, b, a → y [B, W, HV, DV]; behind the outputs that are there already: the state, the convolution's inputs and
// this window's drafts.
template <typename T>
void fold_and_run(Chain& chain, const std::vector<Slot>& window, int B, int W, const Recurrence& r, Slot y) {
  require(r.weights.size() == 4 && (r.pending.empty() || r.pending.size() == 5), "arrays are missing");
  const int HV = r.state.shape(1), DV = r.state.shape(2), DK = r.state.shape(3), C = r.conv.shape(2);
  const int HK = (C - HV * DV) / (2 * DK), taps = r.weights[0].shape(1), drafts = W - r.certain;
  require(r.certain >= 1 && drafts >= 0 && C == 2 * HK * DK + HV * DV && HV % HK == 0 && DK % 16 == 0, "unknown shape");
  require(r.state.dtype() == mx::float32 && r.state.shape(0) == B, "unknown state");
  require(r.conv.shape() == mx::Shape{B, taps - 1, C} && r.conv.itemsize() == sizeof(T), "unknown convolution");
  require(r.accepted.size() == size_t(B) && r.accepted.dtype() == mx::int32, "accepted must be [B] integers");
  const mx::Dtype type = r.conv.dtype();
  const int old_width = r.pending.empty() ? 0 : r.pending[0].shape(1);
  std::vector<Slot> weights, old, fresh;
  for (const mx::array& weight : r.weights) weights.push_back(chain.input(weight, true));
  const Slot state = chain.input(r.state), conv = chain.input(r.conv), accepted = chain.input(r.accepted);
  for (const mx::array& array : r.pending) old.push_back(chain.input(array));
  const Slot new_state = chain.output_over(state), new_conv = chain.output(r.conv.shape(), type);
  if (drafts) {
    fresh = {
        chain.output({B, drafts, C}, type), chain.output({B, drafts, HK, DK}, mx::float32),
        chain.output({B, drafts, HV, DV}, mx::float32), chain.output({B, drafts, HV}, mx::float32),
        chain.output({B, drafts, HV}, mx::float32)};
  }
  chain.add([=, certain = r.certain, eps = r.eps](const Memory& memory) {
    auto f = [&](Slot slot) { return memory.get<float>(slot); };
    auto t = [&](Slot slot) { return memory.get<T>(slot); };
    GatedDelta<T> op = {B, W, certain, HK, HV, DK, DV, taps, eps};
    op.qkv = t(window[0]), op.z = t(window[1]), op.b = t(window[2]), op.a = t(window[3]);
    op.conv_weight = f(weights[0]), op.A_log = f(weights[1]), op.dt_bias = f(weights[2]);
    op.norm_weight = f(weights[3]);
    op.state = f(state), op.conv = t(conv), op.accepted = memory.get<int>(accepted);
    if (old_width) op.old = {t(old[0]), f(old[1]), f(old[2]), f(old[3]), f(old[4]), old_width};
    op.y = t(y), op.new_state = f(new_state), op.new_conv = t(new_conv);
    if (drafts) op.fresh = {t(fresh[0]), f(fresh[1]), f(fresh[2]), f(fresh[3]), f(fresh[4]), drafts};
    gated_delta(op);
  });
}

// `window`: qkv, z, b, a → y, state, conv, and what is pending.
Arrays py_gated_delta(
    const Arrays& window, const Arrays& weights, float eps, const mx::array& state, const mx::array& conv,
    const mx::array& accepted, const Arrays& pending, int certain) {
  require(window.size() == 4, "arrays are missing");
  const int B = window[0].shape(0), W = window[0].shape(1), HV = state.shape(1), DV = state.shape(2);
  require(window[1].size() == size_t(B) * W * HV * DV, "unknown shape");
  Chain chain;
  std::vector<Slot> slots;
  for (const mx::array& array : window) slots.push_back(chain.input(array));
  const Slot y = chain.output({B, W, HV, DV}, window[0].dtype());
  by_type(window[0], [&]<typename T>(T) {
    fold_and_run<T>(chain, slots, B, W, {weights, eps, state, conv, accepted, pending, certain}, y);
  });
  return chain.make("HeadstartGatedDelta");
}

// A whole GatedDeltaNet layer; `layers` are the projections to qkv, z, b and a → state, conv, what is pending, then the
// layer's output, or with a residual their sum and its norm.
Arrays py_gated_delta_layer(
    const mx::array& x, const Layers& layers, const Layer& out, const Arrays& weights, float eps,
    const mx::array& state, const mx::array& conv, const mx::array& accepted, const Arrays& pending, int certain,
    const std::optional<Residual>& residual) {
  const int B = x.shape(0), W = x.shape(1), HV = state.shape(1), DV = state.shape(2), C = conv.shape(2);
  const long rows = long(B) * W, sizes[] = {C, HV * DV, HV, HV};
  const Linears projections(layers.begin(), layers.end());
  require(projections.size() == 4, "arrays are missing");
  Chain chain;
  const Rows in = {chain.input(x), rows, x.shape(-1)};
  by_type(x, [&]<typename T>(T) {
    std::vector<Slot> window;
    for (int i = 0; i < 4; ++i) {
      require(projections[i].outputs() == sizes[i], "unknown projections");
      window.push_back(chain.scratch(rows * sizes[i] * sizeof(T)));
    }
    const Rows y = scratch_rows<T>(chain, rows, HV * DV);
    multiply<T>(chain, in, projections, window);
    fold_and_run<T>(chain, window, B, W, {weights, eps, state, conv, accepted, pending, certain}, y.at);
    finish<T>(chain, y, out, residual, x.shape(), x.dtype());
  });
  return chain.make("HeadstartGatedDeltaLayer");
}

// What an attention layer holds, beside its projections.
struct Attended {
  mx::array q_weight, k_weight, frequencies, offset, keys, values;
  float eps, scale;
  std::optional<mx::array> angles, last;
};

// Queries with their gates, keys, values → out [B, W or 1, H · D]; behind the outputs that are there already: the caches
// with the window's keys and values in them.
template <typename T>
void attend(Chain& chain, Slot both, Slot k, Slot v, int W, int H, const Attended& a, Slot out) {
  const int B = a.keys.shape(0), HKV = a.keys.shape(1), capacity = a.keys.shape(2), D = a.keys.shape(3);
  const int rotated = 2 * a.frequencies.size();
  require(D % 32 == 0 && H % HKV == 0 && a.values.shape() == a.keys.shape(), "unknown shape");
  require(a.keys.itemsize() == sizeof(T) && a.values.dtype() == a.keys.dtype(), "the cache must have the type of the input");
  require(a.q_weight.size() == size_t(D) && a.k_weight.size() == size_t(D) && rotated <= D, "unknown shape");
  require(a.offset.size() == size_t(B) && a.offset.dtype() == mx::int32, "offset must be [B] integers");
  require(!a.last || (a.last->size() == size_t(B) && a.last->dtype() == mx::int32), "last must be [B] integers");
  const Slot q_weight = chain.input(a.q_weight, true), k_weight = chain.input(a.k_weight, true);
  const Slot frequencies = chain.input(a.frequencies, true), offset = chain.input(a.offset);
  const Slot keys = chain.input(a.keys), values = chain.input(a.values);
  const Slot new_keys = chain.output_over(keys), new_values = chain.output_over(values);
  require(
      !a.angles || (a.angles->shape() == mx::Shape{B, W, rotated / 2} && a.angles->dtype() == mx::float32),
      "angles must be [B, W, rotated / 2] of float32");
  std::optional<Slot> last, angles;
  if (a.last) last = chain.input(*a.last);
  if (a.angles) angles = chain.input(*a.angles);
  chain.add([=, bytes = a.keys.nbytes(), eps = a.eps, scale = a.scale](const Memory& memory) {
    for (auto [from, to] : {std::pair{keys, new_keys}, std::pair{values, new_values}})
      if (memory.get<T>(from) != memory.get<T>(to)) std::memcpy(memory.get<T>(to), memory.get<T>(from), bytes);
    Attention<T> op = {B, W, H, HKV, D, capacity, rotated, eps, scale};
    op.both = memory.get<T>(both), op.k = memory.get<T>(k), op.v = memory.get<T>(v);
    op.q_weight = memory.get<float>(q_weight), op.k_weight = memory.get<float>(k_weight);
    op.frequencies = memory.get<float>(frequencies), op.offset = memory.get<int>(offset);
    op.last = last ? memory.get<int>(*last) : nullptr;
    op.angles = angles ? memory.get<float>(*angles) : nullptr;
    op.keys = memory.get<T>(new_keys), op.values = memory.get<T>(new_values), op.out = memory.get<T>(out);
    attention(op);
  });
}

// → what is attended to, and the caches.
Arrays py_attention(
    const mx::array& both, const mx::array& k, const mx::array& v, const mx::array& q_weight, const mx::array& k_weight,
    const mx::array& frequencies, const mx::array& offset, const mx::array& keys, const mx::array& values, float eps,
    float scale, const std::optional<mx::array>& angles, const std::optional<mx::array>& last) {
  const int B = both.shape(0), W = both.shape(1), HKV = keys.shape(1), D = keys.shape(3), H = both.shape(2) / (2 * D);
  require(both.shape() == mx::Shape{B, W, 2 * H * D} && keys.shape(0) == B, "unknown shape");
  require(k.shape() == mx::Shape{B, W, HKV * D} && v.shape() == k.shape(), "unknown shape");
  require(k.dtype() == both.dtype() && v.dtype() == both.dtype(), "queries, keys and values must have one type");
  Chain chain;
  const Slot a = chain.input(both), b = chain.input(k), c = chain.input(v);
  const Slot out = chain.output({B, last ? 1 : W, H * D}, both.dtype());
  by_type(both, [&]<typename T>(T) {
    attend<T>(
        chain, a, b, c, W, H, {q_weight, k_weight, frequencies, offset, keys, values, eps, scale, angles, last}, out);
  });
  return chain.make("HeadstartAttention");
}

// A whole attention layer; `layers` are the projections to queries with gates, keys and values → the caches, then the layer's
// output, or with a residual their sum and its norm.
Arrays py_attention_layer(
    const mx::array& x, const Layers& layers, const Layer& out, const mx::array& q_weight,
    const mx::array& k_weight, const mx::array& frequencies, const mx::array& offset, const mx::array& keys,
    const mx::array& values, float eps, float scale, const std::optional<mx::array>& angles,
    const std::optional<mx::array>& last, const std::optional<Residual>& residual) {
  const Linears projections(layers.begin(), layers.end());
  require(projections.size() == 3, "layers are missing");
  const int B = x.shape(0), W = x.shape(1), HKV = keys.shape(1), D = keys.shape(3);
  const int H = projections[0].outputs() / (2 * D), asked = last ? 1 : W;
  require(keys.shape(0) == B && projections[0].outputs() == 2 * H * D, "unknown shape");
  require(projections[1].outputs() == HKV * D && projections[2].outputs() == HKV * D, "unknown shape");
  const long rows = long(B) * W;
  Chain chain;
  const Rows in = {chain.input(x), rows, x.shape(-1)};
  by_type(x, [&]<typename T>(T) {
    std::vector<Slot> window;
    for (const Linear& layer : projections) window.push_back(chain.scratch(rows * layer.outputs() * sizeof(T)));
    const Rows y = scratch_rows<T>(chain, long(B) * asked, H * D);
    multiply<T>(chain, in, projections, window);
    attend<T>(
        chain, window[0], window[1], window[2], W, H,
        {q_weight, k_weight, frequencies, offset, keys, values, eps, scale, angles, last}, y.at);
    finish<T>(chain, y, out, residual, {B, asked, 0}, x.dtype());
  });
  return chain.make("HeadstartAttentionLayer");
}

}  // namespace

NB_MODULE(headstart_cpu, m) {
  using namespace nb::literals;
  m.def("isa", &isa);
  m.def("set_threads", &set_threads);
  m.def("threads", &threads);
  m.def("products", &py_products, "x"_a, "layers"_a, "gated"_a = false, "experts"_a = nb::none(), "own"_a = false);
  m.def("norm", &py_norm, "x"_a, "weight"_a, "eps"_a, "added"_a = nb::none());
  m.def("mlp", &py_mlp, "x"_a, "gate"_a, "up"_a, "down"_a, "residual"_a = nb::none());
  m.def(
      "mixture", &py_mixture, "x"_a, "gates"_a, "shared"_a, "experts"_a, "top"_a, "normed"_a,
      "residual"_a = nb::none());
  m.def("gated_delta", &py_gated_delta);
  m.def(
      "gated_delta_layer", &py_gated_delta_layer, "x"_a, "layers"_a, "out"_a, "weights"_a, "eps"_a, "state"_a,
      "conv"_a, "accepted"_a, "pending"_a, "certain"_a, "residual"_a = nb::none());
  m.def(
      "attention", &py_attention, "both"_a, "k"_a, "v"_a, "q_weight"_a, "k_weight"_a, "frequencies"_a, "offset"_a, "keys"_a,
      "values"_a, "eps"_a, "scale"_a, "angles"_a = nb::none(), "last"_a = nb::none());
  m.def(
      "attention_layer", &py_attention_layer, "x"_a, "layers"_a, "out"_a, "q_weight"_a, "k_weight"_a,
      "frequencies"_a, "offset"_a, "keys"_a, "values"_a, "eps"_a, "scale"_a, "angles"_a = nb::none(), "last"_a = nb::none(),
      "residual"_a = nb::none());
}
