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

// A thread's part of the state: of ROWS rows the columns 4·(lane + LANES·i) to +3. What all rows need is read once, and
// their sums are made side by side.
template <int DK, int ROWS>
struct StatePart {
  static constexpr int N = DK / (4 * LANES);
  float at[ROWS][4 * N];

  template <typename Row>
  __device__ __forceinline__ void load(const float* state, Row row, int lane) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) columns(at[r], state + row(r) * DK, lane);
  }

  template <typename Row>
  __device__ __forceinline__ void store(float* state, Row row, int lane) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float4 x = make_float4(at[r][4 * i], at[r][4 * i + 1], at[r][4 * i + 2], at[r][4 * i + 3]);
        *reinterpret_cast<float4*>(state + row(r) * DK + 4 * (lane + LANES * i)) = x;
      }
    }
  }

  // A token enters: decay, what the state already says of its key, and the difference to its value.
  template <typename Row>
  __device__ __forceinline__ void enter(const float* key, const float* value, float g, float beta, Row row, int lane) {
    float k[4 * N], known[ROWS];
    columns(k, key, lane);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) at[r][i] = __fmul_rn(at[r][i], g);
    }
    multiply(known, k);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float delta = __fmul_rn(__fsub_rn(value[row(r)], known[r]), beta);
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) at[r][i] = __fmaf_rn(k[i], delta, at[r][i]);
    }
  }

  // What the state says to a query.
  template <typename Row>
  __device__ __forceinline__ void answer(const float* query, float* y, Row row, int lane) const {
    float q[4 * N], out[ROWS];
    columns(q, query, lane);
    multiply(out, q);
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) y[row(r)] = out[r];
    }
  }

  // The rows times a vector, of which a thread has its own columns.
  __device__ __forceinline__ void multiply(float (&out)[ROWS], const float (&x)[4 * N]) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) sum[i % 4] = __fmaf_rn(at[r][i], x[i], sum[i % 4]);
      out[r] = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) out[r] = __fadd_rn(out[r], __shfl_xor_sync(0xffffffffu, out[r], step));
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

// Drafts in doubt: [B, width] lines, of which the last window wrote what the next folds. Null where there are none.
template <typename F>
struct Drafts {
  F* lines;
  int width;
};

// A draft's line in words: qkv before the convolution in T, and what a token was run with in float. One array holds it
// all, because every array costs the host time in every launch. `draft_lines` in gated_delta.py has the same length.
template <int HK, int HV, int DK, int DV, typename T>
struct DraftLine {
  static constexpr int KEYS = (2 * HK * DK + HV * DV) * sizeof(T) / sizeof(float), VALUES = KEYS + HK * DK;
  static constexpr int DECAYS = VALUES + HV * DV, BETAS = DECAYS + HV, SIZE = (BETAS + HV + 3) / 4 * 4;
  static_assert(KEYS % 4 == 0 && VALUES % 4 == 0);  // copied in pieces of 16 bytes
};

// Shared memory of a team: of TOKENS at a time what enters the state, and what comes out. Everything is copied here in
// whole pieces of 16 bytes, all of them under way at once, and no thread waits for a single number.
template <int DK, int DV, int TAPS, typename T, typename N>
struct HeadTokens {
  float queries[TOKENS][DK], keys[TOKENS][DK], values[TOKENS][DV], outputs[TOKENS][DV], decays[TOKENS], betas[TOKENS];
  alignas(16) T inputs[TAPS - 1 + TOKENS][2 * DK + DV];  // of the convolution, from TAPS - 1 before the first on
  alignas(16) T taps[2 * DK + DV][TAPS];
  alignas(16) T gates[TOKENS][DV];
  alignas(16) N norm[DV];
};

// Value head `hv` of a row, by a team of 4·DV / GROUPS threads. What others write of the window may be read after
// `ready`.
template <
    int HK, int HV, int DK, int DV, int TAPS, int GROUPS, typename T, typename Y, typename A, typename D, typename N,
    typename Awaited>
