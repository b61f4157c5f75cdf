// Why a case failed: is it the case, what ran before it in the pool, or chance? Asked of fresh pools.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <cppool/pool.h>
#include "client/command/cell.h"

namespace cppool::command {

struct Verdict {
  enum class Kind {
    kBug,        // it fails in a fresh pool, every time
    kPolluted,   // it passes in a fresh pool, every time, and fails after the culprits
    kFlaky,      // neither: it fails now and then
    kUndecided,  // the limits were reached first, or no fresh pool could be started
  };
  Kind kind = Kind::kUndecided;
  // Of `ran` times it failed `failed`. kPolluted: after the culprits, in pools with nothing else; else all
  // times that count, the failure in question being one of them.
  int failed = 1, ran = 1;
  std::vector<Cell> culprits;  // kPolluted: in the order in which they ran
  bool minimal = true;  // no culprit can be left out; false: the limits were reached before that was sure
  int pools = 0;        // fresh ones that were asked
  std::string reason;   // kUndecided
};
std::string_view ToString(Verdict::Kind kind);  // "bug", "polluted", "flaky", "undecided"
// `bug`, `polluted by "a", "b"`, `flaky (2 of 7)`, `undecided: ...`. Long lists of culprits are cut.
std::string Describe(const Verdict& verdict);

class Diagnoser {
 public:
  struct Limits {
    int pools = 200;  // fresh ones, for each failure
    std::chrono::seconds time{
        900};  // for all failures together; the trial under way is ended by its deadlines
  };
  // `progress` is called with a few words before every trial.
  Diagnoser(PoolOptions pool_options, RunOptions run_options, Limits limits,
            std::function<void(const std::string&)> progress);

  // `cell` has just failed in a pool that had run the cells of `before`, in that order, and that has been stopped:
  // its devices are used. Each trial has a pool of its own, which is ended before this returns. Nothing is dumped.
  Verdict Diagnose(const Cell& cell, const std::vector<Cell>& before);

 private:
  class Trials;

  Pools pools_;
  const RunOptions run_options_;
  const Limits limits_;
  const std::function<void(const std::string&)> progress_;
  std::chrono::steady_clock::duration spent_{0};
};

// ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28(2), 2002): from
// 0 .. count - 1, which spoils, to a set of which no member can be left out. `spoils` is asked about ascending
// sets that are neither empty nor the whole, about none twice; without an answer the smallest set so far is taken.
struct Minimised {
  std::vector<std::size_t> set;
  bool minimal = true;
};
Minimised Minimise(std::size_t count,
                   const std::function<std::optional<bool>(const std::vector<std::size_t>&)>& spoils);

// What runs the cells, of one world size, one after another in one fresh pool: a command line that pipes their
// requests into cppoold.
std::string SequenceCommand(const std::vector<Cell>& cells, const PoolOptions& pool_options,
                            const RunOptions& run_options);

}  // namespace cppool::command
