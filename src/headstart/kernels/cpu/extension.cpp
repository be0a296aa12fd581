// The kernels as Python functions over MLX arrays, alone and chained to whole parts of a decoder layer or to several.
#include "attention_layer.h"
#include "drawing.h"
#include "latent_layer.h"
#include "linear.h"
#include "recurrence.h"
#include "stack.h"
#include "stream_layer.h"

using namespace headstart;

namespace {

// `layers` by one input. With `experts` [..., top] x is [..., K], or where `own` is set [..., top, K], and the result
// is [..., top, N]. `wide`: in float32.
Arrays py_products(
    const mx::array& x, const Layers& given, bool gated, const std::optional<mx::array>& experts, bool own, bool wide) {
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
    out.push_back(chain.output(with_last(shape, layers[i].outputs()), wide ? mx::float32 : x.dtype()));
  by_type(x.dtype(), [&]<typename T>(T) { multiply<T>(chain, in, layers, out, gated, choice, wide); });
  return chain.make("HeadstartProducts");
}

// The norm of x; with `added` x + added and the norm of that.
Arrays py_norm(const mx::array& x, const mx::array& weight, float eps, const std::optional<mx::array>& added) {
  Chain chain;
  const Part part = Part::of(chain, x);
  const Rows in = part.rows();
  require(weight.ndim() == 1 && weight.shape(0) == in.size, "weight must be [D] where the input is [..., D]");
  by_type(part.type, [&]<typename T>(T) {
    if (added) return add_and_norm<T>(chain, in, finisher(Residual(*added, weight, eps))(chain, part.shape, part.type));
    const Slot by = chain.weight(weight, true), out = chain.output(x.shape(), x.dtype());
    chain.add([=](const Memory& memory) {
      norm<T>(
          memory.get<T>(in.at), nullptr, memory.get<float>(by), eps, in.rows, in.size, static_cast<T*>(nullptr),
          memory.get<T>(out));
    });
  });
  return chain.make("HeadstartNorm");
}

// A part of a layer alone → what it returns, then the layer's output, or with a residual their sum and its norm.
template <typename F>
Arrays alone(const char* name, const mx::array& x, const std::optional<Residual>& residual, const F& add) {
  Chain chain;
  const Part part = Part::of(chain, x);
  add(chain, part, finisher(residual));
  return chain.make(name);
}

}  // namespace

NB_MODULE(headstart_cpu, m) {
  using namespace nb::literals;
  using MaybeResidual = std::optional<Residual>;
  using MaybeArray = std::optional<mx::array>;
  m.def("isa", &isa);
  m.def("set_threads", &set_threads);
  m.def("threads", &threads);
  m.def(
      "products", &py_products, "x"_a, "layers"_a, "gated"_a = false, "experts"_a = nb::none(), "own"_a = false,
      "wide"_a = false);
  m.def("norm", &py_norm, "x"_a, "weight"_a, "eps"_a, "added"_a = nb::none());
  m.def(
      "mix_streams", &py_mix_streams, "x"_a, "fn"_a, "scale"_a, "base"_a, "streams"_a, "iterations"_a, "norm_eps"_a,
      "eps"_a);
  m.def("inject", &py_inject, "streams"_a, "made"_a, "shares"_a);
  m.def(
      "mlp",
      [](const mx::array& x, const Layers& layers, const MaybeResidual& residual) {
        return alone("HeadstartMLP", x, residual, [&](Chain& chain, const Part& part, const Finisher& to) {
          mlp(chain, part, layers, to);
        });
      },
      "x"_a, "layers"_a, "residual"_a = nb::none());
  m.def(
      "mixture",
      [](const mx::array& x, const Layers& gates, const Layers& shared, const Layers& experts, int top, bool normed,
         const MaybeResidual& residual) {
        return alone("HeadstartMixture", x, residual, [&](Chain& chain, const Part& part, const Finisher& to) {
          mixture(chain, part, gates, shared, experts, top, normed, to);
        });
      },
      "x"_a, "gates"_a, "shared"_a, "experts"_a, "top"_a, "normed"_a, "residual"_a = nb::none());
  m.def(
      "gated_delta", &py_gated_delta, "window"_a, "weights"_a, "eps"_a, "state"_a, "conv"_a, "accepted"_a, "pending"_a,
      "certain"_a, "sigmoid"_a = false);
  m.def(
      "gated_delta_layer",
      [](const mx::array& x, const Layers& layers, const Layer& out, const Recurrence::Tuple& recurrence,
         const MaybeResidual& residual) {
        return alone("HeadstartGatedDeltaLayer", x, residual, [&](Chain& chain, const Part& part, const Finisher& to) {
          gated_delta_layer(chain, part, layers, out, Recurrence::of(recurrence), to);
        });
      },
      "x"_a, "layers"_a, "out"_a, "recurrence"_a, "residual"_a = nb::none());
  m.def(
      "attention", &py_attention, "q"_a, "k"_a, "v"_a, "gates"_a.none(), "heads"_a, "caches"_a, "offset"_a,
      "window"_a = 0, "angles"_a = nb::none(), "last"_a = nb::none());
  m.def(
      "attention_layer",
      [](const mx::array& x, const Layers& layers, const Layer& out, const Heads::Tuple& heads, const Arrays& caches,
         const mx::array& offset, int window, const MaybeArray& angles, const MaybeArray& last,
         const MaybeResidual& residual) {
        return alone("HeadstartAttentionLayer", x, residual, [&](Chain& chain, const Part& part, const Finisher& to) {
          attention_layer(chain, part, layers, out, Heads::of(heads), {caches, offset, window, angles, last}, to);
        });
      },
      "x"_a, "layers"_a, "out"_a, "heads"_a, "caches"_a, "offset"_a, "window"_a = 0, "angles"_a = nb::none(),
      "last"_a = nb::none(), "residual"_a = nb::none());
  m.def(
      "latent_layer",
      [](const mx::array& x, const Layers& layers, const std::optional<Layer>& q_b, const Heads::Tuple& heads,
         float query_scale, const Arrays& caches, const mx::array& offset, const MaybeArray& last,
         const MaybeResidual& residual) {
        return alone("HeadstartLatentLayer", x, residual, [&](Chain& chain, const Part& part, const Finisher& to) {
          latent_layer(chain, part, layers, q_b, Heads::of(heads), query_scale, {caches, offset, 0, {}, last}, to);
        });
      },
      "x"_a, "layers"_a, "q_b"_a.none(), "heads"_a, "query_scale"_a, "caches"_a, "offset"_a, "last"_a = nb::none(),
      "residual"_a = nb::none());
  m.def("stack", &py_stack);
  m.def("draw", &py_draw);
  m.def("verify", &py_verify);
}
