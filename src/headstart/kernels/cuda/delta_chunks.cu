// The gated delta rule over a prompt's pass: chunk after chunk from the state before to the state after.
//
// A warp has sixteen values of one value head of one row: its lines of the state, all of its columns, in registers in
// float32, laid out as sums of products. The left side of a product is laid out likewise, so what a warp computes stays
// in its registers, and warps share nothing but the right sides, which are copied a chunk ahead.
//
// What is rounded for the tensor cores: the state where it is read, r = v - decay · S k, the differences M r to what
// the state says, each M and the two latter in two parts. So an error is that of rounded keys and values, also where
// keys are alike and what tokens add to the state all but cancels.

namespace headstart {

// Shared memory of a block: right sides of two chunks.
template <int D, typename T>
struct ChunkRoom {
  struct One {
    T queries[CHUNK * D], keys[CHUNK * D];
    uint4 cells[3 * CELLS * 32];
    float decays[2 * CHUNK];
  } of[2];
};

// sum += left · cells, a triangle's, of which there are only those on and below the diagonal.
template <typename T>
__device__ __forceinline__ void multiply_cells(
    float (&sum)[8][4], const uint32_t (&left)[4], const uint4* cells, int k) {
#pragma unroll
  for (int i = k; i < 4; ++i) {
    const uint4 right = cells[(i * (i + 1) / 2 + k) * 32];
    multiply<T>(sum[2 * i], left, {right.x, right.y});
    multiply<T>(sum[2 * i + 1], left, {right.z, right.w});
  }
}

// Values 16·`lines` to +15 of value head `hv`, by a warp. All of a block's warps have the same head.
template <int HK, int HV, int D, int WARPS, typename T>
__device__ __forceinline__ void run_chunks(
    ChunkRoom<D, T>& shared,
    int hv,
    int lines,
    int row_of_batch,
    int chunks,
    int W,
    const T* queries_and_keys,
    const T* values,
    const uint32_t* cells,
    const float* decays,
    const float* state,  // [B, HV, D, D]
    T* outputs,          // [B, W, HV, D]
    float* new_state) {
  const int thread = threadIdx.x, lane = thread % 32, row = lane / 4, column = 2 * (lane % 4);
  const int across_unit = unit_of_token<D>(lane % 8 + 8 * (lane / 16), 8 * (lane / 8 % 2));
  const int down_unit = unit_of_token<D>(lane % 16, 8 * (lane / 16));
  const long long place = (long long)row_of_batch * chunks;

  auto copy_chunk = [&](int chunk) {
    auto& to = shared.of[chunk % 2];
    auto copy = [&](void* target, const void* from, int bytes) {
#pragma unroll
      for (int i = 0; i < bytes; i += 32 * WARPS * 16)
        if (bytes % (32 * WARPS * 16) == 0 || i + 16 * thread < bytes)
          copy_16_bytes(static_cast<char*>(target) + i + 16 * thread, static_cast<const char*>(from) + i + 16 * thread);
    };
    const T* const q = queries_and_keys + ((place + chunk) * (2 * HK) + hv / (HV / HK)) * (CHUNK * D);
    copy(to.queries, q, sizeof to.queries);
    copy(to.keys, q + HK * (CHUNK * D), sizeof to.keys);
    copy(to.cells, cells + ((place + chunk) * HV + hv) * (3 * CELLS * 32 * 4), sizeof to.cells);
    copy(to.decays, decays + ((place + chunk) * HV + hv) * (2 * CHUNK), sizeof to.decays);
    commit_copies();
  };
  copy_chunk(0);

  const long long of_state = ((long long)(row_of_batch * HV + hv) * D + 16 * lines + row) * D + column;
  float part[D / 8][4];  // lines `row` and +8, columns 8·j + `column` and +1
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    const float2 upper = *reinterpret_cast<const float2*>(state + of_state + 8 * j);
    const float2 lower = *reinterpret_cast<const float2*>(state + of_state + 8 * D + 8 * j);
    part[j][0] = upper.x, part[j][1] = upper.y, part[j][2] = lower.x, part[j][3] = lower.y;
  }

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    wait_for_copies<0>();
    __syncthreads();  // this chunk is here, and the one before is read
    if (chunk + 1 < chunks) copy_chunk(chunk + 1);
    const auto& right = shared.of[chunk % 2];

