// The gated delta rule over a window, with everything between a layer's projections: short convolution, silu,
// norms of q and k, gates, the fold of what is certain, the run of the drafts, the gated norm of the output.
//
// A team has one value head of one row. Its state [DV, DK] lives in registers from the one read to the one write:
// eight threads share a row of it, each thread has parts of two rows, or of GROUPS times two. Every sum has one order,
// written out with intrinsics that the compiler may not fuse or reorder, and a token is computed without looking at the
// width of its window, at its neighbours or at the tile it is in: the same bits for any number of drafts and rows.

namespace headstart {

constexpr int TOKENS = 8;  // prepared together
constexpr int LANES = 8;   // threads that share two rows of the state

// The sum over N neighbouring lanes, in all of them.
template <int N>
__device__ __forceinline__ float across(float x) {
#pragma unroll
  for (int step = 1; step < N; step *= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  return x;
}

__device__ __forceinline__ float sigmoid(float x) {
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x)));
}

__device__ __forceinline__ float softplus(float x) {
  return __fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x))));
}

// A thread's part of two rows of the state: of each, the columns 4·(lane + LANES·i) to +3.
template <int DK>
struct StatePart {
  static constexpr int N = DK / (4 * LANES);
  float at[2][4 * N];

  __device__ __forceinline__ void load(const float* state, int row, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float4 x = *reinterpret_cast<const float4*>(state + (row + 4 * r) * DK + 4 * (lane + LANES * i));
        at[r][4 * i] = x.x, at[r][4 * i + 1] = x.y, at[r][4 * i + 2] = x.z, at[r][4 * i + 3] = x.w;
      }
    }
  }

  __device__ __forceinline__ void store(float* state, int row, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float4 x = make_float4(at[r][4 * i], at[r][4 * i + 1], at[r][4 * i + 2], at[r][4 * i + 3]);
        *reinterpret_cast<float4*>(state + (row + 4 * r) * DK + 4 * (lane + LANES * i)) = x;
      }
    }
  }

  // A token enters: decay, what the state already says of its key, and the difference to its value.
  __device__ __forceinline__ void enter(const float* key, const float* value, float g, float beta, int row, int lane) {
    float k[4 * N];
    columns(k, key, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) {
        at[r][i] = __fmul_rn(at[r][i], g);
        sum[i % 4] = __fmaf_rn(at[r][i], k[i], sum[i % 4]);
      }
      float known = across<LANES>(__fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])));
      float delta = __fmul_rn(__fsub_rn(value[row + 4 * r], known), beta);
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) {
        at[r][i] = __fmaf_rn(k[i], delta, at[r][i]);
      }
    }
  }

  // What the state says to a query, for both rows.
  __device__ __forceinline__ void answer(const float* query, float* y, int row, int lane) const {
    float q[4 * N];
    columns(q, query, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) {
        sum[i % 4] = __fmaf_rn(at[r][i], q[i], sum[i % 4]);
      }
      float out = across<LANES>(__fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])));
      if (lane == 0) {
        y[row + 4 * r] = out;
      }
    }
  }

  __device__ __forceinline__ static void columns(float (&out)[4 * N], const float* in, int lane) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float4 x = *reinterpret_cast<const float4*>(in + 4 * (lane + LANES * i));
      out[4 * i] = x.x, out[4 * i + 1] = x.y, out[4 * i + 2] = x.z, out[4 * i + 3] = x.w;
    }
  }
};

// Drafts in doubt: [B, width, …]. What the last window's put here, in the bits they were run with, is folded by the
// next. Null where there are none.
template <typename T, typename F>
struct Drafts {
  T* qkv;  // before the convolution
  F* k;
  F* v;
  F* g;
  F* beta;
  int width;
};

// Shared memory that `fold_and_run` needs, in floats.
template <int DK, int DV>
constexpr int GATED_DELTA_FLOATS = TOKENS * (2 * DK + 2 * DV + 2);

// Value head `hv` of a row, by a team of 4·DV / GROUPS threads. What others write of the window may be read after
// `ready`.
template <
    int HK, int HV, int DK, int DV, int TAPS, int GROUPS, typename T, typename Y, typename A, typename D, typename N,
    typename Awaited>
