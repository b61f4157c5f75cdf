// The one symbol of libcppool_cuda.so.
#include "kernels/cuda_module.h"

#include "attention/attention_kernels.h"
#include "check/check_kernels.h"
#include "runtime/cuda_backend.h"

extern "C" __attribute__((visibility("default"))) const cppool::kernels::CudaModule* cppool_cuda_module() {
  namespace cuda = cppool::kernels::cuda;
  static const cppool::kernels::CudaModule module{CPPOOL_VERSION, &cuda::CreateBackend, &cuda::MakeAttentionKernels,
                                                  &cuda::MakeCheckKernels};
  return &module;
}
