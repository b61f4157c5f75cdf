// The CUDA implementation of the runtime seam: a thread per rank, and a transport between them.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace cppool::kernels::cuda {

// Makes no context yet. `link`: of a place that is a part of its world. Throws RuntimeError: CPPOOL_CUDA when
// there are no devices, or for kNccl fewer than ranks; CPPOOL_NCCL when NCCL is needed and not found, or its
// version does not match the build.
std::unique_ptr<Backend> CreateBackend(const Place& place, Transport transport, WorldLink link);

}  // namespace cppool::kernels::cuda
