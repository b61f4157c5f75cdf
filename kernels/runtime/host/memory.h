// How much memory this process may still take, checked before it is taken: an allocation that does not fit is
// refused, where the system would kill the process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace cppool::kernels::host {

inline constexpr std::size_t kAlignment = 256;
inline constexpr int kPoison = 0xFF;  // bytes of a NaN in every floating-point type

// The smaller of what the machine has and what the process's control group allows.
std::size_t TotalMemory();
std::size_t AvailableMemory();

// Aligned, contents undefined, between two guards: bytes that must not be written. NULL when the system
// refuses.
void* AllocateGuarded(std::size_t bytes);
void FreeGuarded(void* ptr);
// The bytes of the guards that have changed, "bytes 4096 to 4103", counted from ptr; empty: none. `bytes` as
// allocated.
std::string DamageAround(const void* ptr, std::size_t bytes);

// One per world: its ranks share the machine. Any thread; takes no lock, so that it orders no two streams.
class MemoryGate {
 public:
  // `available`: what the system has left, asked on any thread.
  explicit MemoryGate(std::function<std::size_t()> available = AvailableMemory)
      : available_(std::move(available)) {}

  // False when `bytes` more do not fit. Reserved memory counts until Touched(), because the kernel counts
  // memory as available until it is written. Call Touched() for each part soon after it was written: until
  // then it counts twice.
  bool Reserve(std::size_t bytes);
  void Touched(std::size_t bytes) {
    untouched_.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  // How much could still be reserved.
  std::size_t Free() const;

 private:
  std::int64_t Usable() const;

  const std::function<std::size_t()> available_;
  std::atomic<std::int64_t> untouched_{0};
  // How much small allocations may still take before the system is asked again.
  std::atomic<std::int64_t> unmeasured_{0};
};

}  // namespace cppool::kernels::host
