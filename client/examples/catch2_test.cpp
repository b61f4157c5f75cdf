// A harness with Catch2 2. With version 3 include <catch2/catch_all.hpp> alone, and link
// Catch2::Catch2WithMain.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <cppool/pool.h>

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
