// Asks the pools about cells: each cell in the pool of its world size, and no daemon that could not start twice.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/command/cell.h"
#include <cppool/pool.h>
#include "client/command/diagnose.h"

namespace cppool::command {

// What became of a cell: an answer, or why there is none.
struct Outcome {
  using Kind = Status;
  Kind kind = Kind::kError;
  std::optional<Result> result;
  std::string error;  // one line or more; empty when passed
  std::string
      stderr_tail;  // of a daemon that answered with a failure; without an answer `error` ends with it
  double seconds = 0;
  bool asked = true;               // false: there was no daemon to ask
  int attempts = 1;                // daemons that were asked; more than one: the others were lost
  std::optional<Verdict> verdict;  // of a failure that was diagnosed

  bool failed() const { return kind == Kind::kFailed || kind == Kind::kError; }
};

class CellRunner {
 public:
  // The case's name is the cell's. A moved cell that the daemon refuses is skipped. `skip_large_worlds`: cells with more ranks than the machine can run are skipped, as in a suite; else errors.
  CellRunner(const PoolOptions& pool_options, RunOptions run_options, bool skip_large_worlds)
      : pools_(pool_options), run_options_(std::move(run_options)), skip_large_worlds_(skip_large_worlds) {}

  Outcome Run(const Cell& cell);
  Outcome Validate(const Cell& cell) { return Ask(cell, &Pool::Validate); }  // kPassed: it would run

  // Ends the daemon of the cell that was run last, and returns what that daemon had run before it, in order. The next
  // cell is run by another.
  std::vector<Cell> Retire();

  const std::map<int, Json>& worlds() const { return worlds_; }  // the answers to `hello`, by world size

 private:
  using Question = Result (Pool::*)(const Json&, const RunOptions&);
  Outcome Ask(const Cell& cell, Question question);
  Outcome NotStarted(const Cell& cell, const PoolError& error);

  Pools pools_;
  RunOptions run_options_;
  bool skip_large_worlds_;
  int world_size_ = 0;                  // whose daemon is up
  std::vector<Cell> history_;           // what it has run
  std::vector<Cell> before_;            // what it had run before the latest cell
  std::map<int, Outcome> not_started_;  // by world size: what becomes of its further cells
  std::map<int, Json> worlds_;
};

}  // namespace cppool::command
