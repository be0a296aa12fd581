// Latent attention as a part of a layer.
#pragma once

#include "attention_layer.h"

namespace headstart {

// A whole layer of latent attention. `layers`: the projections to queries, or to what `q_b` makes them of after its norm,
// and to latents with rotated keys; the matrices of heads that queries and what is attended to are multiplied with; the
// product at the end. Of `heads` q_norm is that before `q_b`, k_norm that of latents, value_scale theirs. `caches`:
// latents, rotated keys. → the caches, then the layer's output.
inline void latent_layer(
    Chain& chain, const Part& x, const Layers& layers, const std::optional<Layer>& q_b, const Heads& heads,
    float query_scale, const Past& past, const Finisher& finisher) {
  require(layers.size() == 5, "layers are missing");
  const Linear down = layers[0], compress = layers[1], embed = layers[2], unembed = layers[3];
  const Linear up = q_b ? Linear(*q_b) : down;
  const int B = x.shape[0], W = x.shape[1], H = heads.count, R = past.size(0), rotated = past.size(1);
  const int asked = past.last ? 1 : W;
  const int plain = embed.inputs(), size = plain + rotated, V = unembed.outputs();
  require(past.batch() == B && up.outputs() == H * size && compress.outputs() == R + rotated, "unknown shape");
  require(embed.weight.shape(0) == H && embed.outputs() == R, "unknown shape");
  require(unembed.weight.shape(0) == H && unembed.inputs() == R, "unknown shape");
  require(heads.k_norm && heads.k_norm->size() == size_t(R) && heads.kv_count == 1, "unknown norm of latents");
  require(!q_b || (heads.q_norm && long(heads.q_norm->size()) == up.inputs()), "unknown norm before queries");
  require(heads.frequencies && 2 * heads.frequencies->size() <= rotated, "unknown rotation");
  const long rows = long(B) * W, answers = long(B) * asked * H;
  by_type(x.type, [&]<typename T>(T) {
    const Rows first = scratch_rows<T>(chain, rows, down.outputs()), compressed = scratch_rows<T>(chain, rows, R + rotated);
    multiply<T>(chain, x.rows(), {down, compress}, {first.at, compressed.at});
    Rows queries = first;
    if (q_b) {
      const Slot weight = chain.weight(heads.q_norm, true);
      const Rows normed = scratch_rows<T>(chain, rows, down.outputs());
      chain.add([=, eps = heads.eps](const Memory& memory) {
        norm<T>(memory.get<T>(first.at), nullptr, memory.get<float>(weight), eps, rows, first.size, static_cast<T*>(nullptr), memory.get<T>(normed.at));
      });
      queries = scratch_rows<T>(chain, rows, up.outputs());
      multiply<T>(chain, normed, {up}, {queries.at});
    }
    const Rows plain_rows = scratch_rows<T>(chain, rows * H, plain), embedded = scratch_rows<T>(chain, rows * H, R);
    const Rows found = scratch_rows<T>(chain, answers, R), y = scratch_rows<T>(chain, long(B) * asked, H * V);
    const Slot indices = chain.scratch(rows * H * 4);  // the matrices of heads are those of experts
    chain.add([=](const Memory& memory) {
      for (long i = 0; i < rows * H; ++i) memory.get<uint32_t>(indices)[i] = i % H;
      first_elements<T>(memory.get<T>(queries.at), rows * H, size, plain, query_scale, memory.get<T>(plain_rows.at));
    });
    multiply<T>(chain, plain_rows, {embed}, {embedded.at}, false, Choice{indices, H, true});
    chain.add([=, held = attending<T>(chain, W, heads, past)](const Memory& memory) {
      Attention<T> op = held(memory);
      op.q = memory.get<T>(embedded.at), op.out = memory.get<T>(found.at);
      op.more_keys = op.values, op.values = op.keys;
      latent_attention<T>({op, memory.get<T>(queries.at), memory.get<T>(compressed.at), plain, query_scale});
    });
    multiply<T>(chain, found, {unembed}, {y.at}, false, Choice{indices, H, true});
    finish<T>(chain, y, layers[4], finisher, {B, asked, 0}, x.type);
  });
}

}  // namespace headstart
