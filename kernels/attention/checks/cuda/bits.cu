// The checks of fp8_bits.h on a GPU: a thread for each piece, and the sums by atomics on integers, which have
// one result in any order.
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/attention/checks/cuda/launch.h"
#include "kernels/attention/checks/fp8_bits.h"
#include "kernels/runtime/cuda/check.h"

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

void LaunchCheckBits(const BitsCheck& check, BitsTally* sum, BitsTally* result, cudaStream_t stream) {
  CheckCuda(cudaMemsetAsync(sum, 0, sizeof *sum, stream), "clearing the tally of bits");
  std::visit(
      [&](const auto& what) {
        const std::int64_t blocks =
            std::min<std::int64_t>((what.items() + kThreads - 1) / kThreads, kMaxBlocks);
        if (blocks == 0) return;
        BitsKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(what, sum);
        CheckCuda(cudaGetLastError(), "launching the check of bits");
      },
      check.what);
  CheckCuda(cudaMemcpyAsync(result, sum, sizeof *sum, cudaMemcpyDeviceToHost, stream),
            "copying the tally of bits");
}

void LoadCheckBits() {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(BitsKernel<fp8_bits::ScaledOperand>),
                             reinterpret_cast<const void*>(BitsKernel<fp8_bits::BlockOperand>),
                             reinterpret_cast<const void*>(BitsKernel<fp8_bits::Out>),
                             reinterpret_cast<const void*>(BitsKernel<fp8_bits::Delta>),
                             reinterpret_cast<const void*>(BitsKernel<fp8_bits::Amax>)}) {
    CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "loading the checks of bits");
  }
}

}  // namespace cppool::kernels::cuda