__device__ __forceinline__ void fold_and_run(
    const Team& team,
    float* shared,
    int hv,
    int row_of_batch,
    Awaited ready,
    const float* state,       // [B, HV, DV, DK]
    const T* conv,            // [B, TAPS - 1, C], the convolution's last inputs
    const int* accepted,      // [B], how many of the old drafts to fold
    Drafts<const T, const float> old,
    const T* qkv,             // [B, W, C]
    const T* z,               // [B, W, HV, DV]
    const T* b,               // [B, W, HV]
    const T* a,               // [B, W, HV]
    const T* conv_weight,     // [C, TAPS]
    const A* A_log,           // [HV]
    const D* dt_bias,         // [HV]
    const N* norm_weight,     // [DV]
    float eps,
    int W,
    int certain,              // the window's tokens to fold
    Y* y,                     // [B, W, HV, DV]
    float* new_state,
    T* new_conv,
    Drafts<T, float> fresh) {
  constexpr int C = 2 * HK * DK + HV * DV;
  constexpr int CHANNELS = 2 * DK + DV;  // those of this head
  constexpr int HISTORY = TAPS - 1;
  constexpr int THREADS = 4 * DV / GROUPS;
  constexpr int N_WARPS = THREADS / 32;
  float (*queries)[DK] = reinterpret_cast<float (*)[DK]>(shared);
  float (*keys)[DK] = queries + TOKENS;
  float (*values)[DV] = reinterpret_cast<float (*)[DV]>(keys + TOKENS);
  float (*outputs)[DV] = values + TOKENS;
  float* decays = reinterpret_cast<float*>(outputs + TOKENS);
  float* betas = decays + TOKENS;

  const int hk = hv / (HV / HK);
  const bool first = hv % (HV / HK) == 0;  // of those that share a key head: it writes what they share
  const int thread = team.thread, warp = thread / 32, lane = thread % LANES;
  auto row = [&](int group) { return (warp + N_WARPS * group) * 8 + (thread % 32) / LANES; };  // and + 4
  const int folded = old.width ? accepted[row_of_batch] : 0;

  const long long of_state = (long long)(row_of_batch * HV + hv) * DV * DK;
  if (thread < 3) {
    const int channel = thread == 2 ? 2 * HK * DK + hv * DV : (thread * HK + hk) * DK;
    const int bytes = (thread == 2 ? DV : DK) * sizeof(T);
    prefetch(conv_weight + channel * TAPS, TAPS * bytes);
#pragma unroll
    for (int j = 0; j < HISTORY; ++j) {
      prefetch(conv + ((long long)row_of_batch * HISTORY + j) * C + channel, bytes);
    }
    prefetch(norm_weight, DV * sizeof(N));
  }
  StatePart<DK> part[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    part[i].load(state + of_state, row(i), lane);
  }

  // The old drafts that were accepted.
  for (int t0 = 0; t0 < folded; t0 += TOKENS) {
    const int count = min(TOKENS, folded - t0);
    team.sync();
    const long long token = (long long)row_of_batch * old.width + t0;
#pragma unroll 1
    for (int i = thread; i < count * DK; i += THREADS) {
      keys[i / DK][i % DK] = old.k[((token + i / DK) * HK + hk) * DK + i % DK];
    }
#pragma unroll 1
    for (int i = thread; i < count * DV; i += THREADS) {
      values[i / DV][i % DV] = old.v[((token + i / DV) * HV + hv) * DV + i % DV];
    }
    if (thread < count) {
      decays[thread] = old.g[(token + thread) * HV + hv];
      betas[thread] = old.beta[(token + thread) * HV + hv];
    }
    team.sync();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        part[i].enter(keys[t], values[t], decays[t], betas[t], row(i), lane);
      }
    }
  }
  ready();

  // The convolution's input at a position of the window; before it, what came last of all that is certain.
  auto input = [&](int t, int channel) -> T {
    if (t >= 0) {
      return qkv[((long long)row_of_batch * W + t) * C + channel];
    }
    const int before = t + HISTORY + folded;
    if (before < HISTORY) {
      return conv[((long long)row_of_batch * HISTORY + before) * C + channel];
    }
    return old.qkv[((long long)row_of_batch * old.width + before - HISTORY) * C + channel];
  };

  for (int t0 = 0; t0 < W; t0 += TOKENS) {
    const int count = min(TOKENS, W - t0);
    team.sync();
    for (int c = thread; c < CHANNELS; c += THREADS) {
      const bool shared = c < 2 * DK;
      const int channel = c < DK ? hk * DK + c : shared ? (HK - 1 + hk) * DK + c : 2 * HK * DK + hv * DV + c - 2 * DK;
      float weights[TAPS], inputs[TAPS];
#pragma unroll
      for (int j = 0; j < TAPS; ++j) {
        weights[j] = static_cast<float>(conv_weight[channel * TAPS + j]);
      }
#pragma unroll
      for (int j = 0; j < HISTORY; ++j) {
        inputs[j] = static_cast<float>(input(t0 + j - HISTORY, channel));
      }
      const T* const here = qkv + ((long long)row_of_batch * W + t0) * C + channel;
      float* const out = c < DK ? &queries[0][c] : shared ? &keys[0][c - DK] : &values[0][c - 2 * DK];
      const int line = shared ? DK : DV;
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        if (t < count) out[t * line] = static_cast<float>(here[t * C]);
      }
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        inputs[HISTORY] = out[t * line];
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
          sum = __fmaf_rn(weights[j], inputs[j], sum);
        }
        out[t * line] = __fmul_rn(sum, sigmoid(sum));