__device__ __forceinline__ void fold_and_run(
    const Team& team,
    unsigned char* room,      // for HeadTokens
    int hv,
    int row_of_batch,
    Awaited ready,
    const float* state,       // [B, HV, DV, DK]
    const T* conv,            // [B, TAPS - 1, C], the convolution's last inputs
    const int* accepted,      // [B], how many of the old drafts to fold
    Drafts<const float> old,
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
    Drafts<float> fresh) {
  using Line = DraftLine<HK, HV, DK, DV, T>;
  constexpr int C = 2 * HK * DK + HV * DV;
  constexpr int CHANNELS = 2 * DK + DV;  // those of this head
  constexpr int HISTORY = TAPS - 1;
  constexpr int THREADS = 4 * DV / GROUPS;
  constexpr int N_WARPS = THREADS / 32;
  constexpr int EACH = 16 / sizeof(T);  // elements of a piece
  constexpr int PIECES = CHANNELS / EACH;
  auto& shared = *reinterpret_cast<HeadTokens<DK, DV, TAPS, T, N>*>(room);

  const int hk = hv / (HV / HK);
  const bool first = hv % (HV / HK) == 0;  // of those that share a key head: it writes what they share
  const int thread = team.thread, warp = thread / 32, lane = thread % LANES;
  const int last = thread - (THREADS - 32);  // of the last warp, which has least to do, the lane
  auto row = [&](int r) { return (warp + N_WARPS * (r / 2)) * 8 + (thread % 32) / LANES + 4 * (r % 2); };
  auto channel = [&](int c) {
    return c < DK ? hk * DK + c : c < 2 * DK ? (HK - 1 + hk) * DK + c : 2 * HK * DK + hv * DV + c - 2 * DK;
  };
  auto old_line = [&](int t) { return old.lines + ((long long)row_of_batch * old.width + t) * Line::SIZE; };
  auto new_line = [&](int t) { return fresh.lines + ((long long)row_of_batch * fresh.width + t) * Line::SIZE; };
  // Of a line, four elements of this head's key and value, and where they are in shared memory.
  auto part_of_line = [&](int d) { return d < DK ? Line::KEYS + hk * DK + d : Line::VALUES + hv * DV + d - DK; };
  auto part_of_token = [&](int t, int d) { return d < DK ? &shared.keys[t][d] : &shared.values[t][d - DK]; };
  const int folded = old.width ? accepted[row_of_batch] : 0;

  const long long of_state = (long long)(row_of_batch * HV + hv) * DV * DK;
  StatePart<DK, 2 * GROUPS> part;
  part.load(state + of_state, row, lane);

  auto fetch_drafts = [&](int t0) {
    const int count = min(TOKENS, old.width - t0);
    const float* const lines = old_line(t0);
#pragma unroll 1
    for (int i = thread; i < count * ((DK + DV) / 4); i += THREADS) {
      const int t = i / ((DK + DV) / 4), d = i % ((DK + DV) / 4) * 4;
      copy_16_bytes(part_of_token(t, d), lines + t * Line::SIZE + part_of_line(d));
    }
    if (last >= 0 && last < count) {
      shared.decays[last] = lines[last * Line::SIZE + Line::DECAYS + hv];
      shared.betas[last] = lines[last * Line::SIZE + Line::BETAS + hv];
    }
  };
  // Copy inputs[begin] to inputs[end - 1]. inputs[i] is the window's position t0 - HISTORY + i; those before the window
  // come from accepted drafts, and before these from `conv`.
  auto fetch_inputs = [&](int t0, int begin, int end) {
#pragma unroll 1
    for (int i = begin * PIECES + thread; i < end * PIECES; i += THREADS) {
      const int t = t0 - HISTORY + i / PIECES, c = i % PIECES * EACH, before = t + HISTORY + folded;
      const T* from = t >= 0             ? qkv + ((long long)row_of_batch * W + t) * C
                      : before < HISTORY ? conv + ((long long)row_of_batch * HISTORY + before) * C
                                         : reinterpret_cast<const T*>(old_line(before - HISTORY));
      copy_16_bytes(&shared.inputs[i / PIECES][c], from + channel(c));
    }
  };

  if (old.width) fetch_drafts(0);
#pragma unroll 1
  for (int i = thread * EACH; i < CHANNELS * TAPS; i += THREADS * EACH)
    copy_16_bytes(&shared.taps[0][0] + i, conv_weight + channel(i / TAPS) * TAPS + i % TAPS);
  fetch_inputs(0, 0, HISTORY);
  commit_copies();

  // The old drafts that were accepted, then the window: one loop, so that the recurrence is there once.
  const int folds = (folded + TOKENS - 1) / TOKENS * TOKENS;
#pragma unroll 1
  for (int from = -folds; from < W; from += TOKENS) {
    const bool folding = from < 0;
    const int t0 = folding ? from + folds : from, count = min(TOKENS, (folding ? folded : W) - t0);
    const long long token = (long long)row_of_batch * W + t0;
    if (folding) {
      if (t0) {
        team.sync();
        fetch_drafts(t0);
        commit_copies();
      }
      wait_for_copies<0>();
      team.sync();
    } else {
      if (t0 == 0) ready();
      team.sync();
      fetch_inputs(t0, t0 ? 0 : HISTORY, HISTORY + count);
#pragma unroll 1
      for (int i = thread * EACH; i < count * DV; i += THREADS * EACH)
        copy_16_bytes(&shared.gates[0][0] + i, z + ((token + i / DV) * HV + hv) * DV + i % DV);
      if (thread < int(DV * sizeof(N) / 16))
        copy_16_bytes(shared.norm + thread * 16 / sizeof(N), norm_weight + thread * 16 / sizeof(N));
      commit_copies();
      if (last >= 0 && last < count) {
        const long long at = (token + last) * HV + hv;
        const float x = __fadd_rn(static_cast<float>(a[at]), static_cast<float>(dt_bias[hv]));
        shared.decays[last] = expf(-__fmul_rn(expf(static_cast<float>(A_log[hv])), softplus(x)));
        shared.betas[last] = sigmoid(static_cast<float>(b[at]));
      }
      wait_for_copies<0>();
      team.sync();

#pragma unroll 1
      for (int i = thread; i < count * (CHANNELS / 2); i += THREADS) {
        const int t = i / (CHANNELS / 2), c = i % (CHANNELS / 2) * 2;
        float* const out = c < DK       ? &shared.queries[t][c]
                           : c < 2 * DK ? &shared.keys[t][c - DK]
                                        : &shared.values[t][c - 2 * DK];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float sum = 0.0f;
#pragma unroll
          for (int j = 0; j < TAPS; ++j)
            sum = __fmaf_rn(
                static_cast<float>(shared.taps[c + e][j]), static_cast<float>(shared.inputs[t + j][c + e]), sum);
          out[e] = __fmul_rn(sum, sigmoid(sum));
        }
      }
      // What the next window's convolution needs: the last certain inputs, and those in doubt.
#pragma unroll 1
      for (int i = thread; i < (HISTORY + count) * PIECES; i += THREADS) {
        const int t = t0 - HISTORY + i / PIECES, c = i % PIECES * EACH, kept = t - certain + HISTORY;
        if (kept < 0 || (c < 2 * DK && !first) || (t < t0 && t0)) continue;
        T* const to = kept < HISTORY ? new_conv + ((long long)row_of_batch * HISTORY + kept) * C
                                     : reinterpret_cast<T*>(new_line(t - certain));
        *reinterpret_cast<float4*>(to + channel(c)) = *reinterpret_cast<const float4*>(&shared.inputs[i / PIECES][c]);
      }
      team.sync();

      // Queries and keys to unit length, the queries over √DK besides.
      for (int n = warp; n < 2 * count; n += N_WARPS) {
        float* x = n < count ? shared.queries[n] : shared.keys[n - count];
        float sum = 0.0f;
#pragma unroll
        for (int d = thread % 32; d < DK; d += 32) sum = __fmaf_rn(x[d], x[d], sum);
        const float length = __fsqrt_rn(__fadd_rn(across<32>(sum), 1e-6f));
        const float scale = __fdiv_rn(1.0f, n < count ? __fmul_rn(length, __fsqrt_rn(float(DK))) : length);
#pragma unroll
        for (int d = thread % 32; d < DK; d += 32) x[d] = __fmul_rn(x[d], scale);
      }
      team.sync();

      // Drafts in doubt.
      const int sure = max(0, certain - t0);
#pragma unroll 1
      for (int i = sure * ((DK + DV) / 4) + thread; i < count * ((DK + DV) / 4); i += THREADS) {
        const int t = i / ((DK + DV) / 4), d = i % ((DK + DV) / 4) * 4;
        if (d < DK && !first) continue;
        float* const to = new_line(t0 + t - certain) + part_of_line(d);
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(part_of_token(t, d));
      }
      if (last >= sure && last < count) {
        new_line(t0 + last - certain)[Line::DECAYS + hv] = shared.decays[last];
        new_line(t0 + last - certain)[Line::BETAS + hv] = shared.betas[last];
      }
    }
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      part.enter(shared.keys[t], shared.values[t], shared.decays[t], shared.betas[t], row, lane);
      if (folding) continue;
      part.answer(shared.queries[t], shared.outputs[t], row, lane);
      if (t0 + t == certain - 1) part.store(new_state + of_state, row, lane);
    }
    if (folding) continue;
    team.sync();

    for (int t = warp; t < count; t += N_WARPS) {
      const float* const x = shared.outputs[t];
      float sum = 0.0f;
#pragma unroll
      for (int d = thread % 32; d < DV; d += 32) sum = __fmaf_rn(x[d], x[d], sum);
      const float mean = __fdiv_rn(across<32>(sum), float(DV));
      const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
      const long long at = ((token + t) * HV + hv) * DV;
#pragma unroll
      for (int d = thread % 32; d < DV; d += 32) {
        const float gate = static_cast<float>(shared.gates[t][d]);
        const float normed = __fmul_rn(__fmul_rn(x[d], scale), static_cast<float>(shared.norm[d]));
        leave(y, at + d, static_cast<T>(__fmul_rn(normed, __fmul_rn(gate, sigmoid(gate)))));
      }
    }
  }
}

}  // namespace headstart
