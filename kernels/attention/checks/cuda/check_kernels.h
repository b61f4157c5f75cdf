// CheckKernels on CUDA.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels::cuda {

// Call it and its methods on the rank's thread, with the rank's device current. Holds no device memory
// between calls. `runtime` must outlive the result.
std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime);

}  // namespace cppool::kernels::cuda
