// Linear layers as Python passes them, and products and the residual as kernels in a chain.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "kernels.h"
#include "operation.h"

namespace headstart {

namespace nb = nanobind;

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// f(float{}) or f(bfloat{}), by the type of the activations.
template <typename F>
void by_type(mx::Dtype type, F f) {
  require(type == mx::bfloat16 || type == mx::float32, "activations must be bfloat16 or float32");
  if (type == mx::bfloat16) f(bfloat{});
  else f(float{});
}

inline std::optional<Number> number_of(const mx::array& array) {
  if (array.dtype() == mx::bfloat16) return Number::BFLOAT;
  if (array.dtype() == mx::float32) return Number::FLOAT;
  if (array.dtype() == mx::float16) return Number::HALF;
  return {};
}

// The weights of a linear layer [N, K], or of one for each expert [experts, N, K]: dense, or quantised with scales and
// biases for every `group` of inputs; in nvfp4 `biases` are a factor for each matrix. `bias` is added to the outputs, and
// so is what adapters make of the inputs: two matrices for every slot (`Adapters` in kernels.h), the slots of sequences,
// and the rank of every slot.
struct Linear {
  using Array = std::optional<mx::array>;
  using Adapted = std::optional<std::tuple<mx::array, mx::array, mx::array, std::vector<int>>>;
  using Tuple = std::tuple<mx::array, Array, Array, int, int, Array, Adapted>;
  mx::array weight;
  std::optional<mx::array> scales, biases;
  int bits, group;
  std::optional<mx::array> bias;
  Adapted adapters;

  Linear(const Tuple& from)
      : weight(std::get<0>(from)), scales(std::get<1>(from)), biases(std::get<2>(from)), bits(std::get<3>(from)),
        group(std::get<4>(from)), bias(std::get<5>(from)), adapters(std::get<6>(from)) {
    require(weight.ndim() == 2 || weight.ndim() == 3, "weights must be [N, K], with experts [experts, N, K]");
    require(bool(scales) == bool(bits) && (bits || !biases), "a layer must be dense or have scales");
    require(!bias || bias->size() == weight.size() / weight.shape(-1), "a bias must be [N]");
    check_adapters();
    if (!bits) return;
    require(bits >= 1 && bits <= 8 && bits != 7, "unknown bits");
    require(group >= 16 && (group & (group - 1)) == 0, "unknown group");
    require(weight.dtype() == mx::uint32 && weight.shape(-1) * 32l % (long(bits) * group) == 0, "unknown codes");
    if (floats()) {
      require(bits == 4 || bits == 8, "unknown bits");
      require(group == 32 || (group == 16 && bits == 4), "unknown group");
      require(!biases || (biases->dtype() == mx::float32 && biases->size() == experts()), "unknown factor");
    } else {
      require(group >= 32 && number_of(*scales), "unknown scales");
      require(biases && biases->dtype() == scales->dtype() && biases->shape() == scales->shape(), "unknown biases");
    }
    require(scales->shape(-1) * long(group) == inputs() && scales->shape(-2) == outputs(), "unknown scales");
  }

  void check_adapters() const {
    if (!adapters) return;
    const auto& [down, up, slots, ranks] = *adapters;
    const int experts = weight.ndim() == 3 ? weight.shape(0) : 1;
    require(down.ndim() == 3 && up.ndim() == 3 && down.dtype() == mx::float32 && up.dtype() == mx::float32, "unknown adapters");
    require(down.shape(0) == up.shape(0) && down.shape(0) % experts == 0 && down.shape(1) == up.shape(1), "unknown adapters");
    require(down.shape(2) == inputs() && up.shape(2) == outputs(), "adapters are of another layer");
    require(slots.ndim() == 1 && slots.dtype() == mx::int32, "slots must be [B] integers");
    require(int(ranks.size()) * experts == down.shape(0), "every slot has a rank");
    for (int rank : ranks) require(rank > 0 && rank <= down.shape(1), "unknown rank");
  }

