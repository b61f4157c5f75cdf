// How the threads of the host runtime wait for each other: a futex with a short spin in front.
//
// A bell wakes; it orders nothing. Whoever waits reads the awaited value again with acquire, and whoever
// rings has stored it with release: these pairs, one per event, message or collective, are all the order that
// ThreadSanitizer sees between two streams. A mutex, a condition variable or std::atomic::wait would add
// order of its own between unrelated streams, and hide a missing wait.
#pragma once

#include <atomic>
#include <cstdint>

namespace cppool::kernels::host {

// Orders memory for the processor, against a lost wake-up. ThreadSanitizer does not model it, which is what
// we want here.
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

class Bell {
 public:
  // Returns once ready() is true. `ready` reads atomics with relaxed order; it is called often and must not
  // block. There is no deadline: what waits here is work in stream order, and the world's Abort makes every
  // ready() that depends on another rank true.
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

  // After a store that may have made a ready() true. Cheap when nobody sleeps.
  void Ring() {
    ProcessorFence();
    if (sleepers_.load(std::memory_order_relaxed) == 0) return;
    word_.fetch_add(1, std::memory_order_relaxed);
    Wake();
  }

 private:
  static constexpr int kSpins = 64;  // a few microseconds: a hand-over between two running threads takes less

  static void Pause(int round);
  void Sleep(std::uint32_t seen);
  void Wake();

  std::atomic<std::uint32_t> word_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace cppool::kernels::host
