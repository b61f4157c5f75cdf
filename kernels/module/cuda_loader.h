// Opens libcppool_cuda.so: what CreateCudaBackend and the kernel factories share.
#pragma once

#include "kernels/module/cuda_module.h"

namespace cppool::kernels {

// The module, opened by the first call that succeeds and kept until the process ends. Any thread. Throws
// RuntimeError that says what to do.
const CudaModule& OpenCudaModule();

}  // namespace cppool::kernels
