// Attention of a short window over keys and values of different lengths, in one kernel or two.
//
// A threadgroup of `attend` has one query head, up to QUERIES positions of the window, which share each read of a key
// and a value, and a piece of SPLIT positions of the cache. Its simdgroups take the positions in turns, a lane D / 32
// elements of a head, and are merged in their order; `merge` merges the pieces in theirs. Where all positions are in
// the first piece, `attend` does what `merge` would. So a query's result depends on its own position and on the keys
// and values up to it.
//
// `attend` makes queries, keys and values of a layer's products itself and writes the cache in place, or is given what
// `arrange` makes. In place a threadgroup reads from the cache what earlier windows wrote, and makes this window's keys
// as it needs them: one of those that share a key head stores them.

namespace headstart {

constant constexpr int ATTENTION_SLICES = 8;

// The norm of a head [D], its first DIMS elements rotated to a position, as T has it. By a simdgroup.
template <int D, int DIMS, typename T, typename N>
inline void norm_and_rotate(
    const device T* from, const device N* weight, float eps,
    float log2_base,  // of the rotation's frequencies
    int position,
    threadgroup float* line,  // [D]
    int lane) {
  float sum = 0.0f;
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int d = lane; d < D; d += 32) {
    const float x = static_cast<float>(from[d]);
    line[d] = x;
    sum = metal::fma(x, x, sum);
  }
  const float scale = 1.0f / metal::precise::sqrt(sum_over_simdgroup(sum) / D + eps);
  for (int d = lane; d < D; d += 32) line[d] = line[d] * scale * static_cast<float>(weight[d]);
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int d = lane; d < D; d += 32) {
    if (d < DIMS / 2) {  // its partner is half the rotated elements further
      const float frequency = metal::precise::exp2(-static_cast<float>(d) / (DIMS / 2) * log2_base);
      const float angle = static_cast<float>(position) * frequency;
      const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
      const float x = line[d], y = line[d + DIMS / 2];
      line[d] = static_cast<float>(static_cast<T>(x * cosine - y * sine));
      line[d + DIMS / 2] = static_cast<float>(static_cast<T>(x * sine + y * cosine));
    } else if (d >= DIMS) {
      line[d] = static_cast<float>(static_cast<T>(line[d]));
    }
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// A layer's products as attention wants them: by head, queries and keys normed and rotated to their positions.
// One simdgroup per head of a token, of H query heads, HKV key heads and HKV value heads.
template <int H, int HKV, int D, int DIMS, typename T, typename N>
inline void arrange(
    const device T* both,          // [B, W, H, 2*D], queries and gates
    const device T* keys,          // [B, W, HKV, D]
    const device T* values,        // [B, W, HKV, D]
    const device N* query_weight,  // [D]
    const device N* key_weight,    // [D]
    float eps,
    float log2_base,  // of the rotation's frequencies, of the first DIMS elements
    int position, int b, int w, int W, int head,
    device T* new_queries,  // [B, H, W, D]
    device T* new_keys,     // [B, HKV, W, D]
    device T* new_values,   // [B, HKV, W, D]
    threadgroup float* line,  // [D], of this simdgroup
    int lane) {
  const long token = static_cast<long>(b) * W + w;
  if (head >= H + HKV) {
    const int h = head - H - HKV;
    for (int d = lane; d < D; d += 32) {
      new_values[(static_cast<long>(b * HKV + h) * W + w) * D + d] = values[(token * HKV + h) * D + d];
    }
    return;
  }
  const bool query = head < H;
  const int h = query ? head : head - H;
  const device T* from = query ? both + (token * H + h) * 2 * D : keys + (token * HKV + h) * D;
  device T* to = query ? new_queries + (static_cast<long>(b * H + h) * W + w) * D
                       : new_keys + (static_cast<long>(b * HKV + h) * W + w) * D;
  const device N* weight = query ? query_weight : key_weight;

  norm_and_rotate<D, DIMS>(from, weight, eps, log2_base, position, line, lane);
  for (int d = lane; d < D; d += 32) to[d] = static_cast<T>(line[d]);
}

// Merge parts of a sum over positions, each with its own maximum, and open the gate: element d of a head.
template <typename Stats, typename Parts>
inline float merged(Stats maxima, Stats weights, Parts parts, int stats_stride, int parts_stride, int count, float gate) {
  float greatest = maxima[0];
  for (int i = 1; i < count; ++i) greatest = metal::max(greatest, maxima[i * stats_stride]);
  float total = 0.0f, divisor = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float factor = metal::precise::exp2(maxima[i * stats_stride] - greatest);
    total = metal::fma(factor, parts[i * parts_stride], total);
    divisor = metal::fma(factor, weights[i * stats_stride], divisor);
  }
  return total / divisor * sigmoid(gate);
}

// What a layer's products are, where `attend` arranges them itself.
template <typename T, typename N>
struct Arrangement {
  const device T* keys;          // [B, W, HKV, D]
  const device T* values;        // [B, W, HKV, D]
  const device N* query_weight;  // [D]
  const device N* key_weight;    // [D]
  float eps;
  float log2_base;
  int position;  // of the window's first token
};

template <typename T, typename N>
inline Arrangement<T, N> arrangement(
    const device T* keys, const device T* values, const device N* query_weight, const device N* key_weight, float eps,
    float log2_base, int position) {
  return {keys, values, query_weight, key_weight, eps, log2_base, position};
}

// Piece `piece` of window positions w0 .. w0 + QUERIES - 1 of query head h of sequence b, whose window begins at
// position `first`. WHOLE: there is one piece. ARRANGES: queries, keys and values are arranged here.
template <
    int H, int HKV, int D, int DIMS, int SPLIT, int QUERIES, bool WHOLE, bool ARRANGES, typename T,
    typename Products, typename Out>
