// The faults of fault_test.cpp on GPUs, with both transports, in worlds for which there are enough GPUs.
#include "tests/catch.h"
#include "tests/end_to_end/fault_grid.h"
#include "tests/gpus.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kSlack = 10s;  // for the exit of a process with devices, and for a busy machine

void CheckGrid(int world_size, const std::string& transport) {
  if (!HasGpus(world_size)) return;
  Pools pools(FaultPoolOptions("cuda", transport));
  for (const FaultCell& cell : FaultGrid(FaultKinds(), {world_size})) {
    const FaultOutcome outcome = Inject(pools.At(world_size), cell);
    INFO(cell.kind << ", " << cell.schedule << ": " << outcome.ended << " after " << outcome.time.count()
                   << " s: " << outcome.text);
    CHECK(outcome.wrong == "");
    CHECK_FALSE(outcome.hung);
    CHECK(outcome.time < outcome.limit + kSlack);
    CHECK(outcome.next == "passed");
  }
}

}  // namespace

TEST_CASE("faults on 2 GPUs through NCCL") { CheckGrid(2, "nccl"); }
TEST_CASE("faults on 2 GPUs through peer copies") { CheckGrid(2, "peer"); }
TEST_CASE("faults on 4 GPUs through NCCL") { CheckGrid(4, "nccl"); }
TEST_CASE("faults on 4 GPUs through peer copies") { CheckGrid(4, "peer"); }

}  // namespace cppool::test
