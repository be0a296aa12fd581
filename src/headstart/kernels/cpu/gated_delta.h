// The gated delta rule over a window, with everything between a layer's projections: short convolution, silu, norms of
// q and k, gates, the fold of what is certain, the run of the drafts, the gated norm of the output.
//
// A part is one value head of one sequence. Rows of its state do not depend on one another, so a few of them at a time
// go through all tokens. A token is computed without looking at the width of its window or at the tile it is in.
#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"
#include "math.h"

namespace headstart {

// T tokens of one head, prepared.
struct Tokens {
  const float *q, *k, *v;  // [T, DK], [T, DK], [T, DV]
  const float *g, *beta;   // [T]
  float* out;              // [T, DV], or null where nobody asks
};

// Tokens enter R rows of the state, and the state answers their queries. The first `keep` of them enter `kept`, the rest
// a copy of it; where `keep` is negative the copy is there already.
template <int R>
inline void enter(float* kept, float* copy, long row, long DK, long DV, const Tokens& x, long count, long keep) {
  float* rows = (keep < 0 ? copy : kept) + row * DK;
  for (long t = 0; t < count; ++t) {
    if (t == keep) std::memcpy(copy + row * DK, rows, R * DK * sizeof(float)), rows = copy + row * DK;
    const float *k = x.k + t * DK, *q = x.q ? x.q + t * DK : nullptr;
    const Lanes decay = splat(x.g[t]);
    Lanes known[R], answer[R], delta[R];
    UNROLL for (int r = 0; r < R; ++r) known[r] = answer[r] = splat(0.0f);
    for (long i = 0; i < DK; i += LANES) {
      const Lanes key = load(k + i);
      UNROLL for (int r = 0; r < R; ++r) {
        const Lanes decayed = load(rows + r * DK + i) * decay;
        store(rows + r * DK + i, decayed);
        known[r] = fma(decayed, key, known[r]);
      }
    }
    float totals[R];
    sums(known, totals);
    UNROLL for (int r = 0; r < R; ++r) delta[r] = splat((x.v[t * DV + row + r] - totals[r]) * x.beta[t]);
    for (long i = 0; i < DK; i += LANES) {
      const Lanes key = load(k + i), query = load(q ? q + i : k + i);
      UNROLL for (int r = 0; r < R; ++r) {
        const Lanes now = fma(key, delta[r], load(rows + r * DK + i));
        store(rows + r * DK + i, now);
        if (q) answer[r] = fma(now, query, answer[r]);
      }
    }
    if (q) sums(answer, x.out + t * DV + row);
  }
}

inline void enter(float* kept, float* copy, long DK, long DV, const Tokens& x, long count, long keep) {
  long row = 0;
  for (; row + 8 <= DV; row += 8) enter<8>(kept, copy, row, DK, DV, x, count, keep);
  for (; row < DV; ++row) enter<1>(kept, copy, row, DK, DV, x, count, keep);
}

template <typename T>
class Head {
 public:
  Head(const GatedDelta<T>& op, long batch, long hv)
      : op_(op), batch_(batch), hv_(hv), hk_(hv / (op.HV / op.HK)), shares_(hv % (op.HV / op.HK) == 0),
        folded_(op.old.width ? op.accepted[batch] : 0) {}

  void run() {
    const long DK = op_.DK, DV = op_.DV, CH = 2 * DK + DV, history = op_.taps - 1;
    static thread_local FloatLines memory;
    memory.resize(DV * DK + op_.taps * CH + (history + TILE) * CH + TILE * (CH + DV + 2) + 2 * op_.old.width);
    float* copy = memory.data();
    weights_ = copy + DV * DK;
    inputs_ = weights_ + op_.taps * CH;
    q_ = inputs_ + (history + TILE) * CH;
    k_ = q_ + TILE * DK;
    v_ = k_ + TILE * DK;
    out_ = v_ + TILE * DV;
    g_ = out_ + TILE * DV;
    beta_ = g_ + TILE;
    const long at = (batch_ * op_.HV + hv_) * DV * DK;
    float* state = op_.new_state + at;
    if (state != op_.state + at) std::memcpy(state, op_.state + at, DV * DK * sizeof(float));
    for (long t = 0; t < folded_; ++t) fold(state, t);
    spans(true, [&](long c, long at, long n) {
      for (long j = 0; j < op_.taps; ++j)
        for (long i = 0; i < n; ++i) weights_[j * CH + c + i] = op_.conv_weight[(at + i) * op_.taps + j];
    });
    write_history();
    for (long t0 = 0; t0 < op_.W; t0 += TILE) {
      const long count = std::min<long>(TILE, op_.W - t0);
      prepare(t0, count);
      enter(state, copy, DK, DV, {q_, k_, v_, g_, beta_, out_}, count, op_.certain - t0);
      for (long t = std::max(t0, op_.certain) - t0; t < count; ++t) keep_draft(t0 + t - op_.certain, t);
      for (long t = 0; t < count; ++t) finish(t0 + t, out_ + t * DV);
    }
  }

 private:
  static constexpr long TILE = 32;  // tokens prepared together

  // One of the old drafts that were accepted.
  void fold(float* state, long t) {
    const long at = batch_ * op_.old.width + t;
    const float g = op_.old.g[at * op_.HV + hv_], beta = op_.old.beta[at * op_.HV + hv_];
    const float* k = op_.old.k + (at * op_.HK + hk_) * op_.DK;
    const float* v = op_.old.v + (at * op_.HV + hv_) * op_.DV;
    enter(state, nullptr, op_.DK, op_.DV, {nullptr, k, v, &g, &beta, nullptr}, 1, 1);
  }

