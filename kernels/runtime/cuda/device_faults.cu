#include "kernels/runtime/cuda/device_faults.h"

#include "kernels/runtime/cuda/check.h"

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

constexpr long long kFar = 1LL << 40;  // bytes: past all mapped memory

// Ends only when its context is destroyed.
__global__ void Stall() {
  for (;;) asm volatile("nanosleep.u32 1000;");
}

__global__ void Trap() { asm volatile("trap;"); }

__global__ void WriteFarAfter(unsigned char* memory) {
  *reinterpret_cast<volatile unsigned char*>(memory + kFar) = 1;
}

__global__ void FlipBit(unsigned char* byte) { *byte ^= 0x40; }

}  // namespace

void HoldStream(cudaStream_t stream, std::chrono::nanoseconds time) {
  HoldUp<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(time.count()));
  CheckCuda(cudaGetLastError(), "delaying a stream");
}

void BreakDevice(DeviceFault fault, void* memory, cudaStream_t stream) {
  auto* const at = static_cast<unsigned char*>(memory);
  switch (fault) {
    case DeviceFault::kStall:
      Stall<<<1, 1, 0, stream>>>();
      break;
    case DeviceFault::kTrap:
      Trap<<<1, 1, 0, stream>>>();
      break;
    case DeviceFault::kOutOfBounds:
      WriteFarAfter<<<1, 1, 0, stream>>>(at);
      break;
    case DeviceFault::kFlipBit:
      FlipBit<<<1, 1, 0, stream>>>(at);
      break;
  }
  CheckCuda(cudaGetLastError(), "launching a fault");
}

void LoadDeviceFaults() {
  cudaFuncAttributes attributes{};
  for (const void* kernel :
       {reinterpret_cast<const void*>(&Stall), reinterpret_cast<const void*>(&Trap),
        reinterpret_cast<const void*>(&WriteFarAfter), reinterpret_cast<const void*>(&FlipBit)})
    CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "loading a fault");
}

}  // namespace cppool::kernels::cuda
