#include "kernels/module/cuda_families.h"

#include <cuda_runtime.h>

#include <memory>

#include "kernels/attention/families/sm80/family.h"
#include "kernels/attention/families/sm90/family.h"

namespace cppool::kernels::cuda {
namespace {

// Makes no context.
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

}  // namespace

std::vector<const AttentionFamily*> AttentionFamilies() {
  static const bool hopper = AllAreHopper();
  static const std::unique_ptr<const AttentionFamily> sm90 = MakeSm90Family(Sm80Family());
  if (hopper) return {sm90.get(), &Sm80Family()};
  return {&Sm80Family()};
}

}  // namespace cppool::kernels::cuda
