// Owns host memory that work on a stream reads or writes.
#pragma once

#include <cppool/runtime.h>

#include <algorithm>
#include <cstddef>
#include <exception>

#include "kernels/runtime.h"

namespace cppool::kernels {

// Like a Buffer it is not freed during the unwinding of an exception, because that
// work may still be pending; the runtime frees it at the end of the case.
template <typename T>
class HostArray {
 public:
  HostArray(cppool_runtime* runtime, std::size_t count) : rt_(runtime), count_(count) {
    void* memory = nullptr;
    Check(rt_, rt_->alloc_host(rt_, count * sizeof(T), &memory));
    values_ = static_cast<T*>(memory);
  }
  ~HostArray() {
    if (std::uncaught_exceptions() == 0) rt_->free_host(rt_, values_);
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;
  T* begin() const { return values_; }
  T* end() const { return values_ + count_; }

 private:
  cppool_runtime* rt_;
  std::size_t count_;
  T* values_ = nullptr;
};

// Results that checks write in stream order.
template <typename T>
class Results {
 public:
  Results(cppool_runtime* runtime, std::size_t count, const T& before) : values_(runtime, count) {
    std::fill(values_.begin(), values_.end(), before);
  }
  T* Next() { return values_.begin() + used_++; }

 private:
  HostArray<T> values_;
  std::size_t used_ = 0;
};

}  // namespace cppool::kernels
