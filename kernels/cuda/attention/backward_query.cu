// The instances of the kernel for dq.
#include "attention/backward_query.cuh"

#include "attention/kernel.h"

namespace cppool::kernels::cuda {

Kernel BackwardQueryKernelOf(const KernelShape& shape) {
  return ForHeadDims<Kernel>(shape, [&]<int kDimQk, int kDimV>() {
    using Config = BackwardQueryTiling<kDimQk, kDimV>;
    constexpr int kShared = BackwardQuerySharedBytes<kDimQk, kDimV>();
    static_assert(kShared < kMaxSharedBytes);
    const void* function = nullptr;
    if (shape.dtype == Dtype::kBf16) {
      function = reinterpret_cast<const void*>(&BackwardQueryKernel<__nv_bfloat16, kDimQk, kDimV>);
    }
    if (shape.dtype == Dtype::kFp16)
      function = reinterpret_cast<const void*>(&BackwardQueryKernel<__half, kDimQk, kDimV>);
    return Kernel{function, Config::kThreads, kShared, Config::kTileRows};
  });
}

}  // namespace cppool::kernels::cuda
