// The parts of a decoder layer as phases of one persistent kernel: as many blocks as the card holds at once, and a
// barrier of all of them where a phase reads what the one before has written. Weights of the next phase are under way
// while a barrier is awaited. Every phase is the code, and so the bits, of the kernel that does it alone.

namespace headstart {

// Which experts the rows take. Pairs (row, one of its experts) that share an expert are columns of one group, up to
// eight; column -1 is none.
constexpr int PAIRS = 144;

template <typename T>
struct Choice {
  alignas(16) unsigned experts[PAIRS];  // of a pair
  T scores[PAIRS];
  int groups;
  unsigned begins[(PAIRS + 31) / 32];  // bits of the pairs that begin a group
  unsigned of[PAIRS];  // the expert of a group
  int columns[PAIRS][8];
};

// Every warp has the same piece of shared memory all along, a team those of its warps: so a team may begin with the next
// product while others are not yet done with the last, if that has teams of the same size.
constexpr int WARP_ROOM = 18432;
static_assert(WARP_ROOM % 512 == 0);

// x [rows, K] by several matrices. `turn`: the team that begins. The activations are there when `ready` has returned.
template <
    typename T, typename F, int CHUNK, int SLICES, int K, int TALL, int WIDE, int STAGES, int AHEAD, bool WHOLE,
    bool STREAMS, int COUNT, typename X, typename M, typename Awaited>
__device__ __forceinline__ void multiply_rows(
    unsigned char* room, int turn, const X* x, int rows, const M (&matrices)[COUNT], Awaited ready) {
  const Team team = Team::part(32 * SLICES, turn);
  int tiles = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) tiles += count_tiles<TALL>(matrices[i]);
  auto choose = [&](int tile) { return tile_of<TALL, WHOLE>(matrices, tile); };
  auto outputs = [&](int, int column) { return column < rows ? column : -1; };
  team.sync();  // nobody reads what the team computed before
  product<T, F, CHUNK, SLICES, TALL, WIDE, STAGES, AHEAD, false, WHOLE, STREAMS>(
      team, room + (team.barrier - 1) * (SLICES * WARP_ROOM), x, K, tiles, 1, choose, outputs, ready);
}

// Row pair / share of x by the pair's expert, for all pairs: [pairs, N]. Expert E is `shared_expert`. OWN: a block
// computes the same columns of all pairs, and so has itself what is to be added up there.
template <
    typename T, typename F, int CHUNK, int SLICES, int K, int TALL, int STAGES, int AHEAD, bool WHOLE, bool STREAMS,
    unsigned E, bool OWN, typename X, typename M>
__device__ __forceinline__ void multiply_experts(
    unsigned char* room, const X* x, int share, const Choice<T>& choice, const M& matrix, const M& shared_expert) {
  const Team team = OWN ? Team::of_block(32 * SLICES) : Team::part(32 * SLICES);
  const int each = count_tiles<TALL>(matrix);
  for (int place = OWN ? blockIdx.x : 0; place < (OWN ? each : 1); place += gridDim.x) {
    auto choose = [&](int tile) {
      const unsigned expert = choice.of[OWN ? tile : tile / each];
      Part<M> part = {
          expert == E ? shared_expert : matrix, first_row<TALL, WHOLE>(matrix, OWN ? place : tile % each)};
      move_to_expert<F>(part, K, expert == E ? 0 : expert);
      return part;
    };
    auto outputs = [&](int tile, int column) { return choice.columns[OWN ? tile : tile / each][column]; };
    team.sync();
    product<T, F, CHUNK, SLICES, TALL, 1, STAGES, AHEAD, true, WHOLE, STREAMS>(
        team, room + (team.barrier - 1) * (SLICES * WARP_ROOM), x, K, OWN ? choice.groups : choice.groups * each, share,
        choose, outputs, [] {});
  }
}

