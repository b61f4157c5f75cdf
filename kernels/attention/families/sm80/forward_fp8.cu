// The instances for fp8 of the forward kernel, in a separate file so that files compile in parallel.
#include "kernels/attention/families/sm80/forward.cuh"

namespace cppool::kernels::cuda {

template Kernel<ForwardParameters> ForwardKernelOf<Variant::kFp8>(const KernelShape& shape);

}  // namespace cppool::kernels::cuda
