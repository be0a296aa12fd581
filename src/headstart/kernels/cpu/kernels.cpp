#include "kernels.h"

#include "attention.h"
#include "experts.h"
#include "gated_delta.h"
#include "latent.h"
#include "norm.h"
#include "products.h"
#include "ratio.h"
#include "streams.h"

namespace headstart {

Pool& pool() {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive main()
  return *pool;
}

const char* isa() {
  return HEADSTART_ISA;
}

void set_threads(int threads) {
  pool().start(threads);
}

int threads() {
  return pool().threads();
}

#define INSTANTIATE(T)                                                             \
  template void products(const Product<T>&);                                       \
  template void route(const T*, long, long, long, bool, uint32_t*, float*);        \
  template void combine(const T*, const float*, const T*, const T*, long, long, long, T*); \
  template void norm(const T*, const T*, const float*, float, long, long, T*, T*); \
  template void mix_streams(const StreamMix<T>&);                                  \
  template void norm_streams(const T*, float, long, long, float*);                 \
  template void inject(const float*, const float*, const T*, long, int, long, T*); \
  template void gated_delta(const GatedDelta<T>&);                                 \
  template void attention(const Attention<T>&);                                    \
  template void latent_attention(const LatentAttention<T>&);                       \
  template void draw(const Draws<T>&);                                             \
  template void verify(const Verification<T>&);                                    \
  template void first_elements(const T*, long, long, long, float, T*);

INSTANTIATE(float)
INSTANTIATE(bfloat)

}  // namespace headstart
