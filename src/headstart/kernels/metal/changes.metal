// What changes the logits of a sequence before it samples, in the order of sampling/distribution.py: bias, penalties,
// stop ids that come too early, and what a grammar permits. MLX passes arrays of fewer than 8 elements as `constant`,
// so those that may be small have a type parameter.

namespace headstart {

// Of one row. An id that is -1 is none.
template <typename BiasIds, typename Bias, typename Stops, typename Recent, typename Drafts>
struct RowChanges {
  const device float* penalties;  // strengths and how many tokens they look at, and those that count all, [8]
  BiasIds bias_ids;
  Bias bias;
  int biases;
  Stops stops;
  int stop_count;
  Recent recent;
  int recents;
  Drafts drafts;
  int before;             // drafts before this row
  bool early;             // stop ids come too early
  const device float* counts;    // or null
  const device uchar* permitted;  // or null

  int text(int i) const thread { return i < recents ? recent[i] : drafts[i - recents]; }

  void mark_one(int id, int begin, int size, threadgroup uchar* marks) const thread {
    if (id >= begin && id < begin + size) marks[id - begin] = 1;
  }

  // Mark tokens of a slice for which more counts than how often they were generated.
  void mark(int begin, int size, threadgroup uchar* marks, int index, int threads) const thread {
    for (int i = index; i < size; i += threads) marks[i] = 0;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = index; i < biases; i += threads) mark_one(bias_ids[i], begin, size, marks);
    for (int i = index; i < stop_count; i += threads) mark_one(stops[i], begin, size, marks);
    for (int i = index; i < recents + before; i += threads) mark_one(text(i), begin, size, marks);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  float change(float x, int id, bool marked) const thread {
    float drafted = 0.0f;
    if (marked) {
      for (int i = 0; i < biases; ++i)
        if (bias_ids[i] == id) x += bias[i];
      const int length = recents + before;
      int newest = length, times = 0;
      for (int i = 0; i < length; ++i) {
        if (text(i) != id) continue;
        newest = length - 1 - i;
        times += newest < penalties[5] ? 1 : 0;
        drafted += i >= recents ? 1.0f : 0.0f;
      }
      if (newest < penalties[1]) x = x < 0.0f ? x * penalties[0] : x / penalties[0];
      if (newest < penalties[3]) x -= penalties[2];
      for (; times > 0; --times) x -= penalties[4];
    }
    if (counts) {
      const float count = counts[id] + drafted;
      x = x - (count > 0.0f ? penalties[6] : 0.0f) - penalties[7] * count;
    }
    for (int i = 0; marked && early && i < stop_count; ++i)
      if (stops[i] == id) x = -INFINITY;
    return permitted && !permitted[id] ? -INFINITY : x;
  }
};

template <typename BiasIds, typename Bias, typename Stops, typename Recent, typename Drafts>
inline RowChanges<BiasIds, Bias, Stops, Recent, Drafts> row_changes(
    const device float* penalties, BiasIds bias_ids, Bias bias, int biases, Stops stops, int stop_count, Recent recent,
    int recents, Drafts drafts, int before, bool early, const device float* counts, const device uchar* permitted) {
  return {penalties, bias_ids, bias, biases, stops, stop_count, recent, recents, drafts, before, early, counts,
          permitted};
}

}  // namespace headstart