// Every block chooses for all rows. With EACH = TOP + 1 each row takes the shared expert too, as number E.
template <int E, int TOP, int EACH, typename T>
__device__ __noinline__ void choose_experts(const T* logits, int rows, Choice<T>& choice) {
  const int pairs = rows * EACH;
  __syncthreads();  // nobody reads the choice before
  for (int row = threadIdx.x / 32; row < rows; row += blockDim.x / 32) {
    choose<T, E, TOP>(logits + row * E, choice.experts + row * EACH);
    if (EACH > TOP && threadIdx.x % 32 == 0) choice.experts[row * EACH + TOP] = E;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs * 8; i += blockDim.x) choice.columns[i / 8][i % 8] = -1;
  __syncthreads();
  const int pair = threadIdx.x;
  const unsigned expert = pair < pairs ? choice.experts[pair] : 0;
  int rank = 0, leader = pair;  // among the pairs of this expert; every eighth of them begins a group
#pragma unroll 1
  for (int p = 0; p < min(pair, pairs); p += 4) {
    const uint4 next = *reinterpret_cast<const uint4*>(choice.experts + p);
    const unsigned four[4] = {next.x, next.y, next.z, next.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (p + i < pair && four[i] == expert && rank++ % 8 == 0) leader = p + i;
  }
  if (rank % 8 == 0) leader = pair;
  const unsigned begins = __ballot_sync(0xFFFFFFFF, pair < pairs && leader == pair);
  if (pair < PAIRS && pair % 32 == 0) choice.begins[pair / 32] = begins;
  __syncthreads();
  if (pair < pairs) {
    int group = 0, begun = 0;  // groups begun before this pair's leader, and before the pair
#pragma unroll 1
    for (int word = 0; word <= pair / 32; word++) {
      const unsigned begins = choice.begins[word];
      const int before_leader = leader - 32 * word, before = pair - 32 * word;
      if (before_leader > 0) group += __popc(before_leader < 32 ? begins & ((1u << before_leader) - 1) : begins);
      begun += __popc(before < 32 ? begins & ((1u << before) - 1) : begins);
    }
    choice.columns[group][rank % 8] = pair;
    if (leader == pair) choice.of[group] = expert;
    if (pair == pairs - 1) choice.groups = begun + (leader == pair);
  }
  __syncthreads();
}

// The scores of the experts that were chosen: while a barrier is awaited, since products do not need them.
template <int E, int TOP, int EACH, typename T>
__device__ __noinline__ void score_experts(const T* logits, int rows, bool normed, Choice<T>& choice) {
  for (int row = threadIdx.x / 32; row < rows; row += blockDim.x / 32)
    score<T, E, TOP>(logits + row * E, choice.experts + row * EACH, normed, choice.scores + row * EACH);
}

// Into the L2 cache: what a norm will read after it has waited for all else.
__device__ __forceinline__ void prefetch_norm(const float* weight, int size) {
  const int at = 64 * threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && at < size) prefetch(weight + at, 4 * min(64, size - at));
}

// Into this multiprocessor's L1 cache, without waiting: what is read next would come after the weights of a product.
__device__ __forceinline__ void touch(const void* from, int bytes) {
  const char* const first = static_cast<const char*>(from);
  for (int at = 32 * threadIdx.x; at < bytes; at += 32 * blockDim.x) load_and_forget(first + at);
}

// The norms of all rows, as `Ready` if the products that read them want that. A few short ones every block computes for
// its `own`, side by side: that takes less time than a barrier.
template <int D, int THREADS, int OWN, typename T>
__device__ __noinline__ void norm_rows(
    const Grid& grid, int rows, const T* x, const float* weight, float eps, T* normed, bool is_ready) {
  const Team team = {0, 1, int(threadIdx.x), THREADS, 15};  // a barrier that no team of a product has
  const bool own = rows <= OWN;
  auto nothing = [](int) { return Eight<T>(); };
  if (OWN > 1 && own && threadIdx.x < THREADS)
    norm_together<D, THREADS, OWN>(team, rows, x, weight, eps, normed, is_ready);
  else
    for (int row = own ? 0 : blockIdx.x; row < rows && threadIdx.x < THREADS; row += gridDim.x)
      norm_row<D, THREADS, false>(
          team, x + row * D, nothing, weight, eps, (T*)nullptr, normed + row * D, is_ready);
  if (own)
    __syncthreads();
  else
    grid.sync();
}

template <typename T>
__device__ __forceinline__ Eight<T> eight(const T* at) {
  return *reinterpret_cast<const Eight<T>*>(at);
}

