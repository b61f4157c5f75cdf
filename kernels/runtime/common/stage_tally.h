// Turns the timed intervals of a case into StageTimes. Both runtimes feed it; no thread of its own.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace cppool::kernels {

class StageTally {
 public:
  // iteration: the counted iteration's index; kOnce outside of iterations. Warm-up intervals are not added at
  // all.
  static constexpr int kOnce = -1;

  // "a/b" on the main stream counts for "a" too.
  void Add(int iteration, const std::string& stage, bool main_stream, double milliseconds);

  // In the order in which stages were first added, a parent before its first child.
  StageTimes Times() const;

 private:
  struct Entry {
    double once = 0;
    std::map<int, double> by_iteration;
  };
  Entry& At(const std::string& stage);

  std::vector<std::string> order_;
  std::map<std::string, Entry> entries_;
};

}  // namespace cppool::kernels
