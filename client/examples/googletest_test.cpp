// A harness with GoogleTest.
#include <cppool/pool.h>
#include <cppool/suite.h>
#include <gtest/gtest.h>

// Each cell of a suite is a test of its own.
class Attention : public testing::TestWithParam<cppool::Cell> {};

TEST_P(Attention, Holds) {
  const cppool::Result result = cppool::SharedPools().Run(GetParam());
  if (result.status == cppool::Status::kSkipped) GTEST_SKIP() << result.error;
  EXPECT_TRUE(result) << result;  // the checks that do not hold, and the command that repeats it
}

INSTANTIATE_TEST_SUITE_P(Smoke, Attention, testing::ValuesIn(cppool::LoadSuite("smoke", {.max_seqlen = 128})),
                         [](const auto& cell) { return cell.param.id; });
