// The instances of the backward kernel for casts in blocks.
#include "kernels/attention/families/sm90/backward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {

BackwardKernelEntry BlocksBackwardKernelOf(int dim_qk, int dim_v, bool bias) {
  return bias ? BackwardEntry<__nv_bfloat16, BiasedBlocksBackwardTiling>(dim_qk, dim_v)
              : BackwardEntry<__nv_bfloat16, BlocksBackwardTiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
