// The instances of the kernel for dk and dv.
#include "attention/backward_key.cuh"

#include "attention/kernel.h"

namespace cppool::kernels::cuda {
namespace {

template <int kDimQk, int kDimV, bool kWithDk, bool kWithDv>
Kernel Instance(Dtype dtype) {
  using Config = BackwardKeyTiling<kDimQk, kDimV>;
  constexpr int kShared = BackwardKeySharedBytes<kDimQk, kDimV>();
  static_assert(kShared < kMaxSharedBytes);
  const void* function = nullptr;
  if (dtype == Dtype::kBf16) {
    function =
        reinterpret_cast<const void*>(&BackwardKeyKernel<__nv_bfloat16, kDimQk, kDimV, kWithDk, kWithDv>);
  }
  if (dtype == Dtype::kFp16) {
    function = reinterpret_cast<const void*>(&BackwardKeyKernel<__half, kDimQk, kDimV, kWithDk, kWithDv>);
  }
  return Kernel{function, Config::kThreads, kShared, Config::kTileRows};
}

}  // namespace

std::array<Kernel, 2> BackwardKeyKernelsOf(const KernelShape& shape) {
  using Kernels = std::array<Kernel, 2>;
  return ForHeadDims<Kernels>(shape, [&]<int kDimQk, int kDimV>() {
    if constexpr (kKeyAndValueApart<kDimQk, kDimV>) {
      return Kernels{Instance<kDimQk, kDimV, true, false>(shape.dtype),
                     Instance<kDimQk, kDimV, false, true>(shape.dtype)};
    } else {
      return Kernels{Instance<kDimQk, kDimV, true, true>(shape.dtype), Kernel{}};
    }
  });
}

}  // namespace cppool::kernels::cuda
