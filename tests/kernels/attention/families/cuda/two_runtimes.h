// A rank of the host runtime beside one of the first GPU, for tests of what must agree.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/backend.h"
#include "kernels/runtime.h"

namespace cppool::kernels::test {

// One rank with a family's kernels, for the length of a test.
class Side {
 public:
  Side(std::unique_ptr<Backend> backend, const AttentionFamily& family)
      : backend_(std::move(backend)),
        rank_(backend_->OpenRank(0)),
        kernels_(std::make_unique<RankKernels>(rank_->seam(), family)) {
    kernels_->ops->Load();
    rank_->BeginCase();
  }
  cppool_runtime* rt() const { return rank_->seam(); }
  cppool_stream stream() const { return rt()->stream; }
  AttentionKernel& kernel() const { return *kernels_->attention; }
  TensorOps& ops() const { return *kernels_->ops; }
  const AttentionFamily& family() const { return kernels_->family; }
  void Wait() const { Check(rt(), rt()->stream_synchronize(rt(), stream())); }

  template <typename T>
  Buffer Upload(const std::vector<T>& values) const {
    Buffer buffer(rt(), values.size() * sizeof(T), stream());
    if (!values.empty()) Check(rt(), rt()->copy(rt(), buffer.get(), values.data(), buffer.bytes(), stream()));
    Wait();
    return buffer;
  }
  template <typename T>
  std::vector<T> Download(const Buffer& buffer) const {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    if (!values.empty()) Check(rt(), rt()->copy(rt(), values.data(), buffer.get(), buffer.bytes(), stream()));
    Wait();
    return values;
  }
  // Bytes 0xFF, which are NaN in all types.
  Buffer Poisoned(std::size_t bytes) const {
    Buffer buffer(rt(), bytes, stream());
    if (bytes > 0) Check(rt(), rt()->fill(rt(), buffer.get(), 0xFF, bytes, stream()));
    return buffer;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<RankRuntime> rank_;
  std::unique_ptr<RankKernels> kernels_;
};

// With the family that runs fp8.
inline Side HostSide() { return {CreateHostBackend(1), *AttentionFamilies("host").front()}; }
inline Side CudaSide() { return {CreateCudaBackend(1), *AttentionFamilies("cuda").back()}; }

}  // namespace cppool::kernels::test
