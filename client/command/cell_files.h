// The files of a run's cells: --dump, --trace and --failures.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <cppool/pool.h>

#include "client/command/case_output.h"
#include "client/command/run_arguments.h"
#include "client/command/runner.h"
#include "client/suite/cell.h"

namespace cppool::command {

class CellFiles {
 public:
  // `arguments` outlive this. Makes the folders. Throws UsageError where a file or a folder cannot be made.
  CellFiles(const RunArguments& arguments, const std::vector<suite::Cell>& cells);

  // Returns whether --dump and --trace name folders with an entry for each cell: with a suite or several
  // cells.
  bool for_each() const { return for_each_; }
  // Changes `dump` and `trace` to those of the cell.
  void Choose(const suite::Cell& cell, RunOptions* options);

  // Returns whether --failures wants the cell once more.
  bool Wants(const Outcome& outcome) const;
  // Runs a failed cell once more in the same pool, with a folder of its own for dump, trace and log, and
  // returns what came of it.
  Again RunAgain(const suite::Cell& cell, RunOptions options, CellRunner& runner, CaseOutput& output);

 private:
  std::string EntryOf(const suite::Cell& cell);

  const RunArguments& arguments_;
  const bool for_each_;
  std::map<std::string, std::string> entries_;  // by the cell's name, of those that were asked for
  int kept_ = 0;
  std::uintmax_t bytes_ = 0;  // in the folders of --failures
};

// Returns a name for files that a shell takes as it is: "flash-cp_1_0-bf16-bshd-p2p-W2" of "flash:cp_1_0 bf16
// bshd p2p W=2".
std::string FileNameOf(const std::string& cell);

}  // namespace cppool::command
