// When the daemon stops timing a case, in place of a fixed number of iterations.
#pragma once

#include <chrono>
#include <cstdint>

namespace cppool {

// The daemon decides it for all ranks at once: protocol/README.md says when.
struct Sampling {
  // 0.0001 to 1: half the width of the 95 % confidence interval of each stage's median, over the median.
  double precision = 0.01;
  std::chrono::milliseconds limit{10000};  // 1 ms to 24 h, of all timed iterations
  std::int64_t most = 10000;               // iterations
};

}  // namespace cppool
