// Fp8Ops on CUDA: memory-bound kernels with the casts of kernels/numerics/fp8.h.
#pragma once

#include <memory>

#include "kernels/attention/fp8_ops.h"

namespace cppool::kernels::cuda {

// As MakeTensorOps of tensor_ops.h.
std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime);

// Loads all their kernels on the current device, so that no call waits for it.
void LoadFp8Ops();

}  // namespace cppool::kernels::cuda
