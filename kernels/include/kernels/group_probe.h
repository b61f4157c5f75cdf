// The soundness probe of a world after a failed case: does communication still give the right results?
#pragma once

#include <cstdint>

#include "kernels/backend.h"

namespace cppool::kernels {

// On all ranks' threads at once, between BeginCase and EndCase: a sum and a message to each neighbour on every
// communicator that the world has. The numbers depend on the rank and on `round`, which is new each time, so that data
// left by an earlier case or probe is not taken for this one's. Throws RuntimeError with what is wrong; host memory
// that work may still use is left to EndCase.
void ProbeGroups(RankRuntime& rank, std::uint64_t round);

}  // namespace cppool::kernels
