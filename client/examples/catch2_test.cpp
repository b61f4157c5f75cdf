// A harness with Catch2 2. With version 3 include <catch2/catch_all.hpp> alone, and link
// Catch2::Catch2WithMain.
#define CATCH_CONFIG_MAIN
#define CATCH_CONFIG_CONSOLE_WIDTH 200  // lines of tables stay whole
#include <catch2/catch.hpp>

#include <cppool/pool.h>
#include <cppool/suite.h>

TEST_CASE("ring attention with grouped heads") {
  const int world_size = GENERATE(2, 4);
  cppool::Pool& pool = cppool::SharedPools().At(world_size);
  // A failure shows the checks that do not hold, and the command that repeats it.
  CHECK(pool.Run({{"cp_comm_type", "p2p"}, {"num_gqa_groups", 2}}));
}

TEST_CASE("a suite") {
  const cppool::Cell cell =
      GENERATE(from_range(cppool::LoadSuite("smoke", {.filters = {"cp_comm_type=a2a"}, .max_seqlen = 128})));
  CAPTURE(cell);
  const cppool::Result result = cppool::SharedPools().Run(cell);
  if (result.status == cppool::Status::kSkipped) return;  // with version 3: SKIP(result.error);
  CHECK(result);
}
