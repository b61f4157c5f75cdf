#include "kernels/runtime/cuda/check.h"

#include <string>

namespace cppool::kernels::cuda {

void CheckCuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw RuntimeError(
      result == cudaErrorMemoryAllocation ? CPPOOL_OUT_OF_MEMORY : CPPOOL_CUDA,
      std::string(what) + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) + ")");
}

}  // namespace cppool::kernels::cuda
