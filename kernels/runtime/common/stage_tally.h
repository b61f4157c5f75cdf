// Turns the timed intervals of a case into StageTimes, for both runtimes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace cppool::kernels {

class StageTally {
 public:
  // What an iteration is numbered but for those that count, from 0 on: outside of iterations, and a warm-up,
  // whose intervals are not added. As TraceSlice::iteration.
  static constexpr int kOnce = -1, kWarmUp = -2;

  // "a/b" on the main stream counts for "a" too.
  void Add(int iteration, const std::string& stage, bool main_stream, double milliseconds);

  // In the order in which the stages were first added, a parent before its first child.
  StageTimes Times() const;
  // Returns the samples in the order of Times().
  StageSamples Samples() const;

 private:
  struct Entry {
    bool main_stream = false;  // the stage was on it
    double once = 0;
    std::map<int, double> by_iteration;
  };
  Entry& At(const std::string& stage);

  std::vector<std::string> order_;
  std::map<std::string, Entry> entries_;
};

}  // namespace cppool::kernels
