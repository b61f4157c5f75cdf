// A harness with Catch2 2. With version 3 include <catch2/catch_all.hpp> alone, and link
// Catch2::Catch2WithMain.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <cppool/pool.h>

cppool::Pools& ThePools() {
  static cppool::Pools pools;  // its daemons live as long as the process
  return pools;
}

TEST_CASE("ring attention with grouped heads") {
  for (int world_size : {2, 4}) {
    cppool::Result result = ThePools().At(world_size).Run({{"cp_comm_type", "p2p"}, {"num_gqa_groups", 2}});
    for (const cppool::Check& check : result.checks) {
      INFO(check.tensor << " of rank " << check.rank << " against " << check.against << ": "
                        << check.max_abs_err);
      CHECK(check.ok);
    }
    INFO(result.error);
    CHECK(result.ok());
  }
}
