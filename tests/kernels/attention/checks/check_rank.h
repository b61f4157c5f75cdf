// One rank of the host or CUDA runtime with its CheckKernels, and copies to and from its memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/backend.h"
#include "kernels/numerics/half.h"
#include "kernels/runtime.h"
#include "tests/kernels/load_element.h"

namespace cppool::kernels::test {

inline bool Near(double a, double b, double relative, double absolute = 0) {
  return std::abs(a - b) <= relative * std::abs(b) + absolute;
}

class CheckRank {
 public:
  using Maker = std::unique_ptr<CheckKernels> (*)(cppool_runtime*);
  CheckRank(std::unique_ptr<Backend> backend, Maker maker)
      : backend_(std::move(backend)), rank_(backend_->OpenRank(0)) {
    rank_->BeginCase();
    kernels_ = maker(rt());
    kernels_->Load();
    Check(rt(), rt()->alloc_host(rt(), sizeof(CompareStats), reinterpret_cast<void**>(&stats_)));
  }
  ~CheckRank() { rt()->free_host(rt(), stats_); }

  cppool_runtime* rt() const { return rank_->seam(); }
  cppool_stream stream() const { return rt()->stream; }
  CheckKernels& kernels() const { return *kernels_; }
  void Synchronize() const { Check(rt(), rt()->stream_synchronize(rt(), stream())); }

  template <typename T>
  Buffer Upload(const std::vector<T>& values) const {
    Buffer buffer(rt(), values.size() * sizeof(T), stream());
    if (!values.empty()) Check(rt(), rt()->copy(rt(), buffer.get(), values.data(), buffer.bytes(), stream()));
    Synchronize();
    return buffer;
  }
  template <typename T>
  std::vector<T> Download(const Buffer& buffer) const {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    if (!values.empty()) Check(rt(), rt()->copy(rt(), values.data(), buffer.get(), buffer.bytes(), stream()));
    Synchronize();
    return values;
  }
  // A buffer of bytes 0xFF, which are NaN in all floating-point types.
  Buffer Poisoned(std::size_t bytes) const {
    Buffer buffer(rt(), bytes, stream());
    if (bytes) Check(rt(), rt()->fill(rt(), buffer.get(), 0xFF, bytes, stream()));
    return buffer;
  }

  CompareStats Compare(const CompareArgs& args) const {
    kernels_->Compare(args, stats_, stream());
    Synchronize();
    return *stats_;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<RankRuntime> rank_;
  std::unique_ptr<CheckKernels> kernels_;
  CompareStats* stats_ = nullptr;
};

// Converts the elements of a buffer of `dtype` to doubles.
inline std::vector<double> Doubles(Dtype dtype, const std::vector<std::uint8_t>& bytes) {
  std::vector<double> values(bytes.size() / SizeOf(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = LoadElement(dtype, bytes.data(), static_cast<std::int64_t>(i));
  return values;
}
inline std::vector<std::uint8_t> Bytes(Dtype dtype, const std::vector<double>& values) {
  std::vector<std::uint8_t> bytes(values.size() * SizeOf(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    StoreElement(dtype, bytes.data(), static_cast<std::int64_t>(i), values[i]);
  return bytes;
}

}  // namespace cppool::kernels::test
