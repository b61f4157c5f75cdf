// The bugs of the schedules, with the CUDA kernels: on one GPU that the ranks share.
#include <cstdio>

#include "kernels/backend.h"
#include "planted_cells.h"

using cppool::kernels::PlantableBug;
using cppool::kernels::PlantableBugs;
using namespace cppool_test;

namespace {

const std::vector<std::string> kOnGpu = {"--backend", "cuda", "--transport", "peer", "--max-seqlen", "128"};

bool HasGpu() {
  if (cppool::kernels::CountCudaDevices() > 0) return true;
  WARN("there are no devices");
  return false;
}

}  // namespace

TEST_CASE("without a bug every cell passes on a GPU") {
  if (!HasGpu()) return;
  const Caught none = RunCells(nullptr, kOnGpu);
  CHECK(none.cells > 36);
  CHECK(none.failed.empty());
  CHECK(none.other.empty());
}

TEST_CASE("the suite catches each bug of the schedules on a GPU") {
  if (!HasGpu()) return;
  for (const PlantableBug& bug : PlantableBugs()) {
    if (!bug.of_schedules) continue;
    int runs = 0;
    const Caught caught = CatchBug(bug, kOnGpu, &runs);
    CAPTURE(bug.name, caught.other);
    CHECK(caught.failed.size() > 0);
    CHECK(caught.other.empty());
    if (!caught.failed.empty()) {
      std::printf("%s: caught by run %d, in %zu of %d cells, such as %s\n", bug.name, runs,
                  caught.failed.size(), caught.cells, caught.failed.front().c_str());
    }
  }
}
