// The one throwing check for CUDA. `what` says what was being done: "cudaMemcpyAsync of 64 bytes".
#pragma once

#include <cuda_runtime.h>

#include "kernels/error.h"

namespace cppool::kernels::cuda {

// Throws RuntimeError: CPPOOL_OUT_OF_MEMORY when memory ran out, else CPPOOL_CUDA. Clears the thread's last
// error, so that it is not reported twice; a sticky error stays with the context.
void CheckCuda(cudaError_t result, const char* what);

}  // namespace cppool::kernels::cuda
