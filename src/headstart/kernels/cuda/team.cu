// Threads of a block that work together, and the whole grid as one.

namespace headstart {

struct Team {
  int index, count;     // of this team among all of the grid's
  int thread, threads;  // of this thread among the team's
  int barrier;  // of `part`: 1 + the number of this team in its block

  __device__ __forceinline__ void sync() const { named_barrier(barrier, threads); }

  // Every block is a team.
  __device__ __forceinline__ static Team block(int index, int count) {
    return {index, count, int(threadIdx.x), int(blockDim.x), 0};
  }

  // As many teams of `threads` as a block of a persistent kernel holds; number `turn` of them is the first. Neighbours
  // are in different blocks.
  __device__ __forceinline__ static Team part(int threads, int turn = 0) {
    const int thread = thread_again(), count = blockDim.x / threads * gridDim.x, mine = thread / threads;
    const int index = int(blockIdx.x + gridDim.x * mine) - turn;
    return {index < 0 ? index + count : index, count, thread % threads, threads, 1 + mine};
  }

  // The teams of a block, among themselves.
  __device__ __forceinline__ static Team of_block(int threads) {
    const int thread = thread_again(), mine = thread / threads;
    return {mine, int(blockDim.x) / threads, thread % threads, threads, 1 + mine};
  }
};

// Of this kernel's grids, one after the other and never two at once: how many times a block has arrived at a barrier,
// and whether one was given up.
__device__ unsigned long long arrived;
__device__ unsigned failed;
constexpr long long PATIENCE = 200'000'000;  // clock cycles, about 100 ms

// A barrier of all blocks, which must all be resident. What a block wrote before `arrive` others see after `wait`. A
// block that waits too long sets `failed`: from then on nobody waits, what is computed means nothing, and `status`
// says so to the host.
struct Grid {
  struct Shared {
    unsigned long long target;  // arrivals that end the next barrier
    bool given_up;
  };
  int* status;
  Shared* shared;

  __device__ __forceinline__ Grid(const int* before, int* after, Shared* place) : status(after), shared(place) {
    if (threadIdx.x != 0) return;
    shared->target = (load_acquire(&arrived) / gridDim.x + 1) * gridDim.x;  // others may be ahead, but not past it
    shared->given_up = load_acquire(&failed);
    if (blockIdx.x == 0) *status = *before | int(shared->given_up);
  }

  __device__ __forceinline__ void arrive() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    add_release(&arrived, 1);
  }

  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      const long long begun = clock64();
      for (int polls = 1; !shared->given_up && load_acquire(&arrived) < shared->target; polls++) {
        if (polls % 1024 || (!load_acquire(&failed) && clock64() - begun < PATIENCE)) continue;
        atomicExch(&failed, 1u);
        shared->given_up = true;
        *status = 1;
      }
      shared->target += gridDim.x;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void sync() const {
    arrive();
    wait();
  }
};

}  // namespace headstart
