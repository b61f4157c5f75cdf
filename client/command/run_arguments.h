// The options of `cppool run`, and the cells and options of pools and runs that follow from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/command/command.h"
#include "client/suite/cell.h"
#include "protocol/kernel_choice.h"

namespace cppool::command {

struct RunArguments {
  DaemonArguments daemon;
  std::string suite;             // a built-in one or a file; empty: one case
  std::string case_name;         // empty: the only one of the libraries of --load, else attention
  std::string junit, html;       // files; empty: none
  std::vector<int> world_sizes;  // none: that of each cell, 2 for a single case
  std::vector<std::string> filters, params;
  double deadline = 90;         // seconds
  std::int64_t max_seqlen = 0;  // 0: lengths are not changed
  RunOptions options;           // without the case, the deadline, `kernels` and the libraries
  protocol::KernelChoice kernels;
  std::string failures;  // a folder; empty: none
  std::string shard;     // "i/n"; empty: all cells
  std::string log;       // a file; empty: none
  double limit = 0;      // seconds for the whole run; 0: none
  std::optional<int>
      retries;  // absent: a cell whose daemon died is asked once more, and is not allowed to be flaky
  std::optional<int> times;  // runs of each cell, or with `until_fail` of all cells; absent: 1, or no end
  bool json = false, list = false, diagnose = false, watch = false;
  bool fail_fast = false, until_fail = false, verbose = false, quiet = false;
  bool leaks_are_errors = false;
};

void AddRunOptions(CLI::App& run, RunArguments* arguments);

// Each throws UsageError for text that cannot be read.
std::vector<suite::Cell> CellsOf(const RunArguments& arguments,
                                 const Streams& streams);  // prints why there are none
PoolOptions ToPoolOptions(const RunArguments& arguments);
RunOptions ToRunOptions(const RunArguments& arguments);  // without its libraries, which are made first

}  // namespace cppool::command
