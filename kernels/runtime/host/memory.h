// How much memory this process may still take, asked before it is taken: an allocation that does not fit is
// refused, not killed for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace cppool::kernels::host {

inline constexpr std::size_t kAlignment = 256;
inline constexpr int kPoison = 0xFF;  // bytes of a NaN in every floating-point type

// The smaller of what the machine has and what the process's control group allows.
std::size_t TotalMemory();
std::size_t AvailableMemory();

// Aligned, contents undefined, between two guards: bytes that nobody may write. NULL when the system refuses.
void* AllocateGuarded(std::size_t bytes);
void FreeGuarded(void* ptr);
// What of the guards is not as it was: "bytes 4096 to 4103", counted from ptr on; empty: nothing. `bytes` as allocated.
std::string DamageAround(const void* ptr, std::size_t bytes);

// One per world: its ranks share the machine. Any thread; takes no lock, so that it orders no two streams.
class MemoryGate {
 public:
  // False when `bytes` more do not fit. What is reserved counts until Touched(): memory is available to the
  // kernel until it is written.
  bool Reserve(std::size_t bytes);
  void Touched(std::size_t bytes) {
    untouched_.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  // What could still be reserved.
  std::size_t Free() const;

 private:
  std::atomic<std::int64_t> untouched_{0};
  std::atomic<std::int64_t> unmeasured_{
      0};  // small allocations that may go by without asking the system again
};

}  // namespace cppool::kernels::host
