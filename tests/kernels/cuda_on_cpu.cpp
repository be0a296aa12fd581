// The threads of cuda_on_cpu.h, compiled once for all kernels.

#include "cuda_on_cpu.h"

#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <chrono>
#include <map>
#include <memory>
#include <thread>

constinit thread_local Thread* self = nullptr;
constinit thread_local dim3 blockIdx{};
constinit dim3 blockDim{}, gridDim{};
constinit thread_local unsigned char shared_room[ROOM] __align__(2048) = {};

namespace {
struct Fiber : Thread {
  ucontext_t context;  // to start in; later turns begin with a jump, which needs no system call
  jmp_buf jump;
  bool started = false, done = false;
  std::unique_ptr<char[]> stack;
};
struct Kernel {
  void (*run)(const void*);
  const void* what;
};
thread_local Barrier block_barrier;
thread_local std::map<int, Barrier> named_barriers;
thread_local jmp_buf scheduler;
Kernel running;

Fiber& fiber() { return *static_cast<Fiber*>(self); }

void pause_thread() {
  if (!_setjmp(fiber().jump)) _longjmp(scheduler, 1);
}
void resume_thread() {
  if (_setjmp(scheduler)) return;
  if (fiber().started) _longjmp(fiber().jump, 1);
  fiber().started = true;
  setcontext(&fiber().context);
}
void enter_thread() {
  running.run(running.what);
  fiber().done = true;
  _longjmp(scheduler, 1);
}

void run_block(dim3 index) {
  constexpr int STACK = 1 << 18;
  const int count = blockDim.x * blockDim.y * blockDim.z;
  std::vector<Fiber> threads(count);
  std::vector<Warp> warps((count + 31) / 32);
  blockIdx = index;
  block_barrier = {count};
  named_barriers.clear();
  std::memset(shared_room, 0xFF, sizeof shared_room);  // no number in any type
  for (int w = 0; w < int(warps.size()); ++w) warps[w].barrier = {min(32, count - 32 * w)};
  for (int t = 0; t < count; ++t) {
    Fiber& thread = threads[t];
    thread.stack.reset(new char[STACK]);
    thread.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    thread.warp = &warps[t / 32], thread.lane = t % 32;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter_thread, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (Fiber& thread : threads)
      if (!thread.done) {
        busy = true;
        self = &thread;
        resume_thread();
      }
  }
}
}  // namespace

void meet(Barrier& barrier) {
  const int generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) pause_thread();
  }
}
void __syncthreads() { meet(block_barrier); }

void land_copies(int pending) {
  std::erase_if(self->copies, [&](const Copy& copy) {
    if (copy.group >= self->groups - pending) return false;
    std::memcpy(copy.to, copy.from, copy.bytes);
    return true;
  });
}
void run_products(int pending) {
  std::vector<Product> due;
  std::erase_if(self->products, [&](const Product& product) {
    if (product.group >= self->product_groups - pending) return false;
    due.push_back(product);
    return true;
  });
  for (const Product& product : due) product.run(product.what);
}
void give_way() { sched_yield(); }

long long clock64() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}
void headstart::named_barrier(int number, int threads) {
  if (number == 0) return __syncthreads();
  if (named_barriers[number].arrived && named_barriers[number].size != threads) std::abort();  // undefined on a card
  named_barriers[number].size = threads;
  meet(named_barriers[number]);
}

void launch_threads(dim3 grid, dim3 block, bool together, void (*kernel)(const void*), const void* what) {
  running = {kernel, what}, gridDim = grid, blockDim = block;
  std::vector<std::thread> blocks;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        if (together)
          blocks.emplace_back(run_block, dim3{x, y, z});
        else
          run_block({x, y, z});
  for (std::thread& each : blocks) each.join();
}