inline void attend(
    const device T* queries,  // [B, H, W, D], or to be arranged [B, W, H, 2*D]
    const thread Products& products,
    const device T* keys,    // [B, HKV, S, D]
    const device T* values,  // [B, HKV, S, D]
    device T* new_keys,      // the same memory, to write to
    device T* new_values,
    const device T* gates,  // [B, W, H, 2*D], the second half of each head
    float scale,            // times log2(e)
    int first, int b, int h, int w0, int W, int S, int piece, int pieces,
    device Out* out,              // WHOLE: [B, W, H, D]; else [B, W, H, pieces, D], not yet divided
    device float* stats,          // else [B, W, H, pieces, 2]: maximum and weight
    threadgroup float* maxima,    // [ATTENTION_SLICES]
    threadgroup float* weights,   // [ATTENTION_SLICES]
    threadgroup float* partials,  // [ATTENTION_SLICES, D]
    int slice, int lane) {
  constexpr int EACH = D / 32;
  const int last = metal::min(first + metal::min(w0 + QUERIES, W), (piece + 1) * SPLIT) - 1;
  if (last < piece * SPLIT) return;  // the same for all threads; nobody reads what is not written
  constexpr int SHARE = H / HKV;
  const int hk = h / SHARE;
  const long line = (static_cast<long>(b) * HKV + hk) * S;
  threadgroup float* head = partials + slice * D;  // not needed yet
  float query[QUERIES][EACH], sum[QUERIES][EACH], most[QUERIES], weight[QUERIES];
  for (int q = 0; q < QUERIES; ++q) {
    const int w = metal::min(w0 + q, W - 1);
    const device T* from = queries + ((static_cast<long>(b) * H + h) * W + w) * D;
    if (ARRANGES) {
      from = queries + ((static_cast<long>(b) * W + w) * H + h) * 2 * D;
      norm_and_rotate<D, DIMS>(
          from, products.query_weight, products.eps, products.log2_base, products.position + w, head, lane);
    }
    for (int i = 0; i < EACH; ++i) {
      query[q][i] = (ARRANGES ? head[lane * EACH + i] : static_cast<float>(from[lane * EACH + i])) * scale;
      sum[q][i] = 0.0f;
    }
    most[q] = -INFINITY;
    weight[q] = 0.0f;
  }

  for (int position = piece * SPLIT + slice; position <= last; position += ATTENTION_SLICES) {
    const long at = (line + position) * D + lane * EACH;
    float k[EACH], v[EACH];
    if (ARRANGES && position >= first) {
      const int w = position - first;
      const long from = ((static_cast<long>(b) * W + w) * HKV + hk) * D;
      norm_and_rotate<D, DIMS>(
          products.keys + from, products.key_weight, products.eps, products.log2_base, products.position + w, head,
          lane);
      for (int i = 0; i < EACH; ++i) {
        k[i] = head[lane * EACH + i];
        v[i] = static_cast<float>(products.values[from + lane * EACH + i]);
      }
      if (h % SHARE == 0 && w >= w0) {
        for (int i = 0; i < EACH; ++i) {
          new_keys[at + i] = static_cast<T>(k[i]);
          new_values[at + i] = static_cast<T>(v[i]);
        }
      }
    } else {
      for (int i = 0; i < EACH; ++i) {
        k[i] = static_cast<float>(keys[at + i]);
        v[i] = static_cast<float>(values[at + i]);
      }
    }
    for (int q = 0; q < QUERIES; ++q) {
      float score = 0.0f;
      for (int i = 0; i < EACH; ++i) score = metal::fma(query[q][i], k[i], score);
      score = sum_over_simdgroup(score);
      if (position > first + w0 + q) continue;  // the same for all lanes
      const float greatest = metal::max(most[q], score);
      const float before = metal::precise::exp2(most[q] - greatest), now = metal::precise::exp2(score - greatest);
      most[q] = greatest;
      weight[q] = metal::fma(weight[q], before, now);
      for (int i = 0; i < EACH; ++i) sum[q][i] = metal::fma(sum[q][i], before, now * v[i]);
    }
  }

  for (int q = 0; q < QUERIES; ++q) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = 0; i < EACH; ++i) partials[slice * D + lane * EACH + i] = sum[q][i];
    if (lane == 0) {
      maxima[slice] = most[q];
      weights[slice] = weight[q];
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (w0 + q >= W || first + w0 + q < piece * SPLIT) continue;
    // The simdgroups' parts become the piece's, whose gate opens in the end.
    float greatest = maxima[0];
    for (int s = 1; s < ATTENTION_SLICES; ++s) greatest = metal::max(greatest, maxima[s]);
    const long at = (static_cast<long>(b) * W + w0 + q) * H + h;
    for (int d = slice * 32 + lane; d < D; d += 32 * ATTENTION_SLICES) {
      float total = 0.0f, divisor = 0.0f;
      for (int s = 0; s < ATTENTION_SLICES; ++s) {
        const float factor = metal::precise::exp2(maxima[s] - greatest);
        total = metal::fma(factor, partials[s * D + d], total);
        divisor = metal::fma(factor, weights[s], divisor);
      }
      if (WHOLE) {
        const float gate = static_cast<float>(gates[at * 2 * D + D + d]);
        out[at * D + d] = static_cast<Out>(merged(&greatest, &divisor, &total, 0, 0, 1, gate));
      } else {
        out[(at * pieces + piece) * D + d] = static_cast<Out>(total);
        if (d == 0) {
          stats[(at * pieces + piece) * 2] = greatest;
          stats[(at * pieces + piece) * 2 + 1] = divisor;
        }
      }
    }
  }
}

}  // namespace headstart
