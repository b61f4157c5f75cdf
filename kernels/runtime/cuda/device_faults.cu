#include "kernels/runtime/cuda/device_faults.h"

#include "kernels/runtime/cuda/launch.h"

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
  LaunchKernel(HoldUp, 1, 1, 0, stream, "delaying a stream", static_cast<unsigned long long>(time.count()));
}

void BreakDevice(DeviceFault fault, void* memory, cudaStream_t stream) {
  constexpr const char* kWhat = "launching a fault";
  auto* const at = static_cast<unsigned char*>(memory);
  switch (fault) {
    case DeviceFault::kStall:
      LaunchKernel(Stall, 1, 1, 0, stream, kWhat);
      break;
    case DeviceFault::kTrap:
      LaunchKernel(Trap, 1, 1, 0, stream, kWhat);
      break;
    case DeviceFault::kOutOfBounds:
      LaunchKernel(WriteFarAfter, 1, 1, 0, stream, kWhat, at);
      break;
    case DeviceFault::kFlipBit:
      LaunchKernel(FlipBit, 1, 1, 0, stream, kWhat, at);
      break;
  }
}

void LoadDeviceFaults() { LoadKernels("loading a fault", Stall, Trap, WriteFarAfter, FlipBit); }

}  // namespace cppool::kernels::cuda
