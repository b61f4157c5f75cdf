// The checks of fp8_bits.h on a GPU: a thread for each piece, and the sums by atomics on integers, which have
// one result in any order.
#include <algorithm>
#include <cstdint>

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/attention/checks/fp8_bits.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;

// *sum is 0 before.
template <typename Check>
__global__ void __launch_bounds__(kThreads) BitsKernel(Check check, BitsTally* sum) {
  BitsTally tally;
  const std::int64_t items = check.items();
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items;
       i += std::int64_t{gridDim.x} * kThreads)
    check.Check(i, tally);
  for (int distance = 16; distance > 0; distance /= 2) {
    BitsTally other;
    other.wrong = __shfl_down_sync(~0u, tally.wrong, distance);
    other.count = __shfl_down_sync(~0u, tally.count, distance);
    other.largest = __shfl_down_sync(~0u, tally.largest, distance);
    tally.Add(other);
  }
  if (threadIdx.x % 32 != 0) return;
  const auto word = [](std::uint64_t& value) { return reinterpret_cast<unsigned long long*>(&value); };
  atomicAdd(word(sum->count), tally.count);
  if (tally.wrong) atomicAdd(word(sum->wrong), tally.wrong);
  // The bits of positive doubles increase with them.
  if (tally.largest > 0)
    atomicMax(reinterpret_cast<unsigned long long*>(&sum->largest),
              static_cast<unsigned long long>(__double_as_longlong(tally.largest)));
}

}  // namespace

void CudaCheckKernels::CheckBits(const BitsCheck& check, BitsTally* result, cppool_stream stream) {
  const Buffer memory(rt_, sizeof(BitsTally), stream);
  auto* const sum = memory.get<BitsTally>();
  CheckCuda(cudaMemsetAsync(sum, 0, sizeof *sum, Cuda(stream)), "clearing the tally of bits");
  std::visit(
      [&]<typename What>(const What& what) {
        const std::int64_t blocks =
            std::min<std::int64_t>((what.items() + kThreads - 1) / kThreads, kMaxBlocks);
        if (blocks == 0) return;
        LaunchKernel(BitsKernel<What>, static_cast<unsigned>(blocks), kThreads, 0, Cuda(stream),
                     "launching the check of bits", what, sum);
      },
      check.what);
  CheckCuda(cudaMemcpyAsync(result, sum, sizeof *sum, cudaMemcpyDeviceToHost, Cuda(stream)),
            "copying the tally of bits");
}

void CudaCheckKernels::LoadBits() {
  LoadKernels("loading the checks of bits", BitsKernel<fp8_bits::ScaledOperand>,
              BitsKernel<fp8_bits::BlockOperand>, BitsKernel<fp8_bits::Out>, BitsKernel<fp8_bits::Delta>,
              BitsKernel<fp8_bits::Amax>);
}

}  // namespace cppool::kernels::cuda
