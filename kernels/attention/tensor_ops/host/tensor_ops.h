// TensorOps and Fp8Ops on the host runtime's streams: each call is one function enqueued on the stream. In
// fp32 except for the gradient of the softmax offset, which is summed in fp64.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/tensor_ops.h"

namespace cppool::kernels::host {

// `runtime` is a rank's runtime of the host backend and must outlive the result and its enqueued work.
std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime);
std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime);

}  // namespace cppool::kernels::host
