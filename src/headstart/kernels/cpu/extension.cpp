// The kernels as Python functions over MLX arrays, alone and chained to whole parts of a decoder layer.
#include "attention_layer.h"
#include "drawing.h"
#include "latent_layer.h"
#include "linear.h"
#include "recurrence.h"

using namespace headstart;

namespace {

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
    const Slot by = chain.weight(weight, true), out = chain.output(x.shape(), x.dtype());
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
      "attention", &py_attention, "q"_a, "k"_a, "v"_a, "gates"_a.none(), "heads"_a, "caches"_a, "offset"_a,
      "window"_a = 0, "angles"_a = nb::none(), "last"_a = nb::none());
  m.def(
      "attention_layer", &py_attention_layer, "x"_a, "layers"_a, "out"_a, "heads"_a, "caches"_a, "offset"_a,
      "window"_a = 0, "angles"_a = nb::none(), "last"_a = nb::none(), "residual"_a = nb::none());
  m.def(
      "latent_layer", &py_latent_layer, "x"_a, "layers"_a, "q_b"_a.none(), "heads"_a, "query_scale"_a, "caches"_a,
      "offset"_a, "last"_a = nb::none(), "residual"_a = nb::none());
  m.def("draw", &py_draw);
  m.def("verify", &py_verify);
}
