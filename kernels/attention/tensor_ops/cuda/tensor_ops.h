// TensorOps on CUDA: memory-bound kernels, the same for every kernel family.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/tensor_ops.h"

namespace cppool::kernels::cuda {

// For one rank, on its thread, with its device current. `runtime` is that rank's of the CUDA backend and outlives the result.
std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime);

}  // namespace cppool::kernels::cuda
