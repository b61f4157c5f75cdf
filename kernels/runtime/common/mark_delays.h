// How long the marks of a perturbed case delay their streams, on every runtime.
#pragma once

#include <chrono>
#include <cstdint>

#include "kernels/numerics/philox.h"

namespace cppool::kernels {

class MarkDelays {
 public:
  static constexpr std::uint32_t kLongestNs = 200'000;

  MarkDelays() = default;  // no delays
  MarkDelays(std::uint64_t seed, int rank)
      : on_(true), seed_(seed), rank_(static_cast<std::uint32_t>(rank)) {}

  // The delay of the rank's next mark. Half of them are 0, so that two streams differ by much more than the
  // time between two calls. The same seed and rank give the same sequence.
  std::chrono::nanoseconds Next() {
    if (!on_) return {};
    const std::uint64_t index = next_++;
    const PhiloxBlock random = Philox4x32(
        {{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), rank_, kPurpose}},
        seed_);
    if (random.word[0] & 1) return {};
    return std::chrono::nanoseconds(random.word[1] % (kLongestNs + 1));
  }

 private:
  static constexpr std::uint32_t kPurpose = 0x6D61726B;  // not the number of any input tensor

  bool on_ = false;
  std::uint64_t seed_ = 0;
  std::uint32_t rank_ = 0;
  std::uint64_t next_ = 0;
};

}  // namespace cppool::kernels
