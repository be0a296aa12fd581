// The softmax of a prompt's attention, step by step, and what is kept of the pieces of a long text.

namespace headstart {

// Of a thread's two queries, so far: what the softmax of all of their scores needs.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns, or of all
  float factor[2];              // by which what is summed up so far is multiplied

  // Makes p of a step's scores.
  __device__ __forceinline__ void add(float (&scores)[KEYS / 8][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = top[half];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        highest = fmaxf(highest, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float base = highest == -INFINITY ? 0.0f : __fmul_rn(highest, scale);  // nothing seen: every p is zero
      factor[half] = power_of_two(__fsub_rn(__fmul_rn(top[half], scale), base));
      top[half] = highest;
      float parts[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j][2 * half + e];
          score = power_of_two(__fmaf_rn(score, scale, -base));
          parts[e] = __fadd_rn(parts[e], score);
        }
      }
      sum[half] = __fmaf_rn(sum[half], factor[half], __fadd_rn(parts[0], parts[1]));
    }
  }

  // Of all columns. All of this thread's are in its own four lanes.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(0xffffffffu, sum[half], 1));
      sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(0xffffffffu, sum[half], 2));
    }
  }

  // Adds a later piece, whose factor is set too. Both are of all columns.
  __device__ __forceinline__ void add_piece(Softmax& piece, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float highest = fmaxf(top[half], piece.top[half]);
      const float base = highest == -INFINITY ? 0.0f : __fmul_rn(highest, scale);
      factor[half] = power_of_two(__fsub_rn(__fmul_rn(top[half], scale), base));
      piece.factor[half] = power_of_two(__fsub_rn(__fmul_rn(piece.top[half], scale), base));
      top[half] = highest;
      sum[half] = __fmaf_rn(sum[half], factor[half], __fmul_rn(piece.sum[half], piece.factor[half]));
    }
  }
};

// sum = sum · its factors + other · those of the other.
__device__ __forceinline__ void add_scaled(
    float (&sum)[4], const Softmax& own, const float4& other, const Softmax& others) {
  sum[0] = __fmaf_rn(other.x, others.factor[0], __fmul_rn(sum[0], own.factor[0]));
  sum[1] = __fmaf_rn(other.y, others.factor[0], __fmul_rn(sum[1], own.factor[0]));
  sum[2] = __fmaf_rn(other.z, others.factor[1], __fmul_rn(sum[2], own.factor[1]));
  sum[3] = __fmaf_rn(other.w, others.factor[1], __fmul_rn(sum[3], own.factor[1]));
}

// Where a thread keeps what it has of a block's pieces, side by side with the others of the block: its sum, and after
// it its softmax.
template <int D>
__device__ __forceinline__ long long part_of(int block) {
  return (long long)block * ((D / 8 + 1) * 32 * READERS) + threadIdx.x;
}

__device__ __forceinline__ float4 top_and_sum(const Softmax& softmax) {
  return {softmax.top[0], softmax.top[1], softmax.sum[0], softmax.sum[1]};
}

__device__ __forceinline__ Softmax softmax_of(const float4& kept) {
  Softmax softmax;
  softmax.top[0] = kept.x, softmax.top[1] = kept.y, softmax.sum[0] = kept.z, softmax.sum[1] = kept.w;
  return softmax;
}

}  // namespace headstart
