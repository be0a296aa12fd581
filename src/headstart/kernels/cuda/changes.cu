// What changes the logits of a sequence before it samples, in the order of sampling/distribution.py: bias, penalties,
// stop ids that come too early, and what a grammar permits.

namespace headstart {

// Strengths of penalties, and how many of the last tokens they look at; the last two count all generated tokens.
struct Penalties {
  float repetition, repetition_size, presence, presence_size, frequency, frequency_size, once, each;
};

// Numbers [rows, width] of sequences. An id that is -1 is none.
template <typename T>
struct Rows {
  const T* from;
  int width;
  __device__ __forceinline__ const T* row(int b) const { return from + static_cast<long long>(b) * width; }
};

// What changes logits [B, W, size].
struct Changes {
  const float* penalties;
  Rows<int> bias_ids;
  const float* bias;
  Rows<int> stops;
  const int* free_at;
  Rows<int> recent, drafts;
  const int* remaining;
  Rows<float> counts;  // of another width if nothing counts
  const bool* permitted;  // [B, W, size], or null
};

// What changes one row: number `b`'s, with `before` drafts before it.
struct RowChanges {
  static constexpr int MARKS = 16384;
  const Changes& all;
  const Penalties& penalties;
  const float* counts;
  const bool* permitted;
  int b, before;

  __device__ __forceinline__ RowChanges(const Changes& all, int b, int before, int row, int size)
      : all(all), penalties(reinterpret_cast<const Penalties*>(all.penalties)[b]),
        counts(all.counts.width == size ? all.counts.row(b) : nullptr),
        permitted(all.permitted ? all.permitted + static_cast<long long>(row) * size : nullptr), b(b),
        before(before) {}

  __device__ __forceinline__ int text(int i) const {  // the newest token last
    return i < all.recent.width ? all.recent.row(b)[i] : all.drafts.row(b)[i - all.recent.width];
  }

  // Mark tokens for which more counts than how often they were generated.
  __device__ __forceinline__ void mark(unsigned char* marks) const {
    for (int i = threadIdx.x; i < MARKS / 4; i += blockDim.x) reinterpret_cast<unsigned*>(marks)[i] = 0;
    __syncthreads();
    auto each = [&](int count, auto id) {
      for (int i = threadIdx.x; i < count; i += blockDim.x)
        if (id(i) >= 0) marks[id(i) % MARKS] = 1;
    };
    each(all.bias_ids.width, [&](int i) { return all.bias_ids.row(b)[i]; });
    each(all.stops.width, [&](int i) { return all.stops.row(b)[i]; });
    each(all.recent.width + before, [&](int i) { return text(i); });
    __syncthreads();
  }

  __device__ __forceinline__ float change(float x, int id, bool marked) const {
    float drafted = 0;
    if (marked) {
      for (int i = 0; i < all.bias_ids.width; ++i)
        if (all.bias_ids.row(b)[i] == id) x = __fadd_rn(x, all.bias[b * all.bias_ids.width + i]);
      const int length = all.recent.width + before;
      int newest = length, times = 0;
      for (int i = 0; i < length; ++i) {
        if (text(i) != id) continue;
        newest = length - 1 - i;
        times += newest < penalties.frequency_size, drafted += i >= all.recent.width;
      }
      if (newest < penalties.repetition_size)
        x = x < 0 ? __fmul_rn(x, penalties.repetition) : __fdiv_rn(x, penalties.repetition);
      if (newest < penalties.presence_size) x = __fsub_rn(x, penalties.presence);
      for (; times; --times) x = __fsub_rn(x, penalties.frequency);
    }
    if (counts) {
      const float count = counts[id] + drafted;
      x = __fsub_rn(__fsub_rn(x, count > 0 ? penalties.once : 0), __fmul_rn(penalties.each, count));
    }
    if (marked && all.remaining[b] - before > all.free_at[b])
      for (int i = 0; i < all.stops.width; ++i)
        if (all.stops.row(b)[i] == id) x = -INFINITY;
    return permitted && !permitted[id] ? -INFINITY : x;
  }
};

}  // namespace headstart
