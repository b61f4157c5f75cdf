// A harness with GoogleTest.
#include <cppool/pool.h>
#include <gtest/gtest.h>

cppool::Pools& ThePools() {
  static cppool::Pools pools;  // its daemons live as long as the process
  return pools;
}

class RingAttention : public testing::TestWithParam<int> {};  // the parameter is the world size

TEST_P(RingAttention, GroupedHeads) {
  const cppool::Result result =
      ThePools().At(GetParam()).Run({{"cp_comm_type", "p2p"}, {"num_gqa_groups", 2}});
  if (result.status == cppool::Status::kSkipped) GTEST_SKIP() << result.error;
  for (const cppool::Check& check : result.checks)
    EXPECT_TRUE(check.ok) << check.tensor << " of rank " << check.rank << " against " << check.against << ": "
                          << check.max_abs_err;
  EXPECT_TRUE(result.ok()) << result.error;
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, RingAttention, testing::Values(2, 4));
