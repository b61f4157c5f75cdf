// Every kind of fault, on every schedule and world size, through the client library: what the test demands of
// each, and what tests/measure/fault_table prints.
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
  std::string ended;                      // "passed", "failed", "error internal", "PoolError died", ...
  std::string text;                       // of the answer's error, or the PoolError
  std::string wrong;                      // why that, or who takes the next case, is not right; empty: it is
  bool hung = false;                      // the daemon did not answer: the client had to
  bool stayed = false;                    // the same daemon took the next case
  std::string next;                       // of the next case, what it ended in: "passed"
  std::chrono::duration<double> time{};   // to the answer
  std::chrono::duration<double> limit{};  // that it had to be there within: deadline and grace
};

// In the order of the README's table. Unknown to the caller's process, which knows no kernels: a kind that the
// daemon does not have is an error there.
const std::vector<std::string>& FaultKinds();

// Every schedule that the world size has.
std::vector<FaultCell> FaultGrid(const std::vector<std::string>& kinds, const std::vector<int>& world_sizes);

// One daemon per world size, which takes faults; a death is not retried.
PoolOptions FaultPoolOptions(const std::string& backend, const std::string& transport = "auto");

// A small case with the fault on one of the ranks, then the same case without.
FaultOutcome Inject(Pool& pool, const FaultCell& cell);

}  // namespace cppool::test
