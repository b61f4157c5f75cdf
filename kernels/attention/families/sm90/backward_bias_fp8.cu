// The instances of the backward kernel for fp8 with a bias.
#include "kernels/attention/families/sm90/backward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {
namespace {

template <int kDimQk, int kDimV>
using Fp8Tiling = InFp8<BiasedBackwardTiling<kDimQk, kDimV>>;

}  // namespace

BackwardKernelEntry BiasedFp8BackwardKernelOf(int dim_qk, int dim_v) {
  return BackwardEntry<__nv_bfloat16, Fp8Tiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
