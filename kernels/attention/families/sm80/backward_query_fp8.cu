// The instances for fp8 of the kernel for dq, in a separate file so that files compile in parallel.
#include "kernels/attention/families/sm80/backward_query.cuh"

namespace cppool::kernels::cuda {

template Kernel<BackwardParameters> BackwardQueryKernelOf<Variant::kFp8>(const KernelShape& shape);

}  // namespace cppool::kernels::cuda
