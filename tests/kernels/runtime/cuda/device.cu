#include <cuda_runtime.h>

#include "tests/kernels/runtime/cuda/cuda_world.h"

namespace cppool::kernels::test {
namespace {

__global__ void Delay(unsigned long long nanoseconds) {
  unsigned long long start = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

}  // namespace

void LoadDelay() {
  cudaFuncAttributes attributes;
  Expect(cudaFuncGetAttributes(&attributes, Delay) == cudaSuccess, "the delay kernel was loaded");
}

void EnqueueDelay(cppool_stream stream, double milliseconds) {
  Delay<<<1, 1, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      static_cast<unsigned long long>(milliseconds * 1e6));
  Expect(cudaGetLastError() == cudaSuccess, "the delay kernel was launched");
}

bool IsIdle(cppool_stream stream) {
  return cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream)) == cudaSuccess;
}

}  // namespace cppool::kernels::test
