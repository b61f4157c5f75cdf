#include "tests/kernels/attention/checks/compare_case.h"
#include "kernels/attention/checks/host/check_kernels.h"

namespace cppool::kernels::test {
namespace {

TEST_CASE("a comparison finds what a naive one finds") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  for (const CompareCase& c : CompareCases()) {
    for (const bool special : {false, true}) CheckCompare(rank, c, special);
  }
}

TEST_CASE("a comparison of nothing counts nothing") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const CompareStats stats = rank.Compare({});
  CHECK(stats.count == 0);
  CHECK(stats.mismatches == 0);
  CHECK(stats.max_abs_err == 0);
}

}  // namespace
}  // namespace cppool::kernels::test
