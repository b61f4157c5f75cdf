// The CUDA implementation of the runtime seam, on NCCL: one process, a thread and a device per rank.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace cppool::kernels::cuda {

// Rank r uses device ordinal r of those that this process sees. Makes no context yet. Throws RuntimeError:
// CPPOOL_CUDA when there are fewer devices than ranks, CPPOOL_NCCL when the NCCL found at run time does not
// fit the one of the build.
std::unique_ptr<Backend> CreateBackend(int world_size);

}  // namespace cppool::kernels::cuda
