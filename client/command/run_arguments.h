// The options of `cppool run`, and what they come to: cells, and how the pools are asked about them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/command/cell.h"
#include "client/command/command.h"

namespace cppool::command {

struct RunArguments {
  DaemonArguments daemon;
  std::string suite;  // empty: one case
  std::string case_name = "attention";
  std::string junit;   // a file; empty: none
  int world_size = 0;  // 0: the cells' own, or 2
  std::vector<std::string> filters, params;
  double deadline = 90;         // seconds
  std::int64_t max_seqlen = 0;  // 0: as they are
  std::optional<std::int64_t> perturb;
  std::string dump, inputs, fault;
  bool json = false, list = false, diagnose = false;
};

void AddRunOptions(CLI::App& run, RunArguments* arguments);

// What the arguments come to. Each throws UsageError for text that cannot be read.
std::vector<Cell> CellsOf(const RunArguments& arguments, const Streams& streams);  // says why there are none
PoolOptions ToPoolOptions(const RunArguments& arguments);
RunOptions ToRunOptions(const RunArguments& arguments);

// The options that a repeating command needs beside the cell's own, as words.
std::vector<std::string> CommonWords(const RunArguments& arguments);

}  // namespace cppool::command
