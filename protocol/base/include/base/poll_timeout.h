// Header-only.
#pragma once

#include <algorithm>
#include <chrono>
#include <climits>

namespace cppool::base {

// Milliseconds for poll(2) until `until`, rounded up; 0 when it has passed.
inline int PollTimeout(std::chrono::steady_clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<long long>(left.count(), 0, INT_MAX));
}

}  // namespace cppool::base
