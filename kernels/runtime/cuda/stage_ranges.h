// The stages of a rank as NVTX ranges, for a profiler that is attached to the process, such as Nsight
// Systems: "rank 1 forward/p2p step 1 of 2", in the domain "cppool". They cover the calls in which the rank's
// thread enqueues a stage; the profiler shows them on the GPU as well. The rank's thread and streams have
// names there too. Without a profiler nothing of it costs anything.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>
#include <vector>

struct nvtxDomainRegistration_st;

namespace cppool::kernels::cuda {

// For the rank's thread, on which it is made.
class StageRanges {
 public:
  explicit StageRanges(int rank);
  ~StageRanges() { LeaveAll(); }
  StageRanges(const StageRanges&) = delete;
  StageRanges& operator=(const StageRanges&) = delete;

  void Name(cudaStream_t stream, const std::string& name);
  // Ends the stream's range, if it has one, and begins that of `stage`; NULL: none.
  void Enter(cudaStream_t stream, const char* stage);
  void LeaveAll();

 private:
  void Push(const std::string& text) const;
  void Pop() const;

  nvtxDomainRegistration_st* const domain_;  // NULL without a profiler
  const std::string rank_;                   // "rank 1"
  // Ranges of a thread are nested: the last one ends first.
  std::vector<std::pair<cudaStream_t, std::string>> open_;
};

}  // namespace cppool::kernels::cuda
