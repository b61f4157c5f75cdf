// The one symbol of libcppool_cuda.so.
#include "kernels/module/cuda_module.h"

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"
#include "kernels/module/build_id.h"
#include "kernels/module/cuda_families.h"
#include "kernels/runtime/cuda/backend.h"

extern "C" __attribute__((visibility("default"))) const cppool::kernels::CudaModule* cppool_cuda_module() {
  namespace cuda = cppool::kernels::cuda;
  static const cppool::kernels::CudaModule module{cppool::kernels::SeamId(), cppool::kernels::Commit(),
                                                  &cuda::CreateBackend,      &cuda::AttentionFamilies,
                                                  &cuda::MakeTensorOps,      &cuda::MakeCheckKernels};
  return &module;
}
