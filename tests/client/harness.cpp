// A small test suite as a separate process: `cppool_harness DAEMON ROUNDS DEVICES WORLD_SIZE...` runs a case
// ROUNDS times at each world size on a list of devices ("-": the caller's). It prints its process id and the
// outcomes. Exit code 0: all passed at the first attempt.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include <cppool/pool.h>

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  cppool::PoolOptions options;
  options.daemon = argv[1];
  if (const std::string devices = argv[3]; devices != "-") options.devices = {devices};
  const int rounds = std::atoi(argv[2]);
  int failures = 0;
  std::cout << getpid() << std::endl;
  try {
    cppool::Pools pools(options);
    for (int round = 0; round < rounds; ++round) {
      for (int i = 4; i < argc; ++i) {
        const cppool::Result result = pools.At(std::atoi(argv[i]))
                                          .Run({{"max_seqlen_q", 64},
                                                {"max_seqlen_kv", 64},
                                                {"batch_size", 1},
                                                {"num_heads", 2},
                                                {"num_gqa_groups", 2},
                                                {"seed", 100 * round + i}});
        if (round == 0) std::cout << "world size " << argv[i] << ": " << result.status << std::endl;
        if (result.ok() && result.attempts == 1) continue;
        ++failures;
        std::cout << "world size " << argv[i] << ", attempt " << result.attempts << ": " << result.error
                  << std::endl;
      }
    }
  } catch (const cppool::PoolError& error) {
    std::cout << error.what() << std::endl;
    return 3;
  }
  return failures == 0 ? 0 : 1;
}
