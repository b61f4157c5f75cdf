#include "runtime/cuda_check.h"

#include <string>

namespace cppool::kernels::cuda {

void CheckCuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw RuntimeError(
      result == cudaErrorMemoryAllocation ? CPPOOL_OUT_OF_MEMORY : CPPOOL_CUDA,
      std::string(what) + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) + ")");
}

void CheckNccl(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  std::string detail = std::string(what) + ": " + ncclGetErrorString(result);
  const char* last = ncclGetLastError(nullptr);
  if (last && *last) detail += std::string(" (") + last + ")";
  throw RuntimeError(CPPOOL_NCCL, detail);
}

}  // namespace cppool::kernels::cuda
