// The instances for fp8 of the kernel for dk and dv, in a separate file so that files compile in parallel.
#include "kernels/attention/families/sm80/backward_key.cuh"

namespace cppool::kernels::cuda {

template std::array<Kernel<BackwardParameters>, 2> BackwardKeyKernelsOf<Variant::kFp8>(
    const KernelShape& shape);

}  // namespace cppool::kernels::cuda
