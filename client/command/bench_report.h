// The table that `cppool bench` prints.
#pragma once

#include <chrono>
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
  bool several_ranks = false;        // a point has more than one
  bool wide = false;                 // all columns
  std::vector<std::string> kernels;  // as --kernels has them
  std::string baseline;              // the file; empty: none
  std::chrono::system_clock::time_point begin = std::chrono::system_clock::now();
  std::vector<BenchRow> rows;                    // those that are done
  std::map<int, Json> worlds;                    // the answers to `hello`, by world size
  std::map<std::string, std::string> libraries;  // digests by the name of --load and --kernels
  std::vector<std::string> notes;                // lines below the table
  std::string interrupted;                       // why rows are missing; else empty
};

// Prints Markdown, each row when it is done. Without `wide` a line has at most 100 columns, as far as the
// values of the axes allow: of the columns those that matter most.
class BenchTable {
 public:
  explicit BenchTable(std::ostream& out) : out_(out) {}
  // `results` has the row as its last one.
  void Add(const BenchResults& results);
  // Prints what the columns mean, what it was measured on, and why rows were not measured.
  void End(const BenchResults& results);

 private:
  void Print(const BenchResults& results);

  std::ostream& out_;
  std::vector<std::string> heads_;  // those that were printed last
  std::vector<std::size_t> widths_;
  std::size_t printed_ = 0;  // rows
};

}  // namespace cppool::command
