// The CUDA implementation of the runtime seam: one process, a thread per rank, and a transport between them.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace cppool::kernels::cuda {

// Makes no context yet. Throws RuntimeError: CPPOOL_CUDA when there are no devices, or for kNccl fewer than
// ranks; CPPOOL_NCCL when NCCL is wanted and not found, or does not fit the one of the build.
std::unique_ptr<Backend> CreateBackend(int world_size, Transport transport);

}  // namespace cppool::kernels::cuda
