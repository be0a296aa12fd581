// Several residual streams as Python passes them.
#pragma once

#include "linear.h"

namespace headstart {

// x [..., S · H] by the weights of a hyper-connection → the mean [..., H], the mixed streams and the shares in float32.
inline Arrays py_mix_streams(
    const mx::array& x, const Layer& fn, const mx::array& scale, const mx::array& base, int S, int iterations,
    float norm_eps, float eps) {
  const Linear layer = fn;
  Chain chain;
  const Part part = Part::of(chain, x);
  const Rows in = part.rows();
  require(S > 0 && in.size % S == 0 && layer.outputs() == (2 + S) * S && layer.inputs() == in.size, "unknown streams");
  require(scale.size() == 3 && base.size() == size_t(layer.outputs()), "unknown weights of streams");
  const long H = in.size / S;
  const Slot by = chain.weight(scale, true), from = chain.weight(base, true);
  const Slot mean = chain.output(with_last(part.shape, H), part.type);
  const Slot streams = chain.output(part.shape, mx::float32), shares = chain.output(with_last(part.shape, S), mx::float32);
  const Rows normed = scratch_rows<float>(chain, in.rows, in.size);
  const Slot products = chain.scratch(in.rows * layer.outputs() * sizeof(float));
  by_type(part.type, [&]<typename T>(T) {
    chain.add([=](const Memory& memory) {
      norm_streams<T>(memory.get<T>(in.at), norm_eps, in.rows, in.size, memory.get<float>(normed.at));
    });
    multiply<float>(chain, normed, {layer}, {products});
    chain.add([=](const Memory& memory) {
      mix_streams<T>(
          {memory.get<T>(in.at), memory.get<float>(products), memory.get<float>(by), memory.get<float>(from), in.rows, H,
           S, iterations, eps, memory.get<T>(mean), memory.get<float>(streams), memory.get<float>(shares)});
    });
  });
  return chain.make("HeadstartMixStreams");
}

// Streams [..., S · H] with their shares [..., S] of what a part made [..., H].
inline Arrays py_inject(const mx::array& streams, const mx::array& made, const mx::array& shares) {
  Chain chain;
  const Part part = Part::of(chain, made);
  const Rows in = part.rows();
  const int S = shares.shape(-1);
  require(streams.shape(-1) == S * in.size && long(shares.size()) == in.rows * S, "unknown streams");
  const Slot before = chain.input(streams, true), by = chain.input(shares, true);
  const Slot out = chain.output(streams.shape(), part.type);
  by_type(part.type, [&]<typename T>(T) {
    chain.add([=](const Memory& memory) {
      inject<T>(
          memory.get<float>(before), memory.get<float>(by), memory.get<T>(in.at), in.rows, S, in.size,
          memory.get<T>(out));
    });
  });
  return chain.make("HeadstartInject");
}

}  // namespace headstart
