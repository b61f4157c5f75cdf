// The number of blocks of a launch.
#pragma once

#include <cstdint>

#include "kernels/error.h"

namespace cppool::kernels::cuda {

// The number of blocks of `block_threads` threads for at least `threads` threads. Throws RuntimeError, CPPOOL_UNSUPPORTED, when it
// exceeds the limit of a grid.
inline unsigned BlocksFor(std::int64_t threads, int block_threads) {
  const std::int64_t blocks = (threads + block_threads - 1) / block_threads;
  if (blocks > 0x7fffffff) throw RuntimeError(CPPOOL_UNSUPPORTED, "a tensor is too large for one kernel");
  return static_cast<unsigned>(blocks);
}

}  // namespace cppool::kernels::cuda
