// One case on two ranks and on four: a program that needs no test framework.
#include <cppool/pool.h>
#include <iostream>

int main() {
  cppool::Pools pools;  // one daemon per world size, started by the first call that needs it
  try {
    for (int world_size : {2, 4}) {
      cppool::Result result = pools.At(world_size).Run({{"cp_comm_type", "p2p"}, {"num_gqa_groups", 2}});
      std::cout << world_size << " ranks: " << result.status << "\n";
      if (!result) {
        std::cout << result << "\n";  // what does not hold, and the command that repeats it
        return 1;
      }
    }
  } catch (const cppool::PoolError& error) {  // no answer: the daemon did not start, died or hung;
    std::cerr << error.what() << "\n";  // the text ends with its stderr, and the next Run starts another
    return 2;
  }
}
