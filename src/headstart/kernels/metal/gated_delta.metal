// The gated delta rule over a window, with everything between a layer's projections: short convolution, silu, norms
// of q and k, gates, the fold of accepted drafts, the run of the window, the gated norm of the output.
//
// A threadgroup has one value head of one sequence. Its state [DV, DK] stays in registers from the one read to the one
// write: LANES threads share a row of it, each thread has a part of two rows. A token is computed without looking at
// the width of its window, so it has the same bits for any number of drafts and sequences.

namespace headstart {

constant constexpr int TILE = 8;   // tokens prepared together
constant constexpr int LANES = 8;  // threads that share two rows of the state

inline float sum_over_lanes(float x) {
  for (ushort step = 1; step < LANES; step *= 2) x += metal::simd_shuffle_xor(x, step);
  return x;
}

inline float softplus(float x) {
  return metal::max(x, 0.0f) + metal::precise::log(1.0f + metal::precise::exp(-metal::abs(x)));
}

// A thread's part of two rows of the state: of each, the columns 4*(lane + LANES*i) to +3.
template <int DK>
struct StatePart {
  static constant constexpr int COUNT = DK / LANES;
  float at[2][COUNT];

  static int column(int i, int lane) { return 4 * (lane + LANES * (i / 4)) + i % 4; }

  void load(const device float* state, int row, int lane) thread {
    for (int r = 0; r < 2; ++r)
      for (int i = 0; i < COUNT; ++i) at[r][i] = state[(row + 4 * r) * DK + column(i, lane)];
  }

  void store(device float* state, int row, int lane) const thread {
    for (int r = 0; r < 2; ++r)
      for (int i = 0; i < COUNT; ++i) state[(row + 4 * r) * DK + column(i, lane)] = at[r][i];
  }

  // Apply a token: decay the state, and add its key times the part of its value that the state does not predict.
  void update(const threadgroup float* key, const threadgroup float* value, float g, float beta, int row, int lane)
      thread {
    for (int r = 0; r < 2; ++r) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int i = 0; i < COUNT; ++i) {
        at[r][i] = at[r][i] * g;
        sum[i % 4] = metal::fma(at[r][i], key[column(i, lane)], sum[i % 4]);
      }
      const float predicted = sum_over_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
      const float delta = (value[row + 4 * r] - predicted) * beta;
      for (int i = 0; i < COUNT; ++i) at[r][i] = metal::fma(key[column(i, lane)], delta, at[r][i]);
    }
  }

  // Store the state's product with a query, for both rows.
  void query(const threadgroup float* q, threadgroup float* y, int row, int lane) const thread {
    for (int r = 0; r < 2; ++r) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int i = 0; i < COUNT; ++i) sum[i % 4] = metal::fma(at[r][i], q[column(i, lane)], sum[i % 4]);
      const float total = sum_over_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
      if (lane == 0) y[row + 4 * r] = total;
    }
  }
};

// Threadgroup memory, TILE tokens of each.
struct Tile {
  threadgroup float* queries;  // [TILE, DK]
  threadgroup float* keys;     // [TILE, DK]
  threadgroup float* values;   // [TILE, DV]
  threadgroup float* outputs;  // [TILE, DV]
  threadgroup float* decays;   // [TILE]
  threadgroup float* betas;    // [TILE]
};

// Drafts of a window that may still be rejected: [B, width, ...]. Written by one window, folded by the next.
template <typename QKV, typename Vectors, typename Gates>
struct Drafts {  // pointers
  QKV qkv;       // before the convolution
  Vectors k;
  Vectors v;
  Gates g;
  Gates beta;
  int width;
};

template <typename QKV, typename Vectors, typename Gates>
inline Drafts<QKV, Vectors, Gates> drafts(QKV qkv, Vectors k, Vectors v, Gates g, Gates beta, int width) {
  return {qkv, k, v, g, beta, width};
}

