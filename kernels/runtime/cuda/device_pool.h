// The stream-ordered memory of one device: one pool for all ranks on the device, so that memory freed by one
// rank is there for the others.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <mutex>
#include <vector>

namespace cppool::kernels::cuda {

// Any thread. Everything but the destructor throws RuntimeError.
class DevicePool {
 public:
  explicit DevicePool(int device);
  ~DevicePool();
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  // Enables direct copies between this device and those of `devices` that can reach it.
  void Share(const std::vector<int>& devices);

  // cudaErrorMemoryAllocation when there is no room; does not throw then.
  cudaError_t Allocate(void** out, std::size_t bytes, cudaStream_t stream);
  // Returns unused memory to the device. No free may be pending.
  void Trim();
  std::size_t HeldBytes() const;
  std::size_t UnusedBytes() const;  // held, but free for the next allocation

 private:
  const int device_;
  cudaMemPool_t pool_ = nullptr;
  std::mutex reuse_mutex_;
};

}  // namespace cppool::kernels::cuda