#pragma unroll
        for (int j = 0; j < HISTORY; ++j) {
          inputs[j] = inputs[j + 1];
        }
      }
      if (first || !shared) {
        if (t0 == 0) {
#pragma unroll 1
          for (int j = 0; j < HISTORY; ++j) {
            new_conv[((long long)row_of_batch * HISTORY + j) * C + channel] = input(certain - HISTORY + j, channel);
          }
        }
#pragma unroll 1
        for (int t = max(t0, certain); t < t0 + count; ++t) {
          fresh.qkv[((long long)row_of_batch * fresh.width + t - certain) * C + channel] = input(t, channel);
        }
      }
    }
    if (thread < count) {
      const long long at = ((long long)row_of_batch * W + t0 + thread) * HV + hv;
      const float x = __fadd_rn(static_cast<float>(a[at]), static_cast<float>(dt_bias[hv]));
      decays[thread] = expf(-__fmul_rn(expf(static_cast<float>(A_log[hv])), softplus(x)));
      betas[thread] = sigmoid(static_cast<float>(b[at]));
    }
    team.sync();

    // Queries and keys to unit length, the queries over √DK besides.
    for (int n = warp; n < 2 * count; n += N_WARPS) {
      float* x = n < count ? queries[n] : keys[n - count];
      float sum = 0.0f;
#pragma unroll 1
      for (int d = thread % 32; d < DK; d += 32) {
        sum = __fmaf_rn(x[d], x[d], sum);
      }
      const float length = __fsqrt_rn(__fadd_rn(across<32>(sum), 1e-6f));
      const float scale = __fdiv_rn(1.0f, n < count ? __fmul_rn(length, __fsqrt_rn(float(DK))) : length);
#pragma unroll 1
      for (int d = thread % 32; d < DK; d += 32) {
        x[d] = __fmul_rn(x[d], scale);
      }
    }
    team.sync();

#pragma unroll 1
    for (int t = 0; t < count; ++t) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        part[i].enter(keys[t], values[t], decays[t], betas[t], row(i), lane);
        part[i].answer(queries[t], outputs[t], row(i), lane);
        if (t0 + t == certain - 1) {
          part[i].store(new_state + of_state, row(i), lane);
        }
      }
    }
#pragma unroll 1
    for (int t = max(t0, certain) - t0; t < count; ++t) {
      const long long token = (long long)row_of_batch * fresh.width + t0 + t - certain;
      for (int d = thread; first && d < DK; d += THREADS) {
        fresh.k[(token * HK + hk) * DK + d] = keys[t][d];
      }
      for (int d = thread; d < DV; d += THREADS) {
        fresh.v[(token * HV + hv) * DV + d] = values[t][d];
      }
      if (thread == 0) {
        fresh.g[token * HV + hv] = decays[t];
        fresh.beta[token * HV + hv] = betas[t];
      }
    }
    team.sync();

    for (int t = warp; t < count; t += N_WARPS) {
      float sum = 0.0f;
#pragma unroll 1
      for (int d = thread % 32; d < DV; d += 32) {
        sum = __fmaf_rn(outputs[t][d], outputs[t][d], sum);
      }
      const float mean = __fdiv_rn(across<32>(sum), float(DV));
      const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
      const long long at = (((long long)row_of_batch * W + t0 + t) * HV + hv) * DV;
#pragma unroll 1
      for (int d = thread % 32; d < DV; d += 32) {
        const float gate = static_cast<float>(z[at + d]);
        const float normed = __fmul_rn(__fmul_rn(outputs[t][d], scale), static_cast<float>(norm_weight[d]));
        leave(y, at + d, static_cast<T>(__fmul_rn(normed, __fmul_rn(gate, sigmoid(gate)))));
      }
    }
  }
}

}  // namespace headstart
