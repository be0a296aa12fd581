// The kernels over plain memory, without MLX. All are for float and bfloat, sum in float32, and share one pool of threads.
#pragma once

#include <cstdint>

namespace headstart {

// A bfloat16 is the upper half of a float32.
struct bfloat {
  uint16_t bits;
};

const char* isa();

// How many threads compute, the caller included. Never fewer than were asked for before.
void set_threads(int threads);
int threads();

// Weights [N, K], or [experts, N, K]: dense in the type of the activations, or quantised.
struct Matrix {
  const void* w;
  long N;
  int bits = 0, group = 0;  // 0: dense; else the bits of a code and how many share a scale, a multiple of 16
  bool wide = false;        // scales and biases are float32, not bfloat16
  const void *scales = nullptr, *biases = nullptr;  // [N, K / group]
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
  T* const* out;
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

// A window of a gated attention layer over sequences of different lengths. D must be a multiple of 32.
template <typename T>
struct Attention {
  long B, W, H, HKV, D, capacity, rotated;  // `rotated`: elements of D that encode the position
  float eps, scale;
  const T *both, *k, *v;                    // [B, W, H, 2, D]: queries and gates; [B, W, HKV, D]
  const float *q_weight, *k_weight;         // [D]
  const float* frequencies;                 // [rotated / 2]
  const int* offset;                        // [B], where the window begins
  const int* last;                          // [B], the only query of the window that is asked; null: all are
  const float* angles;                      // [B, W, rotated / 2], of the rotation; null: by `offset`
  T *keys, *values;                         // [B, HKV, capacity, D], written from `offset` on
  T* out;                                   // [B, W or 1, H, D]
};
template <typename T>
void attention(const Attention<T>& op);

}  // namespace headstart
