// The one symbol of libcppool_cuda.so.
#include "kernels/module/cuda_module.h"

#include <cuda_runtime.h>

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/attention/families/sm80/family.h"
#include "kernels/attention/families/sm90/family.h"
#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"
#include "kernels/build_id.h"
#include "kernels/runtime/cuda/backend.h"

namespace cppool::kernels::cuda {
namespace {

// Asks for the devices' properties without making a context.
bool AllAreHopper() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) return false;
  for (int device = 0; device < devices; ++device) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
        major != 9 || minor != 0) {
      return false;
    }
  }
  return devices > 0;
}

// The preferred ones first. Those that are for one kind of GPU are among them if all GPUs are of that kind.
std::vector<const AttentionFamily*> CudaFamilies() {
  static const bool hopper = AllAreHopper();
  static const std::unique_ptr<const AttentionFamily> sm90 = MakeSm90Family(Sm80Family());
  if (hopper) return {sm90.get(), &Sm80Family()};
  return {&Sm80Family()};
}

template <typename Interface, typename Made>
std::unique_ptr<Interface> Make(cppool_runtime* runtime) {
  return std::make_unique<Made>(runtime);
}

}  // namespace
}  // namespace cppool::kernels::cuda

extern "C" __attribute__((visibility("default"))) const cppool::kernels::CudaModule* cppool_cuda_module() {
  namespace cuda = cppool::kernels::cuda;
  static const cppool::kernels::CudaModule module{
      cppool::kernels::SeamId(),
      cppool::kernels::Commit(),
      &cuda::CreateBackend,
      &cuda::CudaFamilies,
      &cuda::Make<cppool::kernels::TensorOps, cuda::CudaTensorOps>,
      &cuda::Make<cppool::kernels::CheckKernels, cuda::CudaCheckKernels>};
  return &module;
}
