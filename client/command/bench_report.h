// What `cppool bench` prints: its measurements as a Markdown table, or as JSON.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "client/command/sweep.h"

namespace cppool::command {

// A stage's time on the slowest rank, and its rate per GPU; NaN: not known.
struct Timing {
  double ms = std::numeric_limits<double>::quiet_NaN();
  double tflops = std::numeric_limits<double>::quiet_NaN();
};

struct Measurement {
  std::string error;  // empty: the stages are there
  std::map<std::string, Timing> stages;
  bool skipped = false;  // the daemon cannot run it: no failure

  // Of several stages as one; nothing is known of it where one of them is missing.
  Timing Together(const std::vector<std::string>& names) const;
};
// The stages of a passed run. A stage "forward/attend" is part of "forward" and is not listed.
Measurement MeasurementOf(const Result& result);

struct BenchPoint {
  SweepPoint point;
  Measurement measured, one_gpu;
  std::string run, bench;  // the commands that run and that measure the point alone
};

struct BenchResults {
  std::vector<SweepAxis> axes;
  std::vector<BenchPoint> points;  // those that are done
  std::map<int, Json> worlds;      // the answers to `hello`, by world size
  std::int64_t warmup = 0, repeat = 0;
  std::string interrupted;  // what is said where points are missing; else empty
};

void PrintBenchTable(std::ostream& out, const BenchResults& results);
// One object for each point, then a summary.
void PrintBenchJson(std::ostream& out, const BenchResults& results);

}  // namespace cppool::command
