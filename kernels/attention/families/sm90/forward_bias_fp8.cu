// The instances of the forward kernel for fp8 with a bias.
#include "kernels/attention/families/sm90/forward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {
namespace {

template <int kDimQk, int kDimV>
using Fp8Tiling = InFp8<BiasedForwardTiling<kDimQk, kDimV>>;

}  // namespace

ForwardKernelEntry BiasedFp8ForwardKernelOf(int dim_qk, int dim_v) {
  return ForwardEntry<__nv_bfloat16, Fp8Tiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
