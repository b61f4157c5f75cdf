// How threads wait for each other: a short spin, then a futex.
//
// A wake-up orders no memory. The thread that notifies has stored the awaited value with release, and the one
// that waits reads it again with acquire. On the host runtime these pairs, one per event, message or
// collective, are the only order that ThreadSanitizer sees between two streams. A mutex, a condition variable
// or std::atomic::wait would also order unrelated streams, and so hide a missing wait.
#pragma once

#include <atomic>
#include <cstdint>

namespace cppool::kernels {

// Orders memory for the processor, against a lost wake-up. ThreadSanitizer ignores it, as intended: it must
// not hide a missing wait.
inline void ProcessorFence() {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
}

class WakeUp {
 public:
  // Returns once ready() is true. `ready` reads atomics with relaxed order; it is called often and must not
  // block. There is no deadline: the world's Abort makes every ready() true that depends on another rank.
  template <typename Ready>
  void Wait(Ready ready) {
    for (int i = 0; i < kSpins; ++i) {
      if (ready()) return;
      Pause(i);
    }
    while (!ready()) {
      sleepers_.fetch_add(1, std::memory_order_relaxed);
      ProcessorFence();
      const std::uint32_t seen = word_.load(std::memory_order_relaxed);
      ProcessorFence();
      if (!ready()) Sleep(seen);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  // Wakes the sleeping threads; is called after a store that may have made a ready() true. Cheap when no
  // thread sleeps.
  void Notify() {
    ProcessorFence();
    if (sleepers_.load(std::memory_order_relaxed) == 0) return;
    word_.fetch_add(1, std::memory_order_relaxed);
    WakeSleepers();
  }

 private:
  static constexpr int kSpins =
      64;  // a few microseconds: longer than a hand-over between two running threads

  static void Pause(int round);
  void Sleep(std::uint32_t seen);
  void WakeSleepers();

  std::atomic<std::uint32_t> word_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace cppool::kernels
