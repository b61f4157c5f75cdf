// The points of a sweep: every combination of world sizes and of the values of parameters.
#pragma once

#include <string>
#include <vector>

#include "client/suite/cell.h"

namespace cppool::command {

struct SweepAxis {
  std::string key;
  std::vector<Json> values;
};

struct SweepPoint {
  suite::Cell cell;
  std::vector<Json> swept;  // its values on the axes that have more than one
};

// Reads "key=A,B" texts, as `--param` has them. Throws UsageError for a key that is given twice.
std::vector<SweepAxis> SweepAxesOf(const std::vector<std::string>& params);

// Every combination of the axes' values put over `cell`, the first axis varying slowest. Throws UsageError
// when there are more than kMaxCells.
std::vector<SweepPoint> Over(const suite::Cell& cell, const std::vector<SweepAxis>& axes);

// World sizes vary slowest, then the axes in their order. max_seqlen_kv follows max_seqlen_q where it is not
// given.
std::vector<SweepPoint> PointsOf(const std::string& case_name, const std::vector<int>& world_sizes,
                                 const std::vector<SweepAxis>& axes);

}  // namespace cppool::command
