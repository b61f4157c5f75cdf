// The instances of the forward kernel.
#include "attention/forward.cuh"

#include "attention/kernel.h"

namespace cppool::kernels::cuda {

Kernel ForwardKernelOf(const KernelShape& shape) {
  return ForHeadDims<Kernel>(shape, [&]<int kDimQk, int kDimV>() {
    using Config = ForwardTiling<kDimQk, kDimV>;
    constexpr int kShared = ForwardSharedBytes<kDimQk, kDimV>();
    static_assert(kShared < kMaxSharedBytes);
    const void* function = nullptr;
    if (shape.dtype == Dtype::kBf16)
      function = reinterpret_cast<const void*>(&ForwardKernel<__nv_bfloat16, kDimQk, kDimV>);
    if (shape.dtype == Dtype::kFp16)
      function = reinterpret_cast<const void*>(&ForwardKernel<__half, kDimQk, kDimV>);
    return Kernel{function, Config::kThreads, kShared, Config::kTileRows};
  });
}

}  // namespace cppool::kernels::cuda