    uint32_t value[8][2];  // of a line two tokens
    const uint32_t* const v = reinterpret_cast<const uint32_t*>(values) +
        ((place + chunk) * HV + hv) * (CHUNK * D / 2) + 16 * lines * 4 + lane;
#pragma unroll
    for (int n = 0; n < 8; ++n) value[n][0] = v[n * D * 4], value[n][1] = v[n * D * 4 + 32];

    // S k and S q.
    float known[8][4] = {}, out[8][4] = {};
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const auto &left = part[d / 8], &beside = part[d / 8 + 1];
      const uint32_t s[4] = {
          pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(beside[0], beside[1]),
          pack<T>(beside[2], beside[3])};
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        const int unit = 8 * n * D + (across_unit ^ d);
        uint32_t k[4], q[4];
        load_matrices_4(k, right.keys + unit);
        load_matrices_4(q, right.queries + unit);
        multiply<T>(known[n], s, {k[0], k[1]});
        multiply<T>(known[n + 1], s, {k[2], k[3]});
        multiply<T>(out[n], s, {q[0], q[1]});
        multiply<T>(out[n + 1], s, {q[2], q[3]});
      }
    }

    // r, and what is left to add to the outputs.
    float rest[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 decay = *reinterpret_cast<const float2*>(right.decays + 8 * n + column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rest[n][2 * half] = __fmaf_rn(-decay.x, known[n][2 * half], low_of<T>(value[n][half]));
        rest[n][2 * half + 1] = __fmaf_rn(-decay.y, known[n][2 * half + 1], high_of<T>(value[n][half]));
        out[n][2 * half] = __fmul_rn(out[n][2 * half], decay.x);
        out[n][2 * half + 1] = __fmul_rn(out[n][2 * half + 1], decay.y);
      }
    }

    // M r, and N r besides.
    float delta[8][4] = {};
    const uint4* const of_lane = right.cells + lane;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const SplitRows<T> r(rest[2 * k], rest[2 * k + 1]);
      multiply_cells<T>(delta, r.low, of_lane, k);
      multiply_cells<T>(out, r.high, of_lane + 2 * CELLS * 32, k);
      multiply_cells<T>(delta, r.high, of_lane + CELLS * 32, k);
      multiply_cells<T>(delta, r.high, of_lane, k);
    }

#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int t = chunk * CHUNK + 8 * n + row;
      T* const to = outputs + (((long long)row_of_batch * W + t) * HV + hv) * D + 16 * lines + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = transpose_matrix(pack<T>(out[n][2 * half], out[n][2 * half + 1]));
        if (t < W) *reinterpret_cast<uint32_t*>(to + 8 * half) = pair;
      }
    }

    // The state after the chunk.
    const float decay = right.decays[CHUNK - 1];
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) part[j][e] = __fmul_rn(part[j][e], decay);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        const float2 later = *reinterpret_cast<const float2*>(right.decays + CHUNK + 8 * n + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) delta[n][e] = __fmul_rn(delta[n][e], e % 2 ? later.y : later.x);
      }
      const SplitRows<T> left(delta[2 * k], delta[2 * k + 1]);
#pragma unroll
      for (int j = 0; j < D / 8; j += 8) {  // no product waits for the one before
        uint32_t keys[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          load_matrices_4_transposed(keys[i], right.keys + 16 * k * D + (down_unit ^ 8 * (j + 2 * i)));
        auto add = [&](const uint32_t (&rows)[4]) {
#pragma unroll
          for (int i = 0; i < 8; ++i)
            multiply<T>(part[j + i], rows, {keys[i / 2][i % 2 * 2], keys[i / 2][i % 2 * 2 + 1]});
        };
        add(left.low);
        add(left.high);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    *reinterpret_cast<float2*>(new_state + of_state + 8 * j) = {part[j][0], part[j][1]};
    *reinterpret_cast<float2*>(new_state + of_state + 8 * D + 8 * j) = {part[j][2], part[j][3]};
  }
}

}  // namespace headstart
