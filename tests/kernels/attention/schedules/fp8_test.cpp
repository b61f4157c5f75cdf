// The recipes of fp8 with every schedule.
#include <cstdio>

#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace cppool::test {
namespace {

using namespace kernels;

}  // namespace

TEST_CASE("probe") {
  HostWorld world(2);
  for (const ScalingMode mode : {ScalingMode::kDelayed, ScalingMode::kCurrent, ScalingMode::kMxfp8}) {
    for (const CpCommType comm : {CpCommType::kP2p, CpCommType::kAllGather, CpCommType::kA2a}) {
      for (const bool bwd : {false, true}) {
      AttentionSpec spec = Small(2, comm);
      spec.seqlen_q = spec.seqlen_kv = 1024;
      spec.heads = spec.kv_heads = 2;
      spec.batch = 2;
      spec.fp8 = Fp8Recipe{mode, true, false, bwd, mode == ScalingMode::kMxfp8};
      std::printf("mode %d comm %d bwd %d\n", (int)mode, (int)comm, bwd);
      for (const Finding& f : world.Run(spec)) {
        if (f.rank == 0 )
          std::printf("  %s %s max %g rms %g ratio %g tol %g %s mism %d\n", NameOf(f.tensor), f.against.c_str(), f.verdict.max_abs_err,
                      f.verdict.rel_err, f.verdict.ratio, f.verdict.tolerance, f.verdict.ok ? "ok" : "FAIL", (int)f.verdict.mismatches);
      }
      }
    }
  }
}
}  // namespace cppool::test
