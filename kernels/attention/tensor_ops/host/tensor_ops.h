// TensorOps on the host runtime's streams, in fp32 except for the gradient of the softmax offset, which is summed in fp64.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/tensor_ops.h"

namespace cppool::kernels::host {

// `runtime` is a rank's runtime of the host backend and must outlive the result.
std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime);

}  // namespace cppool::kernels::host
