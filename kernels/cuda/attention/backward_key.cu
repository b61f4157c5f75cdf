// The instances of the kernels for dk and dv.
#include "attention/backward_key.cuh"

#include "attention/backward_key_paired.cuh"
#include "attention/kernel.h"

namespace cppool::kernels::cuda {

Kernel BackwardKeyKernelOf(const KernelShape& shape) {
  return ForHeadDims<Kernel>(shape, [&]<int kDimQk, int kDimV>() {
    const void* function = nullptr;
    if constexpr (kPaired<kDimQk, kDimV>) {
      using Config = PairedTiling;
      constexpr int kShared = BackwardKeyPairedSharedBytes<kDimQk, kDimV>();
      static_assert(kShared < kMaxSharedBytes);
      if (shape.dtype == Dtype::kBf16) {
        function = reinterpret_cast<const void*>(&BackwardKeyPairedKernel<__nv_bfloat16, kDimQk, kDimV>);
      }
      if (shape.dtype == Dtype::kFp16) {
        function = reinterpret_cast<const void*>(&BackwardKeyPairedKernel<__half, kDimQk, kDimV>);
      }
      return Kernel{function, Config::kThreads, kShared, Config::kTileRows};
    } else {
      using Config = BackwardKeyTiling<kDimQk, kDimV>;
      constexpr int kShared = BackwardKeySharedBytes<kDimQk, kDimV>();
      static_assert(kShared < kMaxSharedBytes);
      if (shape.dtype == Dtype::kBf16) {
        function = reinterpret_cast<const void*>(&BackwardKeyKernel<__nv_bfloat16, kDimQk, kDimV>);
      }
      if (shape.dtype == Dtype::kFp16) {
        function = reinterpret_cast<const void*>(&BackwardKeyKernel<__half, kDimQk, kDimV>);
      }
      return Kernel{function, Config::kThreads, kShared, Config::kTileRows,
                    kKeyAndValueApart<kDimQk, kDimV> ? 2 : 1};
    }
  });
}

}  // namespace cppool::kernels::cuda
