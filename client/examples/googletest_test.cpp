// A harness with GoogleTest.
#include <cppool/pool.h>
#include <gtest/gtest.h>

#include <cstdlib>

cppool::Pools& ThePools() {
  static cppool::Pools pools = [] {
    cppool::PoolOptions options;
    // The daemons of `cppool serve`, which stay; without them, its own live as long as the process.
    if (const char* server = std::getenv("CPPOOL_ATTACH")) options.attach = server;
    return cppool::Pools(options);
  }();
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
