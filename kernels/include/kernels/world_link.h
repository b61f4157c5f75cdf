// What the processes of a world on CUDA tell each other by way of the one that has started them. Tensors go
// through NCCL; the host backend has a link of its own for both (host_link.h).
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/group_shape.h"
#include "kernels/host_link.h"

namespace cppool::kernels {

// A rank has asked for a communicator of `shape` in that round of GroupMeeting, or, in round 0, has finished
// its case.
struct RankNews {
  int rank = 0;
  std::uint32_t round = 0;
  GroupShape shape;
};

struct WorldLink {
  Exchange exchange;                          // once, at the start
  std::function<void(const RankNews&)> tell;  // all other processes, in order; any thread
};

}  // namespace cppool::kernels
