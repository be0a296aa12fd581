// Layers in a row as one MLX operation. MLX and Python take longer to describe a part of a layer of a small model than its
// kernels to run.
#pragma once

#include <nanobind/stl/string.h>

#include <string>

#include "attention_layer.h"
#include "feed_forward.h"
#include "latent_layer.h"
#include "recurrence.h"

namespace headstart {

// The name of a part of a layer, what it has, and the weight and epsilon of the norm after it.
using StackPart = std::tuple<std::string, nb::tuple, mx::array, float>;

// Add a part to the stream: `given` are the arguments of its function after `x`, as Python has them.
inline void add_part(
    Chain& chain, const Part& x, const std::string& name, const nb::tuple& given, const Finisher& finisher) {
  auto at = [&]<typename A>(int i, A) { return nb::cast<A>(given[i]); };
  using MaybeArray = std::optional<mx::array>;
  if (name == "mlp") return mlp(chain, x, nb::cast<Layers>(given[0]), finisher);
  const Layers layers = nb::cast<Layers>(given[0]);
  if (name == "mixture")
    return mixture(
        chain, x, layers, nb::cast<Layers>(given[1]), nb::cast<Layers>(given[2]), at(3, 0), at(4, false), finisher);
  if (name == "gated_delta_layer")
    return gated_delta_layer(
        chain, x, layers, nb::cast<Layer>(given[1]), Recurrence::of(nb::cast<Recurrence::Tuple>(given[2])), finisher);
  const Heads heads = Heads::of(nb::cast<Heads::Tuple>(given[2]));
  if (name == "attention_layer")
    return attention_layer(
        chain, x, layers, nb::cast<Layer>(given[1]), heads,
        {nb::cast<Arrays>(given[3]), nb::cast<mx::array>(given[4]), at(5, 0), nb::cast<MaybeArray>(given[6]), {}}, finisher);
  require(name == "latent_layer", "unknown part");
  latent_layer(
      chain, x, layers, nb::cast<std::optional<Layer>>(given[1]), heads, at(3, 0.0f),
      {nb::cast<Arrays>(given[4]), nb::cast<mx::array>(given[5]), 0, {}, {}}, finisher);
}

// The residual stream x [B, W, H] and its norm after all parts: each is given the norm, and adds to the stream. → the
// outputs of all parts, then the stream and its norm.
inline Arrays py_stack(const mx::array& x, const mx::array& normed, const std::vector<StackPart>& parts) {
  require(x.shape() == normed.shape() && x.dtype() == normed.dtype(), "the stream and its norm must be alike");
  Chain chain;
  const size_t bytes = x.nbytes();
  Slot total = chain.input(x);
  Part part = Part::of(chain, normed);
  const Slot totals = chain.scratch(bytes), norms = chain.scratch(bytes);  // from the first part on
  chain.keep_scratch();
  for (const StackPart& each : parts) {
    const mx::array& weight = std::get<2>(each);
    require(weight.ndim() == 1 && weight.shape(0) == x.shape(-1), "weight must be [D] where the input is [..., D]");
    add_part(chain, part, std::get<0>(each), std::get<1>(each), [&](Chain&, const mx::Shape& shape, mx::Dtype) -> Finish {
      require(shape == x.shape(), "a layer must return what it is given");
      return {norms, totals, total, chain.weight(weight, true), std::get<3>(each)};
    });
    total = totals, part.at = norms;
    chain.reuse_scratch();
  }
  const Slot out = chain.output(x.shape(), x.dtype()), out_normed = chain.output(x.shape(), x.dtype());
  chain.add([=, at = part.at](const Memory& memory) {
    std::memcpy(memory.get<char>(out), memory.get<char>(total), bytes);
    std::memcpy(memory.get<char>(out_normed), memory.get<char>(at), bytes);
  });
  return chain.make("HeadstartStack");
}

}  // namespace headstart
