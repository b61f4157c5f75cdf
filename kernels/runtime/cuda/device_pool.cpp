#include "kernels/runtime/cuda/device_pool.h"

#include <algorithm>
#include <cstdint>

#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

// What a trimmed pool keeps: one of its chunks, less than a context takes. Small cases then need not map
// memory.
constexpr std::size_t kKeptBytes = std::size_t{32} << 20;

std::uint64_t Attribute(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
  std::uint64_t value = 0;
  CheckCuda(cudaMemPoolGetAttribute(pool, attribute, &value), "reading the memory pool's state");
  return value;
}

void SetFlag(cudaMemPool_t pool, cudaMemPoolAttr attribute, int value) {
  CheckCuda(cudaMemPoolSetAttribute(pool, attribute, &value), "setting up the memory pool");
}

}  // namespace

DevicePool::DevicePool(int device) : device_(device) {
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location = {cudaMemLocationTypeDevice, device};
  CheckCuda(cudaMemPoolCreate(&pool_, &props), "making the memory pool");
  std::uint64_t keep_all = UINT64_MAX;
  CheckCuda(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all),
            "setting up the memory pool");
  // Otherwise the pool would order streams that the case does not order.
  SetFlag(pool_, cudaMemPoolReuseAllowInternalDependencies, 0);
}

DevicePool::~DevicePool() { cudaMemPoolDestroy(pool_); }

void DevicePool::Share(const std::vector<int>& devices) {
  std::vector<cudaMemAccessDesc> access;
  for (const int other : devices) {
    int reaches = 0;
    if (other != device_)
      CheckCuda(cudaDeviceCanAccessPeer(&reaches, other, device_), "asking which devices reach each other");
    if (reaches) access.push_back({{cudaMemLocationTypeDevice, other}, cudaMemAccessFlagsProtReadWrite});
  }
  if (!access.empty())
    CheckCuda(cudaMemPoolSetAccess(pool_, access.data(), access.size()), "sharing memory between devices");
}

cudaError_t DevicePool::Allocate(void** out, std::size_t bytes, cudaStream_t stream) {
  cudaError_t result = cudaMallocFromPoolAsync(out, bytes, pool_, stream);
  if (result != cudaErrorMemoryAllocation) return result;
  cudaGetLastError();
  // An order between streams that the case did not ask for is better than no memory. One rank at a time:
  // another one would clear the flag too early.
  const std::lock_guard lock(reuse_mutex_);
  SetFlag(pool_, cudaMemPoolReuseAllowInternalDependencies, 1);
  result = cudaMallocFromPoolAsync(out, bytes, pool_, stream);
  SetFlag(pool_, cudaMemPoolReuseAllowInternalDependencies, 0);
  if (result == cudaErrorMemoryAllocation) cudaGetLastError();
  return result;
}

void DevicePool::Trim() { CheckCuda(cudaMemPoolTrimTo(pool_, kKeptBytes), "returning pooled memory"); }

std::size_t DevicePool::HeldBytes() const { return Attribute(pool_, cudaMemPoolAttrReservedMemCurrent); }

std::size_t DevicePool::UnusedBytes() const {
  const std::size_t held = HeldBytes();
  return held - std::min<std::size_t>(Attribute(pool_, cudaMemPoolAttrUsedMemCurrent), held);
}

}  // namespace cppool::kernels::cuda
