#include "kernels/runtime/cuda/page_locked_heap.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kSlabGranularity = std::size_t{2} << 20;

std::size_t RoundUp(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

void PageLockedHeap::Unlock::operator()(std::byte* slab) const { cudaFreeHost(slab); }

PageLockedHeap::PageLockedHeap(std::size_t first_slab_bytes) { AddSlab(first_slab_bytes); }

std::byte* PageLockedHeap::AddSlab(std::size_t bytes) {
  void* slab = nullptr;
  CheckCuda(cudaHostAlloc(&slab, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
            ("taking " + std::to_string(bytes) + " bytes of page-locked host memory").c_str());
  auto* const start = static_cast<std::byte*>(slab);
  slabs_.emplace_back(start);
  slab_starts_.insert(start);
  free_[start] = bytes;
  return start;
}

void* PageLockedHeap::Allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2)
    throw RuntimeError(CPPOOL_OUT_OF_MEMORY, std::to_string(bytes) + " bytes of page-locked host memory");
  bytes = RoundUp(bytes, kAlignment);
  auto piece =
      std::find_if(free_.begin(), free_.end(), [&](const auto& entry) { return entry.second >= bytes; });
  if (piece == free_.end()) piece = free_.find(AddSlab(RoundUp(bytes, kSlabGranularity)));
  const auto [start, size] = *piece;
  free_.erase(piece);
  if (size > bytes) free_[start + bytes] = size - bytes;
  used_[start] = bytes;
  return start;
}

bool PageLockedHeap::Free(void* pointer) {
  const auto used = used_.find(pointer);
  if (used == used_.end()) return false;
  auto* const start = static_cast<std::byte*>(pointer);
  auto piece = free_.emplace(start, used->second).first;
  used_.erase(used);
  const auto next = std::next(piece);
  if (next != free_.end() && piece->first + piece->second == next->first &&
      !slab_starts_.count(next->first)) {
    piece->second += next->second;
    free_.erase(next);
  }
  if (piece != free_.begin() && !slab_starts_.count(piece->first)) {
    const auto previous = std::prev(piece);
    if (previous->first + previous->second == piece->first) {
      previous->second += piece->second;
      free_.erase(piece);
    }
  }
  return true;
}

}  // namespace cppool::kernels::cuda
