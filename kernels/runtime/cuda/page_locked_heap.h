// Page-locked host memory in small pieces. cudaHostAlloc takes milliseconds and may wait for the device, so
// slabs are allocated rarely and kept for the life of the heap. For one thread.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

namespace cppool::kernels::cuda {

class PageLockedHeap {
 public:
  // Allocates the first slab. Throws RuntimeError, as Allocate does: CPPOOL_OUT_OF_MEMORY when the system has
  // no more.
  explicit PageLockedHeap(std::size_t first_slab_bytes);
  PageLockedHeap(const PageLockedHeap&) = delete;
  PageLockedHeap& operator=(const PageLockedHeap&) = delete;

  // Returns memory that is at least 256-byte aligned; `bytes` > 0. Allocates another slab only when no piece
  // fits.
  void* Allocate(std::size_t bytes);
  // False: `pointer` is not from this heap.
  bool Free(void* pointer);

 private:
  struct Unlock {
    void operator()(std::byte* slab) const;
  };
  std::byte* AddSlab(std::size_t bytes);

  std::vector<std::unique_ptr<std::byte, Unlock>> slabs_;
  std::map<std::byte*, std::size_t> free_;  // by address; neighbours of one slab are merged
  std::set<std::byte*> slab_starts_;        // pieces of two slabs are never merged
  std::unordered_map<void*, std::size_t> used_;
};

}  // namespace cppool::kernels::cuda
