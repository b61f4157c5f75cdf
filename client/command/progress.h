// What a person sees while a command asks its pools, and when it is interrupted.
#pragma once

#include <chrono>
#include <cstddef>
#include <ostream>
#include <string>

namespace cppool::command {

// One line on a terminal, which the next one replaces; nothing elsewhere. Not synchronised.
class Progress {
 public:
  // `total`: how many steps there are.
  Progress(std::ostream& err, bool terminal, std::size_t total)
      : err_(err), terminal_(terminal), total_(total) {}

  // "[3/20] 0:07, 0:41 left, 1 failed, DOING". `share`: of the step under way that is done, from 0 to 1. The time left is an estimate
  // from the steps so far, shown once there is one.
  void Show(int done, int failed, const std::string& doing, double share = 0);
  void Clear();

 private:
  std::ostream& err_;
  const bool terminal_;
  const std::size_t total_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// "interrupted (Hangup) with 8 of 20 cells done".
std::string DescribeInterruption(int signal, int done, std::size_t total, const std::string& steps);

}  // namespace cppool::command
