// The instances of the backward kernel for the step of fp8 that finds dS's scale.
#include "kernels/attention/families/sm90/backward_launch.cuh"

namespace cppool::kernels::cuda::sm90 {
namespace {

template <int kDimQk, int kDimV>
using PlainTiling = FindingDs<BackwardTiling<kDimQk, kDimV>>;
template <int kDimQk, int kDimV>
using BiasedTiling = FindingDs<BiasedBackwardTiling<kDimQk, kDimV>>;

}  // namespace

BackwardKernelEntry FindingBackwardKernelOf(int dim_qk, int dim_v, bool bias) {
  return bias ? BackwardEntry<__nv_bfloat16, BiasedTiling>(dim_qk, dim_v)
              : BackwardEntry<__nv_bfloat16, PlainTiling>(dim_qk, dim_v);
}

}  // namespace cppool::kernels::cuda::sm90
