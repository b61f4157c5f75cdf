// Runs cells, each in the pool of its world size. A daemon that could not start is not started again.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cppool/pool.h>

#include "client/command/case_output.h"
#include "client/command/cell.h"
#include "client/command/diagnose.h"

namespace cppool::command {

// An answer, or why there is none.
struct Outcome {
  using Kind = Status;
  Kind kind = Kind::kError;
  std::optional<Result> result;
  std::string error;  // one line or more; empty when passed
  // After an answered failure. Without an answer, `error` ends with it.
  std::string stderr_tail;
  std::vector<std::string>
      output;  // of a failure, and with `all_output` of every cell: lines that came meanwhile
  double seconds = 0;
  bool asked = true;               // false: there was no daemon
  int attempts = 1;                // daemons that were used; all but the last died or broke the protocol
  std::optional<Verdict> verdict;  // of a failure that was diagnosed

  bool failed() const { return kind == Kind::kFailed || kind == Kind::kError; }
};

class CellRunner {
 public:
  struct Rules {
    bool skip_large_worlds =
        false;                 // a cell with more ranks than the machine can run is skipped; else an error
    bool keep_worlds = false;  // daemons of several world sizes are up at a time; else one
    bool all_output = false;   // not that of failures alone
  };
  // `output` may be null, else it outlives this.
  CellRunner(PoolOptions pool_options, Rules rules, CaseOutput* output = nullptr)
      : pools_(WithOutput(std::move(pool_options), output)), rules_(rules), output_(output) {}

  // The case's name is the cell's.
  Outcome Run(const Cell& cell, const RunOptions& options);
  // kPassed: it would run.
  Outcome Validate(const Cell& cell, const RunOptions& options) {
    return Ask(cell, options, &Pool::Validate);
  }

  // Ends the daemon of the cell that was run last, and returns what that daemon had run before it, in order. The next
  // cell is run by another.
  std::vector<Cell> Retire();

  const std::map<int, Json>& worlds() const { return worlds_; }  // the answers to `hello`, by world size

 private:
  using Question = Result (Pool::*)(const Json&, const RunOptions&);
  Outcome Ask(const Cell& cell, RunOptions options, Question question);
  static PoolOptions WithOutput(PoolOptions options, CaseOutput* output);
  Outcome NotStarted(const Cell& cell, const PoolError& error);
  void Stop(int world_size);

  Pools pools_;
  const Rules rules_;
  CaseOutput* const output_;
  int world_size_ = 0;                          // of the latest cell; 0: none
  std::map<int, std::vector<Cell>> histories_;  // by world size: what its daemon has run
  std::vector<Cell> before_;                    // what a daemon had run before the latest cell
  std::map<int, Outcome> not_started_;          // by world size: the outcome of its further cells
  std::map<int, Json> worlds_;
};

}  // namespace cppool::command
