// Runs every kind of fault, on every schedule and world size, through the client library. Tests check the
// outcomes, and tests/measure/fault_table prints them.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <cppool/pool.h>

namespace cppool::test {

struct FaultCell {
  std::string kind;
  std::string schedule;  // cp_comm_type
  int world_size = 2;
};

struct FaultOutcome {
  std::string ended;    // "passed", "failed", "error internal", "PoolError died", ...
  std::string text;     // the answer's error, or the PoolError's text
  std::string wrong;    // what is wrong with the outcome, or with the daemon of the next case; empty: nothing
  bool hung = false;    // the daemon did not answer, and the client killed it
  bool stayed = false;  // the same daemon ran the next case
  std::string next;     // the outcome of the next case, "passed" if it is right
  std::chrono::duration<double> time{};   // to the answer
  std::chrono::duration<double> limit{};  // for `time`: the deadline and the grace period
};

// In the order of the table in daemon/failures.md. The list is separate from the daemon's, since tests do
// not link it; a kind that the daemon does not have is refused by it.
const std::vector<std::string>& FaultKinds();

// Each kind with every schedule that is possible at each world size.
std::vector<FaultCell> FaultGrid(const std::vector<std::string>& kinds, const std::vector<int>& world_sizes);

// Options for daemons that accept faults; a death is not retried.
PoolOptions FaultPoolOptions(const std::string& backend, const std::string& transport = "auto");

// Runs a small case with the fault on one rank, then the same case without the fault.
FaultOutcome Inject(Pool& pool, const FaultCell& cell);

}  // namespace cppool::test
