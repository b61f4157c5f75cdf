// Finds out in fresh pools why a case failed: a bug of its own, a pool that earlier cases polluted, or
// chance.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <cppool/pool.h>
#include "client/suite/cell.h"

namespace cppool::command {

struct Verdict {
  enum class Kind {
    kBug,        // it fails in a fresh pool, every time
    kPolluted,   // it passes in a fresh pool, every time, and fails after the culprits
    kFlaky,      // it fails in some trials only
    kUndecided,  // the limits were reached first, or no fresh pool could be started
  };
  Kind kind = Kind::kUndecided;
  // It failed in `failed` of `ran` runs. kPolluted: runs after the culprits alone; else all runs, the
  // original failure included.
  int failed = 1, ran = 1;
  std::vector<suite::Cell> culprits;  // kPolluted: in the order in which they ran
  bool minimal = true;  // no culprit can be left out; false: the limits were reached before this was known
  int pools = 0;        // fresh ones that were used
  std::string reason;   // why it is undecided
};
std::string_view ToString(Verdict::Kind kind);  // "bug", "polluted", "flaky", "undecided"
// `bug`, `polluted by "a", "b"`, `flaky (failed 2 of 7)`, `undecided: ...`; at most five culprits are named.
std::string Describe(const Verdict& verdict);

class Diagnoser {
 public:
  struct Limits {
    int pools = 200;  // for each failure
    // All failures together have this limit, which is checked between trials.
    std::chrono::seconds time{900};
  };
  // `progress` is called before every trial with what it tries.
  Diagnoser(PoolOptions pool_options, RunOptions run_options, Limits limits,
            std::function<void(const std::string&)> progress);

  // `cell` has failed in a pool that had run the cells of `before` in that order and has been stopped, so
  // that its devices are free. Each trial has a fresh pool, which is stopped before this returns. Nothing is
  // dumped. `digests`: RunOptions::digests.
  Verdict Diagnose(const suite::Cell& cell, const std::vector<suite::Cell>& before,
                   std::map<std::string, std::string> digests = {});

 private:
  class Trials;

  Pools pools_;
  RunOptions run_options_;
  const Limits limits_;
  const std::function<void(const std::string&)> progress_;
  std::chrono::steady_clock::duration spent_{0};
};

// ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28(2), 2002):
// reduces the set 0 .. count - 1, which causes the failure, until no member can be left out. `causes` says
// whether a subset does; it is called with ascending proper subsets, never twice with the same. When it
// returns nothing the search stops at the smallest set so far.
struct Minimised {
  std::vector<std::size_t> set;
  bool minimal = true;
};
Minimised Minimise(std::size_t count,
                   const std::function<std::optional<bool>(const std::vector<std::size_t>&)>& causes);

// Returns the shell command that runs cells of one world size one after another in one fresh daemon, by
// writing their requests to its stdin.
std::string SequenceCommand(const std::vector<suite::Cell>& cells, const PoolOptions& pool_options,
                            const RunOptions& run_options);

}  // namespace cppool::command
