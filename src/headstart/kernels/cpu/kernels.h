// The kernels over plain memory, without MLX. All are for float and bfloat, sum in float32, and share one pool of threads.
#pragma once

#include <cstdint>

namespace headstart {

// A bfloat16 is the upper half of a float32.
struct bfloat {
  uint16_t bits;
};
// A float16.
struct half {
  uint16_t bits;
};
// Types of scales. E8M0 is a power of two in a byte and scales floating-point codes of four or eight bits, E4M3 those of
// four bits.
enum class Number { BFLOAT, FLOAT, HALF, E8M0, E4M3 };
constexpr bool scales_floats(Number scale) {
  return scale == Number::E8M0 || scale == Number::E4M3;
}
constexpr long size_of(Number number) {
  return scales_floats(number) ? 1 : number == Number::FLOAT ? 4 : 2;
}

const char* isa();

// How many threads compute, the caller included. Never fewer than were asked for before.
void set_threads(int threads);
int threads();

// What adapters add to the outputs for x: up · (down · x), by the slot of the row's sequence; -1: nothing.
struct Adapters {
  const float *down = nullptr, *up = nullptr;  // [slots · experts, R, K]; [slots · experts, R, N]
  const int* slots = nullptr;                  // [B]; null: there are none
  const int* ranks;                            // [slots], of which R is the largest
  long B, R, experts;
};

// Weights [N, K], or [experts, N, K]: dense in the type of the activations, or quantised.
struct Matrix {
  const void* w;
  long N;
  int bits = 0, group = 0;  // 0: dense; else the bits of a code and how many share a scale, a multiple of 16
  Number scale = Number::BFLOAT;  // type of scales and biases
  const void* scales = nullptr;  // [N, K / group]
  const void* biases = nullptr;  // the same; of floating-point codes one factor for each expert's matrix, or null
  const float* bias = nullptr;                      // [N], added to outputs; or null
  Adapters adapters = {};
};

// x [rows, K] by every one of `count` matrices → out[i] [rows, N]. They must all be dense, or have the same
// bits and group size. `gated`: of two matrices silu(x · first) · (x · second). With `experts` [rows, top] every row is multiplied with so
// many experts' matrices, out[i] [rows, top, N].
template <typename T>
struct Product {
  const T* x;
  long rows, K, top;  // top: 1 without experts
  int count;
  const Matrix* matrices;
  void* const* out;
  bool wide;                // outputs are float32, not T
  bool gated;
  const uint32_t* experts;  // or null
};
template <typename T>
void products(const Product<T>& op);

// The `top` experts of each row by its logits [rows, E] → indices and scores [rows, top].
template <typename T>
void route(const T* logits, long rows, long E, long top, bool normed, uint32_t* indices, float* scores);

// The sum of parts [rows, top, N] by their scores, and of shared [rows, N] by the sigmoid of its gate [rows].
template <typename T>
void combine(
    const T* parts, const float* scores, const T* shared, const T* gate, long rows, long top, long N, T* out);

// x + added → total, and its RMS norm, for rows of D. Without `added` the norm of x.
template <typename T>
void norm(const T* x, const T* added, const float* weight, float eps, long rows, long D, T* total, T* out);

// Residual streams x [rows, S · H], and the products [rows, (2 + S) · S] that the weights of a hyper-connection are made
// of → their mean [rows, H], the mixed streams [rows, S · H], and the shares [rows, S] of what a part makes.
template <typename T>
struct StreamMix {
  const T* x;
  const float *products, *scale, *base;
  long rows, H;
  int S, iterations;
  float eps;
  T* mean;
  float *streams, *shares;
};
template <typename T>
void mix_streams(const StreamMix<T>& op);

// x [rows, D] over its root mean square.
template <typename T>
void norm_streams(const T* x, float eps, long rows, long D, float* out);

// Streams [rows, S · H] with their shares [rows, S] of what a part made [rows, H].
template <typename T>
void inject(const float* streams, const float* shares, const T* made, long rows, int S, long H, T* out);

// Drafts in doubt: [B, width, …], in the bits they were run with.
template <typename T, typename F>
struct Drafts {
  T* qkv = nullptr;   // [B, width, C], before the convolution
  F* k = nullptr;     // [B, width, HK, DK]
  F* v = nullptr;     // [B, width, HV, DV]
  F* g = nullptr;     // [B, width, HV]
  F* beta = nullptr;  // [B, width, HV]
  long width = 0;
};

// A window of a GatedDeltaNet layer. Folds the `accepted` first of the old drafts and the window's first `certain`
// tokens into the state, and runs the rest of the window from there. DK must be a multiple of 16.
template <typename T>
struct GatedDelta {
  long B, W, certain, HK, HV, DK, DV, taps;
  float eps;
  bool sigmoid;                      // the output's gate, or silu
  const T *qkv, *z, *b, *a;          // [B, W, C], [B, W, HV, DV], [B, W, HV], [B, W, HV]
  const float* conv_weight;          // [C, taps]
  const float *A_log, *dt_bias;      // [HV]
  const float* norm_weight;          // [DV]
  const float* state;                // [B, HV, DV, DK]
  const T* conv;                     // [B, taps - 1, C], the convolution's last inputs
  const int* accepted;               // [B]
  Drafts<const T, const float> old;
  T* y;                              // [B, W, HV, DV], normed and gated
  float* new_state;                  // may be `state`
  T* new_conv;
  Drafts<T, float> fresh;            // those of this window

