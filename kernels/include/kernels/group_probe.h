// A look at a world after a failed case, through the seam alone: is what the ranks exchange still right?
#pragma once

#include <cppool/runtime.h>

#include <cstdint>

namespace cppool::kernels {

// On all ranks' threads at once, between BeginCase and EndCase: a sum and a message to each neighbour, in every group that the world
// has. The numbers depend on the rank and on `round`, a new one each time, so that what an earlier case or look left behind does not
// pass. Throws RuntimeError with what is wrong; host memory that work may still use is left to EndCase.
void ProbeGroups(cppool_runtime* rt, std::uint64_t round);

}  // namespace cppool::kernels