  int outputs() const {
    return weight.shape(-2);
  }
  size_t experts() const {
    return weight.ndim() == 3 ? weight.shape(0) : 1;
  }
  // Codes are floating-point numbers: MLX's mxfp4, mxfp8 and nvfp4, of which the last has 16 codes to a scale.
  bool floats() const {
    return bits && scales->dtype() == mx::uint8;
  }
  Number scale() const {
    if (floats()) return group == 16 ? Number::E4M3 : Number::E8M0;
    return bits ? *number_of(*scales) : Number::BFLOAT;
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

// What a part of a layer is given [B, W, H].
struct Part {
  Slot at;
  mx::Shape shape;
  mx::Dtype type;

  static Part of(Chain& chain, const mx::array& x) {
    return {chain.input(x), x.shape(), x.dtype()};
  }
  Rows rows() const {
    const long size = shape.back();
    return {at, long(std::accumulate(shape.begin(), shape.end(), 1l, std::multiplies<>())) / size, size};
  }
};

// Experts chosen for each row [rows, top]; `own`: each expert has a row of its own as its input.
struct Choice {
  Slot indices;
  long top;
  bool own;
};

// x by every layer → out[i], `wide` in float32. `gated`: of two layers silu(first) · second → out[0].
template <typename T>
void multiply(
    Chain& chain, Rows x, const Linears& layers, const std::vector<Slot>& out, bool gated = false,
    std::optional<Choice> choice = {}, bool wide = false) {
  struct Held {
    Slot weight, scales, biases, bias, down, up, slots;
    std::vector<int> ranks;
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
      matrices.push_back({nullptr, layer.outputs(), layer.bits, layer.group, layer.scale()});
      held.push_back(
          {chain.weight(layer.weight), chain.weight(layer.scales), chain.weight(layer.biases), chain.weight(layer.bias, true)});
      if (!layer.adapters) continue;
      const auto& [down, up, slots, ranks] = *layer.adapters;
      const long experts = layer.weight.ndim() == 3 ? layer.weight.shape(0) : 1;
      require(slots.size() && x.rows % slots.size() == 0, "every sequence has as many rows");
      matrices.back().adapters = {nullptr, nullptr, nullptr, nullptr, long(slots.size()), down.shape(1), experts};
      held.back().down = chain.weight(down), held.back().up = chain.weight(up), held.back().slots = chain.shared(slots), held.back().ranks = ranks;
    }
    require(!gated || matrices.size() == 2, "a gate has two layers of one kind");
    const std::vector<Slot> to(out.begin() + first, out.begin() + (gated ? 1 : end));
    chain.add([=](const Memory& memory) {
      std::vector<Matrix> filled = matrices;
      std::vector<void*> outputs;
      for (size_t i = 0; i < filled.size(); ++i) {
        filled[i].w = memory.get<void>(held[i].weight), filled[i].bias = memory.get<float>(held[i].bias);
        filled[i].scales = memory.get<void>(held[i].scales), filled[i].biases = memory.get<void>(held[i].biases);
        Adapters& adapters = filled[i].adapters;
        adapters.down = memory.get<float>(held[i].down), adapters.up = memory.get<float>(held[i].up);
        adapters.slots = memory.get<int>(held[i].slots), adapters.ranks = held[i].ranks.data();
      }
      for (Slot slot : to) outputs.push_back(memory.get<void>(slot));
      products<T>(
          {memory.get<T>(x.at), x.rows, x.size, choice && !choice->own ? choice->top : 1, int(filled.size()),
           filled.data(), outputs.data(), wide, gated, choice ? memory.get<uint32_t>(choice->indices) : nullptr});
    });
  }
}

template <typename T>
Rows scratch_rows(Chain& chain, long rows, long size) {
  return {chain.scratch(rows * size * sizeof(T)), rows, size};
}

inline mx::Shape with_last(mx::Shape shape, int size) {
  shape.back() = size;
  return shape;
}

// What a part of a layer is added to, and the weight and epsilon of the norm of that sum.
using Residual = std::tuple<mx::array, mx::array, float>;

// Where the last product of a part of a layer goes: to `out`; or the sum with what was `added` to `total`, and its norm to
// `out`.
struct Finish {
  Slot out, total, added, weight;
  float eps = 0.0f;
};
// → that, when all other outputs of an operation are there; of an output [.., N].
using Finisher = std::function<Finish(Chain&, mx::Shape shape, mx::Dtype type)>;

// The residual and what it becomes, as outputs; without one the output.
inline Finisher finisher(const std::optional<Residual>& residual) {
  return [residual](Chain& chain, mx::Shape shape, mx::Dtype type) -> Finish {
    if (!residual) return {chain.output(std::move(shape), type)};
    const auto& [added, weight, eps] = *residual;
    require(added.shape() == shape && added.dtype() == type, "the sum's parts must be alike");
    require(weight.ndim() == 1 && weight.shape(0) == shape.back(), "weight must be [D] where the input is [..., D]");
    const Slot other = chain.input(added), by = chain.weight(weight, true), total = chain.output(shape, type);
    return {chain.output(shape, type), total, other, by, eps};
  };
}

// Add x [rows, D] to the residual.
template <typename T>
void add_and_norm(Chain& chain, Rows x, const Finish& to) {
  chain.add([=](const Memory& memory) {
    norm<T>(
        memory.get<T>(to.added), memory.get<T>(x.at), memory.get<float>(to.weight), to.eps, x.rows, x.size,
        memory.get<T>(to.total), memory.get<T>(to.out));
  });
}

// The last product of a part of a layer → its output [shape[:-1], N], or with a residual their sum and its norm.
template <typename T>
void finish(Chain& chain, Rows x, const Linear& layer, const Finisher& finisher, mx::Shape shape, mx::Dtype type) {
  const Finish to = finisher(chain, with_last(shape, layer.outputs()), type);
  if (to.added.index < 0) return multiply<T>(chain, x, {layer}, {to.out});
  const Rows part = scratch_rows<T>(chain, x.rows, layer.outputs());
  multiply<T>(chain, x, {layer}, {part.at});
  add_and_norm<T>(chain, part, to);
}

}  // namespace headstart
