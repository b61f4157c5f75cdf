#include "kernels/attention/checks/host/check_kernels.h"
#include "tests/kernels/attention/checks/compare_case.h"

namespace cppool::kernels::test {
namespace {

TEST_CASE("a comparison agrees with a naive loop") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  for (const CompareCase& c : CompareCases()) {
    for (const bool special : {false, true}) CheckCompare(rank, c, special);
  }
}

TEST_CASE("a comparison of no elements has count 0 and no errors") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const CompareStats stats = rank.Compare({});
  CHECK(stats.count == 0);
  CHECK(stats.mismatches == 0);
  CHECK(stats.max_abs_err == 0);
}

}  // namespace
}  // namespace cppool::kernels::test
