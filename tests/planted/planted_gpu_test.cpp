// The planted bugs of the schedules with the CUDA kernels, on one GPU that all ranks share.
#include "tests/gpus.h"
#include "tests/planted/catch_bugs.h"

using cppool::kernels::PlantableBug;
using cppool::kernels::PlantableBugs;
using namespace cppool::test;

namespace {

const std::vector<std::string> kOnGpu = {"--backend", "cuda", "--transport", "peer", "--max-seqlen", "128"};

}  // namespace

TEST_CASE("without a bug every cell passes on a GPU") {
  if (HasGpus()) PassesWithoutBug(kOnGpu);
}

TEST_CASE("the suite catches each bug of the schedules on a GPU") {
  if (!HasGpus()) return;
  for (const PlantableBug& bug : PlantableBugs()) {
    if (bug.on_gpus && !IsOfFp8(bug) && !IsOfLastTile(bug)) CatchesBug(bug, kOnGpu);
  }
}

TEST_CASE("both references see the last tile of each output of long sequences on a GPU") {
  if (!HasGpus()) return;
  for (const PlantableBug& bug : PlantableBugs()) {
    for (const int world_size : {1, 2, 3, 4}) {
      for (const int seqlen : {512, 4096, 16384, 65536}) {
        if (IsOfLastTile(bug))
          CatchesLastTiles(bug, world_size, seqlen, seqlen <= 4096, seqlen != 65536,
                           {"--backend", "cuda", "--transport", "peer"});
      }
    }
  }
}

TEST_CASE("the checks of fp8 catch each bug of its schedules on a GPU") {
  if (!HasGpus()) return;
  const std::vector<std::string> on_gpu = {"--backend", "cuda", "--transport", "peer"};
  PassesFp8WithoutBug(on_gpu);
  for (const PlantableBug& bug : PlantableBugs()) {
    if (bug.on_gpus && IsOfFp8(bug)) CatchesFp8Bug(bug, on_gpu);
  }
}
