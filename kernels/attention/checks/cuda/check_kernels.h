// CheckKernels on CUDA.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels::cuda {

// For the rank's thread, with its device current. Holds no device memory between calls. `runtime` must
// outlive it.
std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime);

}  // namespace cppool::kernels::cuda
