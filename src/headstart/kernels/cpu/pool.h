// Threads that share the parts of one job. Parts are outputs, never summands: who computes a part changes no bit.
//
// Every thread begins with an equal range of consecutive parts, so that what it reads is consecutive too and is in its
// own cache the next time. It takes them one by one from the front; when none is left, it takes from the back of the
// others' ranges. So a worker that the system does not run costs its help and nothing else, and the child of a fork,
// where no worker lives, computes everything in the caller.
#pragma once

#include <algorithm>
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
    for (; workers_ < std::min(threads, MOST) - 1; ++workers_)
      std::thread([this, me = workers_ + 1] { work(me); }).detach();
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
    const uint64_t ranges = threads();
    for (uint64_t i = 0; i < ranges; ++i)
      ranges_[i].parts.store((parts * (i + 1) / ranges) << 32 | parts * i / ranges, std::memory_order_release);
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    take(0);
    auto finished = [&] { return done_.load(std::memory_order_acquire) == parts; };
    while (!spin_until(finished)) std::this_thread::yield();  // a worker has a part, and the system runs others
  }

 private:
  static constexpr int MOST = 256;  // threads

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
  void take(int me) {
    for (int i = 0, ranges = threads(); i < ranges; ++i) {
      std::atomic<uint64_t>& range = ranges_[(me + i) % ranges].parts;
      uint64_t left = range.load(std::memory_order_acquire);
      while (uint32_t(left) < left >> 32) {
        const bool own = i == 0;
        if (!range.compare_exchange_weak(left, own ? left + 1 : left - (1ull << 32), std::memory_order_acq_rel)) continue;
        call_(function_, uint32_t(own ? left : (left >> 32) - 1));
        done_.fetch_add(1, std::memory_order_release);
        left = range.load(std::memory_order_acquire);
      }
    }
  }

  void work(int me) {
    for (uint32_t seen = 0;;) {
      if (!spin_until([&] { return jobs_.load(std::memory_order_acquire) != seen; })) {
        jobs_.wait(seen, std::memory_order_acquire);
      }
      seen = jobs_.load(std::memory_order_acquire);
      take(me);
    }
  }

  std::mutex lock_;  // held by whom the workers work for
  std::atomic<int> workers_ = 0;
  std::atomic<uint32_t> jobs_ = 0;
  struct alignas(64) Range {
    std::atomic<uint64_t> parts = 0;  // lower half: the first that nobody has taken; upper half: the end
  };
  Range ranges_[MOST];
  std::atomic<uint32_t> done_ = 0;
  void (*call_)(const void*, uint32_t) = nullptr;
  const void* function_ = nullptr;
};

Pool& pool();  // of this process

}  // namespace headstart
