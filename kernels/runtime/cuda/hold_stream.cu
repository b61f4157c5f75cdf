#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/hold_stream.h"

namespace cppool::kernels::cuda {
namespace {

__device__ unsigned long long NowNs() {
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void HoldUp(unsigned long long nanoseconds) {
  const unsigned long long start = NowNs();
  while (NowNs() - start < nanoseconds) __nanosleep(500);
}

}  // namespace

void HoldStream(cudaStream_t stream, std::chrono::nanoseconds time) {
  HoldUp<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(time.count()));
  CheckCuda(cudaGetLastError(), "delaying a stream");
}

}  // namespace cppool::kernels::cuda
