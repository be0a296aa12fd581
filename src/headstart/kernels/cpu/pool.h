// Threads that share the parts of one job. Parts are outputs, never summands: who computes a part changes no bit.
//
// Parts are taken one by one, and the caller takes them too. So a worker that the system does not run costs its help
// and nothing else, and the child of a fork, where no worker lives, computes everything in the caller.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace headstart {

class Pool {
 public:
  // How many threads compute, the caller included. The first call decides.
  void start(int threads) {
    std::lock_guard guard(lock_);
    for (; workers_ < threads - 1; ++workers_) std::thread([this] { work(); }).detach();
  }

  int threads() const {
    return workers_ + 1;
  }

  // f(part) for every part from 0 on. Not reentrant; a second caller at the same time computes alone.
  template <typename F>
  void run(uint32_t parts, const F& f) {
    std::unique_lock guard(lock_, std::defer_lock);
    if (parts < 2 || workers_ == 0 || !guard.try_lock()) {
      for (uint32_t part = 0; part < parts; ++part) f(part);
      return;
    }
    call_ = [](const void* f, uint32_t part) { (*static_cast<const F*>(f))(part); };
    function_ = &f;
    done_.store(0, std::memory_order_relaxed);
    next_.store(uint64_t(parts) << 32, std::memory_order_release);
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    take();
    auto finished = [&] { return done_.load(std::memory_order_acquire) == parts; };
    while (!spin_until(finished)) std::this_thread::yield();  // a worker has a part, and the system runs others
  }

 private:
  // For the gap between two operations of a step, not for that between two steps.
  template <typename F>
  static bool spin_until(const F& reached) {
    auto begun = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 8; ++i) {
        if (reached()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      }
    } while (std::chrono::steady_clock::now() - begun < std::chrono::microseconds(50));
    return false;
  }

  // Parts until none is left. A part that was taken keeps the caller in `run`, and so its function alive.
  void take() {
    uint64_t next = next_.load(std::memory_order_acquire);
    while (uint32_t(next) < next >> 32) {
      if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      call_(function_, uint32_t(next));
      done_.fetch_add(1, std::memory_order_release);
      next = next_.load(std::memory_order_acquire);
    }
  }

  void work() {
    for (uint32_t seen = 0;;) {
      if (!spin_until([&] { return jobs_.load(std::memory_order_acquire) != seen; })) {
        jobs_.wait(seen, std::memory_order_acquire);
      }
      seen = jobs_.load(std::memory_order_acquire);
      take();
    }
  }

  std::mutex lock_;  // held by whom the workers work for
  std::atomic<int> workers_ = 0;
  std::atomic<uint32_t> jobs_ = 0;
  std::atomic<uint64_t> next_ = 0;  // upper half: parts of the job; lower half: the first that nobody has taken
  std::atomic<uint32_t> done_ = 0;
  void (*call_)(const void*, uint32_t) = nullptr;
  const void* function_ = nullptr;
};

Pool& pool();  // of this process

}  // namespace headstart
