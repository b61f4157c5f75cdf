// TensorOps and Fp8Ops on CUDA: memory-bound kernels, the same for every kernel family.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/tensor_ops.h"

namespace cppool::kernels::cuda {

// Call it and its methods on the rank's thread, with the rank's device current. `runtime` is the rank's
// runtime of the CUDA backend and must outlive the result.
std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime);
std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime);

}  // namespace cppool::kernels::cuda
