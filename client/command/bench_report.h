// The table that `cppool bench` prints.
#pragma once

#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "client/command/bench_row.h"

namespace cppool::command {

struct BenchResults {
  std::string case_name;
  BenchPlan plan;
  std::vector<SweepAxis> axes;
  std::vector<std::string> kernels;  // as --kernels has them
  std::string baseline;              // the file; empty: none
  std::vector<BenchRow> rows;        // those that are done
  std::map<int, Json> worlds;        // the answers to `hello`, by world size
  std::vector<std::string> notes;    // lines below the table
  std::string interrupted;           // why rows are missing; else empty
};

// Prints Markdown, with what the columns mean below.
void PrintBenchTable(std::ostream& out, const BenchResults& results);

}  // namespace cppool::command