  // Of this head's channels, q's before k's before v's, their place among all.
  long channel(long c) const {
    if (c < op_.DK) return hk_ * op_.DK + c;
    if (c < 2 * op_.DK) return (op_.HK - 1 + hk_) * op_.DK + c;
    return 2 * op_.HK * op_.DK + hv_ * op_.DV + c - 2 * op_.DK;
  }

  // The convolution's inputs at a position of the window; before it, what came last of all that is certain.
  const T* input(long t) const {
    const long C = op_.channels(), history = op_.taps - 1;
    if (t >= 0) return op_.qkv + (batch_ * op_.W + t) * C;
    const long before = t + history + folded_;
    if (before < history) return op_.conv + (batch_ * history + before) * C;
    return op_.old.qkv + (batch_ * op_.old.width + before - history) * C;
  }

  // f(first of this head's channels, their place among all, how many) for q, k and v; only what this head has alone
  // or must write for those that share it.
  template <typename F>
  void spans(bool all, const F& f) const {
    if (all || shares_) f(0, channel(0), op_.DK), f(op_.DK, channel(op_.DK), op_.DK);
    f(2 * op_.DK, channel(2 * op_.DK), op_.DV);
  }

  void write_history() {
    const long C = op_.channels(), history = op_.taps - 1;
    for (long j = 0; j < history; ++j) {
      const T* from = input(op_.certain - history + j);
      T* to = op_.new_conv + (batch_ * history + j) * C;
      spans(false, [&](long, long at, long n) { std::memcpy(to + at, from + at, n * sizeof(T)); });
    }
  }

  void prepare(long t0, long count) {
    const long DK = op_.DK, DV = op_.DV, CH = 2 * DK + DV, history = op_.taps - 1;
    for (long t = -history; t < count; ++t) {
      const T* from = input(t0 + t);
      float* to = inputs_ + (t + history) * CH;
      spans(true, [&](long c, long at, long n) {
        for (long i = 0; i < n; ++i) to[c + i] = to_float(from[at + i]);
      });
    }
    for (long t = 0; t < count; ++t) {
      convolve(t, 0, DK, q_ + t * DK);
      convolve(t, DK, DK, k_ + t * DK);
      convolve(t, 2 * DK, DV, v_ + t * DV);
      unit(q_ + t * DK, std::sqrt(float(DK)));
      unit(k_ + t * DK, 1.0f);
      const long at = (batch_ * op_.W + t0 + t) * op_.HV + hv_;
      const float rate = exponential(op_.A_log[hv_]);
      g_[t] = exponential(-(rate * softplus(to_float(op_.a[at]) + op_.dt_bias[hv_])));
      beta_[t] = sigmoid(to_float(op_.b[at]));
    }
  }

  void convolve(long t, long first, long n, float* __restrict out) const {
    const long CH = 2 * op_.DK + op_.DV;
    const float* __restrict in = inputs_ + t * CH + first;
    const float* __restrict w = weights_ + first;
    for (long i = 0; i < n; ++i) out[i] = 0.0f;
    for (long j = 0; j < op_.taps; ++j)
      for (long i = 0; i < n; ++i) out[i] = fused(w[j * CH + i], in[j * CH + i], out[i]);
    for (long i = 0; i < n; ++i) out[i] = silu(out[i]);
  }

  // To unit length, over `by`.
  void unit(float* x, float by) const {
    const float scale = 1.0f / (std::sqrt(dot(x, x, op_.DK) + 1e-6f) * by);
    for (long i = 0; i < op_.DK; ++i) x[i] *= scale;
  }

  void keep_draft(long draft, long t) {
    const long at = batch_ * op_.fresh.width + draft, C = op_.channels();
    const T* from = input(draft + op_.certain);
    spans(false, [&](long, long c, long n) { std::memcpy(op_.fresh.qkv + at * C + c, from + c, n * sizeof(T)); });
    if (shares_) std::memcpy(op_.fresh.k + (at * op_.HK + hk_) * op_.DK, k_ + t * op_.DK, op_.DK * sizeof(float));
    std::memcpy(op_.fresh.v + (at * op_.HV + hv_) * op_.DV, v_ + t * op_.DV, op_.DV * sizeof(float));
    op_.fresh.g[at * op_.HV + hv_] = g_[t];
    op_.fresh.beta[at * op_.HV + hv_] = beta_[t];
  }

  // Norm and gate what the state answered.
  void finish(long t, const float* out) const {
    const long at = ((batch_ * op_.W + t) * op_.HV + hv_) * op_.DV;
    const float scale = 1.0f / std::sqrt(dot(out, out, op_.DV) / float(op_.DV) + op_.eps);
    const auto write = [&](auto gate) {
      for (long i = 0; i < op_.DV; ++i) {
        assign(op_.y[at + i], (out[i] * scale) * op_.norm_weight[i] * gate(to_float(op_.z[at + i])));
      }
    };
    if (op_.sigmoid) write([](float z) { return sigmoid(z); });
    else write([](float z) { return silu(z); });
  }

  const GatedDelta<T>& op_;
  const long batch_, hv_, hk_;
  const bool shares_;  // of those that share a key head: it writes what they share
  const long folded_;
  float *weights_, *inputs_, *q_, *k_, *v_, *out_, *g_, *beta_;
};

template <typename T>
void gated_delta(const GatedDelta<T>& op) {
  pool().run(op.B * op.HV, [&](uint32_t part) { Head<T>(op, part / op.HV, part % op.HV).run(); });
}

}  // namespace headstart
