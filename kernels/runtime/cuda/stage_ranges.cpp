#include "kernels/runtime/cuda/stage_ranges.h"

#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace cppool::kernels::cuda {
namespace {

nvtxDomainHandle_t Domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("cppool");
  return domain;
}

}  // namespace

StageRanges::StageRanges(int rank) : domain_(Domain()), rank_("rank " + std::to_string(rank)) {
  if (!domain_) return;
  nvtxNameOsThreadA(static_cast<std::uint32_t>(syscall(SYS_gettid)), rank_.c_str());
}

void StageRanges::Name(cudaStream_t stream, const std::string& name) {
  if (domain_) nvtxNameCudaStreamA(stream, (rank_ + " " + name).c_str());
}

void StageRanges::Enter(cudaStream_t stream, const char* stage) {
  if (!domain_) return;
  const auto own =
      std::find_if(open_.begin(), open_.end(), [&](const auto& range) { return range.first == stream; });
  if (own != open_.end()) {
    // Those that began later are interrupted.
    for (auto range = own; range != open_.end(); ++range) Pop();
    for (auto range = open_.erase(own); range != open_.end(); ++range) Push(range->second);
  }
  if (!stage) return;
  open_.emplace_back(stream, rank_ + " " + stage);
  Push(open_.back().second);
}

void StageRanges::LeaveAll() {
  for (; !open_.empty(); open_.pop_back()) Pop();
}

void StageRanges::Push(const std::string& text) const {
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = text.c_str();
  nvtxDomainRangePushEx(domain_, &range);
}

void StageRanges::Pop() const { nvtxDomainRangePop(domain_); }

}  // namespace cppool::kernels::cuda
