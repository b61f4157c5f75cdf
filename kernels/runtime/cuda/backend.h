// The CUDA implementation of the runtime seam: one process, a thread per rank, and a transport between them.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace cppool::kernels::cuda {

// Makes no context yet. Throws RuntimeError: CPPOOL_CUDA when there are no devices, or for kNccl fewer than
// ranks; CPPOOL_NCCL when NCCL is needed and not found, or its version does not match the build.
std::unique_ptr<Backend> CreateBackend(int world_size, Transport transport);

}  // namespace cppool::kernels::cuda