// What a row's experts made [TOP, D], by their scores, and the shared expert's part, by its gate: eight elements.
template <int TOP, int D, typename T>
__device__ __forceinline__ Eight<T> combined_eight(
    const T* parts, const T* scores, const T* shared, T gate, int at) {
  float sums[8] = {};
#pragma unroll
  for (int i = 0; i < TOP; i++) {
    const Eight<T> part = eight(parts + i * D + at);
    const float score = float(scores[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j] = __fmaf_rn(float(part.at[j]), score, sums[j]);
  }
  const Eight<T> always = eight(shared + at);
  const float opened = __fdiv_rn(1.0f, 1.0f + expf(-float(gate)));
  Eight<T> out;
#pragma unroll
  for (int j = 0; j < 8; j++) out.at[j] = T(__fmaf_rn(opened, float(always.at[j]), sums[j]));
  return out;
}

// out = x + added, which gives eight elements of a row: of all rows those columns of which this block has the products,
// in tiles of 16.
template <int D, bool WHOLE, typename T, typename Added>
__device__ __forceinline__ void add_columns(int rows, const T* x, Added added, T* out) {
  __syncthreads();
  for (int tile = blockIdx.x; tile < (D + 15) / 16; tile += gridDim.x)
    for (int i = threadIdx.x; i < 2 * rows; i += blockDim.x) {
      const int row = i / 2, at = (WHOLE ? min(16 * tile, D - 16) : 16 * tile) + i % 2 * 8;
      if (at >= D) continue;
      const Eight<T> more = added(row, at);
      Eight<T> here = eight(x + row * D + at);
#pragma unroll
      for (int j = 0; j < 8; j++) here.at[j] = T(float(here.at[j]) + float(more.at[j]));
      *reinterpret_cast<Eight<T>*>(out + row * D + at) = here;
    }
}

// All value heads of all rows. The states are on their way while the window is awaited, for which the block has
// arrived already.
template <int HK, int HV, int DK, int DV, int TAPS, int GROUPS, typename... Arguments>
__device__ __noinline__ void run_heads(const Grid& grid, int B, Arguments... arguments) {
  extern __shared__ __align__(512) unsigned char dynamic_shared[];
  constexpr int THREADS = 4 * DV / GROUPS;
  const Team team = {0, 1, int(threadIdx.x), THREADS, 1};
  bool waited = false;
  auto ready = [&] {
    if (!waited) grid.wait();
    waited = true;
  };
  for (int head = blockIdx.x; head < B * HV; head += gridDim.x) {
    if (threadIdx.x < THREADS)
      fold_and_run<HK, HV, DK, DV, TAPS, GROUPS>(team, dynamic_shared, head % HV, head / HV, ready, arguments...);
    else
      ready();
  }
  ready();
}

// Attention of the window to keys and values [B, HKV, S, D], into which its own are written. The block has arrived
// already behind the products.
template <int H, int HKV, int D, int DIMS, typename T, typename N, typename Y>
__device__ __noinline__ void attend(
    const Grid& grid, int B, int W, int S, const T* both, const T* keys, const T* values,
    const N* query_weight, const N* key_weight, const int* offset, float eps, float log2_base, float scale,
    T* queries, T* all_keys, T* all_values, float* partial, Y* out) {
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, pieces = (S + SPLIT - 1) / SPLIT;
  extern __shared__ __align__(512) unsigned char dynamic_shared[];
  float* const lines = reinterpret_cast<float*>(dynamic_shared);
  grid.wait();
  for (int i = blockIdx.x + gridDim.x * warp; i < B * W * (H + 2 * HKV); i += gridDim.x * warps)
    arrange<H, HKV, D, DIMS>(
        i, lines + warp * D, both, keys, values, query_weight, key_weight, offset, eps, log2_base, B, W, queries,
        all_keys, all_values, S, true);
  grid.sync();
  float* const weights = partial + (long long)B * H * pieces * W * D;
  const Team team = {0, 1, int(threadIdx.x), 32 * WARPS, 1};
  for (int i = blockIdx.x; i < pieces * HKV * B && threadIdx.x < 32 * WARPS; i += gridDim.x)
    partials<H, HKV, D>(
        team, dynamic_shared, i / (HKV * B), pieces, i % HKV, i / HKV % B, queries, all_keys, all_values, offset, scale,
        W, S, partial, weights);
  grid.sync();
  const Team mergers = Team::part(D);
  float* const mine = lines + (threadIdx.x / D) * MERGE_FLOATS<D>;
  for (int i = mergers.index; i < H * W * B && threadIdx.x / D < blockDim.x / D; i += mergers.count)
    merge<H, HKV, D>(mergers, mine, i % H, i / H % W, i / (H * W), partial, weights, both, offset, W, pieces, out);
}

}  // namespace headstart
