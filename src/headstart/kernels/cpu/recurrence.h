// A GatedDeltaNet layer as a Python function, alone and with its projections.
#pragma once

#include "linear.h"

namespace headstart {

// What a GatedDeltaNet layer holds, beside its projections. `weights`: convolution, A_log, dt_bias, norm; `pending`: qkv,
// k, v, g, beta of the last window's drafts, or nothing.
struct Recurrence {
  using Tuple = std::tuple<Arrays, float, mx::array, mx::array, mx::array, Arrays, int, bool>;
  Arrays weights;
  float eps;
  mx::array state, conv, accepted;
  Arrays pending;
  int certain;
  bool sigmoid;  // the output's gate, or silu

  static Recurrence of(const Tuple& from) {
    return std::apply([](const auto&... each) { return Recurrence{each...}; }, from);
  }
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
  for (const mx::array& weight : r.weights) weights.push_back(chain.weight(weight, true));
  const Slot state = chain.input(r.state), conv = chain.input(r.conv), accepted = chain.shared(r.accepted);
  for (const mx::array& array : r.pending) old.push_back(chain.input(array));
  const Slot new_state = chain.output_over(state), new_conv = chain.output(r.conv.shape(), type);
  if (drafts) {
    fresh = {
        chain.output({B, drafts, C}, type), chain.output({B, drafts, HK, DK}, mx::float32),
        chain.output({B, drafts, HV, DV}, mx::float32), chain.output({B, drafts, HV}, mx::float32),
        chain.output({B, drafts, HV}, mx::float32)};
  }
  chain.add([=, certain = r.certain, eps = r.eps, sigmoid = r.sigmoid](const Memory& memory) {
    auto f = [&](Slot slot) { return memory.get<float>(slot); };
    auto t = [&](Slot slot) { return memory.get<T>(slot); };
    GatedDelta<T> op = {B, W, certain, HK, HV, DK, DV, taps, eps, sigmoid};
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
inline Arrays py_gated_delta(
    const Arrays& window, const Arrays& weights, float eps, const mx::array& state, const mx::array& conv,
    const mx::array& accepted, const Arrays& pending, int certain, bool sigmoid) {
  require(window.size() == 4, "arrays are missing");
  const int B = window[0].shape(0), W = window[0].shape(1), HV = state.shape(1), DV = state.shape(2);
  require(window[1].size() == size_t(B) * W * HV * DV, "unknown shape");
  Chain chain;
  std::vector<Slot> slots;
  for (const mx::array& array : window) slots.push_back(chain.input(array));
  const Slot y = chain.output({B, W, HV, DV}, window[0].dtype());
  by_type(window[0].dtype(), [&]<typename T>(T) {
    fold_and_run<T>(chain, slots, B, W, {weights, eps, state, conv, accepted, pending, certain, sigmoid}, y);
  });
  return chain.make("HeadstartGatedDelta");
}

// A whole GatedDeltaNet layer; `layers` are the projections to qkv, z, b and a → state, conv, what is pending, then the
// layer's output.
inline void gated_delta_layer(
    Chain& chain, const Part& x, const Layers& layers, const Layer& out, const Recurrence& r, const Finisher& finisher) {
  const int B = x.shape[0], W = x.shape[1], HV = r.state.shape(1), DV = r.state.shape(2), C = r.conv.shape(2);
  const long rows = long(B) * W, sizes[] = {C, HV * DV, HV, HV};
  const Linears projections(layers.begin(), layers.end());
  require(projections.size() == 4, "arrays are missing");
  by_type(x.type, [&]<typename T>(T) {
    std::vector<Slot> window;
    for (int i = 0; i < 4; ++i) {
      require(projections[i].outputs() == sizes[i], "unknown projections");
      window.push_back(chain.scratch(rows * sizes[i] * sizeof(T)));
    }
    const Rows y = scratch_rows<T>(chain, rows, HV * DV);
    multiply<T>(chain, x.rows(), projections, window);
    fold_and_run<T>(chain, window, B, W, r, y.at);
    finish<T>(chain, y, out, finisher, x.shape, x.type);
  });
}

}  // namespace headstart