  long channels() const {
    return 2 * HK * DK + HV * DV;
  }
};
template <typename T>
void gated_delta(const GatedDelta<T>& op);

// What is kept of every position [B, HKV, capacity, D]: of type T, or with scales [B, HKV, capacity, D / 32] whole
// numbers up to 127, of which 32 share one.
template <typename T>
struct Cache {
  long D = 0;
  void* at = nullptr;
  T* scales = nullptr;
};

// How a head's elements turn with the position: the first `rotated` of them, in pairs of neighbours where `interleaved`,
// else of an element and that half of them behind it.
struct Rotation {
  long rotated;
  bool interleaved;
  float scale;               // of what turns
  const float* frequencies;  // [rotated / 2]
  const float* angles;       // [B, W, rotated / 2]; null: by `offset`
};

// A window of an attention layer over sequences of different lengths. Null: the layer has none of that.
template <typename T>
struct Attention {
  long B, W, H, HKV, capacity;
  long window;                              // positions that a query sees; 0: all up to its own
  float eps, scale, value_scale;
  const T *q, *k, *v;                       // [B, W, H, DK] or with gates [B, W, H, 2, DK]; [B, W, HKV, DK]; [B, W, HKV, DV]
  const T* gates;                           // [B, W, H], or where `gated` behind every query
  bool gated;
  const float *q_weight, *k_weight;         // [DK], of norms
  Rotation rotation;
  const float* query_scales;                // [periods], of queries whose position is in a period; the last one beyond
  long period, periods;
  const float* sinks;                       // [H], a score without a value
  const int* offset;                        // [B], where the window begins
  const int* last;                          // [B], the only query of the window that is asked; null: all are
  Cache<T> keys, values;                    // written from `offset` on
  T* out;                                   // [B, W or 1, H, DV]
  Cache<T> more_keys = {};                  // further elements of every key
};
template <typename T>
void attention(const Attention<T>& op);

// A window of a latent attention layer. A key is a latent vector of R numbers, which is also its value, and `rotated`
// numbers that turn with the position; the caches of one head have these as `keys` and `more_keys`.
template <typename T>
struct LatentAttention {
  Attention<T> op;      // `q` [B, W, H, R] are multiplied to meet latents; `k_weight` [R], of their norm; no `k` and `v`
  const T* queries;     // [B, W, H, plain + rotated], of which the last elements turn
  const T* compressed;  // [B, W, R + rotated]
  long plain;
  float query_scale;
};
template <typename T>
void latent_attention(const LatentAttention<T>& latent);

// How a sequence draws, as `Controls.packed` has it.
struct DrawParams {
  float temperature, top_k, top_p, log_min_p, min_keep;
};
// What keys a sequence's noise: two words, whether the ratio rule verifies it, and words of three purposes.
struct NoiseWords {
  uint32_t first, second, ratio, draft, accept, next;
};
enum Purpose { CHOICE, DRAFT, ACCEPT, NEXT, XTC };  // as sampling/noise.py has them

// Best tokens that are not drawn, but for `special` ones.
struct Exclusion {
  float probability, threshold;
  const int* special;
  long specials;

  bool is_special(uint32_t id) const {
    for (long i = 0; i < specials; ++i)
      if (uint32_t(special[i]) == id) return true;
    return false;
  }
};

// What a token was drawn from: those between the first and the last one in the order of sampling, whose e^score add up
// to e^total; or nothing but `only`.
struct Drawn {
  float first_x;
  uint32_t first_id;
  float last_x;
  uint32_t last_id;
  float total;
  int only;  // -1: there are several
};

// A token from each row of logits for the positions from `first` after the next on: drafts, or the target's own.
template <typename T>
struct Draws {
  long B, W, V, first;
  Purpose purpose;
  const T* logits;           // [B, W, V]
  const DrawParams* params;  // [B]
  const NoiseWords* words;   // [B]
  const int *lengths, *rounds;
  const float *xtc_probability, *xtc_threshold;  // [B], or null
  const int* special;                            // [B, specials]
  long specials;
  int *tokens, *finite;  // [B, W]
  Drawn* drawn;          // [B, W]

  Exclusion exclusion(long b) const {
    if (!xtc_probability) return {0, 0, nullptr, 0};
    return {xtc_probability[b], xtc_threshold[b], special + b * specials, specials};
  }
};
template <typename T>
void draw(const Draws<T>& op);

// The drafts of a window [B, W], all but its first token, by the ratio rule where a sequence has it: `target.tokens`
// become those that were accepted and the one after them, again and again, and `most` how many were; W elsewhere.
template <typename T>
struct Verification {
  Draws<T> target;
  const int *window, *max_k, *remaining;  // [B, W], [B], [B]
  const Drawn* drafters;                  // [B, k], what the drafts were drawn from
  const T* const* logits;                 // [k], of each draft, [B, widths[i], V]
  const long *widths, *places;            // [k], of logits that hold several, and which it is
  int* most;                              // [B]

  const T* drafter(long b, long i) const {
    return logits[i] + (b * widths[i] + places[i]) * target.V;
  }
};
template <typename T>
void verify(const Verification<T>& op);

// The first `some` elements of rows of D, scaled → out [rows, some].
template <typename T>
void first_elements(const T* x, long rows, long D, long some, float scale, T* out);

}  // namespace headstart
