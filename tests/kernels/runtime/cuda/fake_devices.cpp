// Fake versions of the CUDA functions that the transport `peer` calls. They work synchronously on host
// memory.
#include "tests/kernels/runtime/cuda/fake_devices.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/error.h"
#include "kernels/runtime/cuda/reduce.h"
#include "kernels/runtime/cuda/stream_write.h"
#include "kernels/runtime/host/reduce.h"

namespace cppool::kernels {
namespace {

struct Range {
  const std::byte* begin;
  std::size_t bytes;
  int device;
};
std::vector<Range> ranges;
thread_local int current = 0;

}  // namespace

namespace test {

void Place(const void* memory, std::size_t bytes, int device) {
  ranges.push_back({static_cast<const std::byte*>(memory), bytes, device});
}

void Forget() { ranges.clear(); }

void UseDevice(int device) { current = device; }

}  // namespace test

namespace cuda {

void LoadReduce() {}

void LoadWriteWord() {}
void WriteWord(cudaStream_t, std::uint32_t* word, std::uint32_t value) { *word = value; }

void LaunchReduce(cppool_dtype dtype, cppool_reduce reduce, const std::vector<const void*>& in,
                  std::size_t count, void* out, cudaStream_t) {
  for (const void* data : in) {
    for (const Range& range : ranges) {
      if (data >= range.begin && data < range.begin + range.bytes && range.device != current)
        throw RuntimeError(CPPOOL_INTERNAL, "a kernel reads another device's memory");
    }
  }
  host::Reduce(dtype, reduce, in, count, out);
}

}  // namespace cuda
}  // namespace cppool::kernels

extern "C" {

cudaError_t cudaDeviceCanAccessPeer(int* reaches, int, int) {
  *reaches = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made up"; }
const char* cudaGetErrorName(cudaError_t) { return "made up"; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t pitch,
                              std::size_t width, std::size_t rows, cudaMemcpyKind, cudaStream_t) {
  for (std::size_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                static_cast<const std::byte*>(from) + row * pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  *out = std::malloc(bytes);
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMemset(void* to, int byte, std::size_t bytes) {
  std::memset(to, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, std::size_t bytes, unsigned) { return cudaMalloc(out, bytes); }
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** out, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
  *out = std::malloc(bytes);
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  std::free(pointer);
  return cudaSuccess;
}

}  // extern "C"