// The input of the convolution at position t of the window; before it, the last of what was accepted.
template <int C, int HISTORY, typename T, typename Old>
inline T conv_input(
    const device T* qkv, const device T* conv, const thread Old& old, int b, int W, int folded, int t, int channel) {
  if (t >= 0) return qkv[(static_cast<long>(b) * W + t) * C + channel];
  const int before = t + HISTORY + folded;
  if (before < HISTORY) return conv[(static_cast<long>(b) * HISTORY + before) * C + channel];
  return old.qkv[(static_cast<long>(b) * old.width + before - HISTORY) * C + channel];
}

// Fold the first `folded` old drafts, then run the window; the state is stored after its first `certain` tokens.
// 4*DV threads.
template <
    int HK, int HV, int DK, int DV, int TAPS, bool FOLDS, bool KEEPS, typename T, typename Gate, typename A, typename D,
    typename N, typename Old, typename Fresh>
inline void fold_and_run(
    const device float* state,  // [B, HV, DV, DK]
    const device T* conv,       // [B, TAPS - 1, C], the convolution's last inputs
    Old old,
    const device T* qkv,          // [B, W, C]
    const device T* z,            // [B, W, HV, DV]
    Gate b_gate,                  // [B, W, HV]; MLX passes arrays of fewer than 8 elements as `constant`
    Gate a_gate,                  // [B, W, HV]
    const device T* conv_weight,  // [C, TAPS]
    A A_log,                      // [HV]
    D dt_bias,                    // [HV]
    const device N* norm_weight,  // [DV]
    float eps, int W, int certain, int folded,
    device T* y,  // [B, W, HV, DV]
    device float* new_state,
    device T* new_conv,
    Fresh fresh,
    const thread Tile& tile,
    int b, int hv, int index) {
  constexpr int C = 2 * HK * DK + HV * DV;
  constexpr int CHANNELS = 2 * DK + DV;  // of this head
  constexpr int HISTORY = TAPS - 1;
  constexpr int THREADS = 4 * DV;
  const int hk = hv / (HV / HK);
  const bool first = hv % (HV / HK) == 0;  // of the value heads that share a key head: it writes what they share
  const int simdgroup = index / 32, lane = index % LANES;
  const int row = simdgroup * 8 + (index % 32) / LANES;  // and row + 4

  const long of_state = (static_cast<long>(b) * HV + hv) * DV * DK;
  StatePart<DK> part;
  part.load(state + of_state, row, lane);

  if (FOLDS) {
    for (int t0 = 0; t0 < folded; t0 += TILE) {
      const int count = metal::min(TILE, folded - t0);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      const long token = static_cast<long>(b) * old.width + t0;
      for (int i = index; i < count * DK; i += THREADS) {
        tile.keys[i] = old.k[((token + i / DK) * HK + hk) * DK + i % DK];
      }
      for (int i = index; i < count * DV; i += THREADS) {
        tile.values[i] = old.v[((token + i / DV) * HV + hv) * DV + i % DV];
      }
      if (index < count) {
        tile.decays[index] = old.g[(token + index) * HV + hv];
        tile.betas[index] = old.beta[(token + index) * HV + hv];
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      for (int t = 0; t < count; ++t) {
        part.update(tile.keys + t * DK, tile.values + t * DV, tile.decays[t], tile.betas[t], row, lane);
      }
    }
  }

  for (int t0 = 0; t0 < W; t0 += TILE) {
    const int count = metal::min(TILE, W - t0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int c = index; c < CHANNELS; c += THREADS) {
      const bool shared = c < 2 * DK;
      const int channel = c < DK ? hk * DK + c : shared ? (HK - 1 + hk) * DK + c : 2 * HK * DK + hv * DV + c - 2 * DK;
      for (int t = 0; t < count; ++t) {
        float sum = 0.0f;
        for (int j = 0; j < TAPS; ++j) {
          const T input = conv_input<C, HISTORY>(qkv, conv, old, b, W, folded, t0 + t + j - HISTORY, channel);
          sum = metal::fma(static_cast<float>(conv_weight[channel * TAPS + j]), static_cast<float>(input), sum);
        }
        const float mixed = sum * sigmoid(sum);
        if (c < DK) {
          tile.queries[t * DK + c] = mixed;
        } else if (shared) {
          tile.keys[t * DK + c - DK] = mixed;
        } else {
          tile.values[t * DV + c - 2 * DK] = mixed;
        }
      }
      if (!first && shared) continue;
      for (int j = 0; j < HISTORY && t0 == 0; ++j) {
        new_conv[(static_cast<long>(b) * HISTORY + j) * C + channel] =
            conv_input<C, HISTORY>(qkv, conv, old, b, W, folded, certain - HISTORY + j, channel);
      }
      if (KEEPS) {
        for (int t = metal::max(t0, certain); t < t0 + count; ++t) {
          fresh.qkv[(static_cast<long>(b) * fresh.width + t - certain) * C + channel] =
              qkv[(static_cast<long>(b) * W + t) * C + channel];
        }
      }
    }
    if (index < count) {
      const long at = (static_cast<long>(b) * W + t0 + index) * HV + hv;
      const float x = static_cast<float>(a_gate[at]) + static_cast<float>(dt_bias[hv]);
      const float rate = metal::precise::exp(static_cast<float>(A_log[hv])) * softplus(x);
      tile.decays[index] = metal::precise::exp(-rate);
      tile.betas[index] = sigmoid(static_cast<float>(b_gate[at]));
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    // Queries and keys to unit length, the queries divided by sqrt(DK) besides.
    for (int n = simdgroup; n < 2 * count; n += THREADS / 32) {
      threadgroup float* x = n < count ? tile.queries + n * DK : tile.keys + (n - count) * DK;
      float sum = 0.0f;
      for (int d = index % 32; d < DK; d += 32) sum = metal::fma(x[d], x[d], sum);
      const float length = metal::precise::sqrt(sum_over_simdgroup(sum) + 1e-6f);
      const float scale = 1.0f / (n < count ? length * metal::precise::sqrt(static_cast<float>(DK)) : length);
      for (int d = index % 32; d < DK; d += 32) x[d] = x[d] * scale;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    for (int t = 0; t < count; ++t) {
      part.update(tile.keys + t * DK, tile.values + t * DV, tile.decays[t], tile.betas[t], row, lane);
      part.query(tile.queries + t * DK, tile.outputs + t * DV, row, lane);
      if (t0 + t == certain - 1) part.store(new_state + of_state, row, lane);
    }
    if (KEEPS) {
      for (int t = metal::max(t0, certain) - t0; t < count; ++t) {
        const long token = static_cast<long>(b) * fresh.width + t0 + t - certain;
        for (int d = index; first && d < DK; d += THREADS) fresh.k[(token * HK + hk) * DK + d] = tile.keys[t * DK + d];
        for (int d = index; d < DV; d += THREADS) fresh.v[(token * HV + hv) * DV + d] = tile.values[t * DV + d];
        if (index == 0) {
          fresh.g[token * HV + hv] = tile.decays[t];
          fresh.beta[token * HV + hv] = tile.betas[t];
        }
      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    for (int t = simdgroup; t < count; t += THREADS / 32) {
      float sum = 0.0f;
      for (int d = index % 32; d < DV; d += 32) sum = metal::fma(tile.outputs[t * DV + d], tile.outputs[t * DV + d], sum);
      const float scale = 1.0f / metal::precise::sqrt(sum_over_simdgroup(sum) / DV + eps);
      const long at = ((static_cast<long>(b) * W + t0 + t) * HV + hv) * DV;
      for (int d = index % 32; d < DV; d += 32) {
        const float gate = static_cast<float>(z[at + d]);
        const float normed = tile.outputs[t * DV + d] * scale * static_cast<float>(norm_weight[d]);
        y[at + d] = static_cast<T>(normed * (gate * sigmoid(gate)));
      }
    }
  }
}

}  // namespace headstart
