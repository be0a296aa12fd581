// Counter-based random words, as sampling/noise.py defines them.

namespace headstart {

struct Words {
  unsigned first, second;
};

__device__ __forceinline__ unsigned mix(unsigned x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

__device__ __forceinline__ Words fold(Words keys, unsigned word) {
  return {mix(keys.first ^ (word * 0x9E3779B9u)), mix(keys.second + mix(word ^ keys.first))};
}

// Keys [B, P, W] of a round, for every purpose and position. A thread each.
__device__ __forceinline__ void noise_keys(
    int B, int P, int W, const unsigned* first, const unsigned* second, const int* round, const int* purposes,
    const int* positions, unsigned* new_first, unsigned* new_second) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, b = i / (P * W);
  if (b >= B) return;
  const Words of_round = fold({first[b], second[b]}, unsigned(round[b]));
  const Words keys = fold(fold(of_round, unsigned(purposes[i / W])), unsigned(positions[b * W + i % W]));
  new_first[i] = keys.first, new_second[i] = keys.second;
}

// A word for every key [R] and each of its ids [R, C], or [C] for all keys. A thread each.
__device__ __forceinline__ void noise_words(
    int R, int C, bool shared, const unsigned* first, const unsigned* second, const int* ids, unsigned* words) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, r = i / C;
  if (r < R) words[i] = mix(mix(first[r] ^ unsigned(ids[shared ? i % C : i])) + second[r]);
}

}  // namespace headstart
