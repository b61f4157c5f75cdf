// Device memory that an object holds on a rank, declared once: both the estimate and the allocation come from
// the list, so that nothing can be in one and not in the other.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/runtime.h"

namespace cppool::kernels {

class MemoryList {
 public:
  struct Entry {
    const char* name;
    std::size_t bytes;
    Buffer* to;  // NULL: something else allocates it, at most as much
  };

  // Declares memory for *to, which must outlive Allocate. 0 bytes: nothing is declared.
  void Add(const char* name, std::size_t bytes, Buffer& to) {
    if (bytes > 0) entries_.push_back({name, bytes, &to});
  }
  // Memory that is allocated elsewhere, such as the tables of a plan: the most that it can be.
  void AddTables(const char* name, std::size_t bytes) {
    if (bytes > 0) entries_.push_back({name, bytes, nullptr});
  }

  // Allocates every entry with a place, on the main stream. Throws RuntimeError.
  void Allocate(cppool_runtime* rt) const {
    for (const Entry& entry : entries_) {
      if (entry.to) *entry.to = Buffer(rt, entry.bytes, rt->stream);
    }
  }

  const std::vector<Entry>& entries() const { return entries_; }
  double buffer_bytes() const { return Sum(true); }
  double table_bytes() const { return Sum(false); }

 private:
  double Sum(bool buffers) const {
    double sum = 0;
    for (const Entry& entry : entries_) {
      if ((entry.to != nullptr) == buffers) sum += static_cast<double>(entry.bytes);
    }
    return sum;
  }
  std::vector<Entry> entries_;
};

}  // namespace cppool::kernels
