// MLPs and mixtures of experts as parts of a layer.
#pragma once

#include "linear.h"

namespace headstart {

// An MLP with SwiGLU: gate, up and down.
inline void mlp(Chain& chain, const Part& x, const Layers& layers, const Finisher& finisher) {
  const Linears each(layers.begin(), layers.end());
  require(each.size() == 3, "layers are missing");
  by_type(x.type, [&]<typename T>(T) {
    const Rows hidden = scratch_rows<T>(chain, x.rows().rows, each[0].outputs());
    multiply<T>(chain, x.rows(), {each[0], each[1]}, {hidden.at}, true);
    finish<T>(chain, hidden, each[2], finisher, x.shape, x.type);
  });
}

// A mixture of experts: a router and the gate of the shared expert; gate, up and down of the shared expert; those of the
// experts.
inline void mixture(
    Chain& chain, const Part& x, const Layers& gates, const Layers& shared_layers, const Layers& expert_layers, int top,
    bool normed, const Finisher& finisher) {
  require(gates.size() == 2 && shared_layers.size() == 3 && expert_layers.size() == 3, "layers are missing");
  const Linear router = gates[0], shared_gate = gates[1];
  const Linears shared(shared_layers.begin(), shared_layers.end()), experts(expert_layers.begin(), expert_layers.end());
  require(top >= 1 && top <= router.outputs() && router.outputs() == experts[0].weight.shape(0), "unknown experts");
  const Rows in = x.rows();
  const long rows = in.rows, E = router.outputs(), N = in.size;
  require(shared[2].outputs() == N && experts[2].outputs() == N && shared_gate.outputs() == 1, "unknown shape");
  by_type(x.type, [&]<typename T>(T) {
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
    const Finish to = finisher(chain, x.shape, x.type);
    const bool adds = to.added.index >= 0;
    const Rows out = adds ? scratch_rows<T>(chain, rows, N) : Rows{to.out, rows, N};
    chain.add([=](const Memory& memory) {
      combine<T>(
          memory.get<T>(parts), memory.get<float>(scores), memory.get<T>(common), memory.get<T>(weight), rows, top, N,
          memory.get<T>(out.at));
    });
    if (adds) add_and_norm<T>(chain, out, to);
  });
}

}  // namespace headstart
