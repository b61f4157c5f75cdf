// One rank on CUDA: its device, memory, streams and events, and the table of the seam over them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime.h"
#include "kernels/runtime/common/backlog.h"
#include "kernels/runtime/common/last_error.h"
#include "kernels/runtime/common/mark_delays.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/comm_world.h"
#include "kernels/runtime/cuda/device_trace.h"
#include "kernels/runtime/cuda/page_locked_heap.h"
#include "kernels/runtime/cuda/stage_marks.h"
#include "kernels/runtime/cuda/stage_ranges.h"

namespace cppool::kernels::cuda {

// Created, used and destroyed on the rank's thread, except what is marked "any thread". All of it throws
// RuntimeError.
class CudaRank : public RankRuntime {
 public:
  // Makes the device's context current on this thread, and the pool, the main stream and the caches. Joins no
  // communicator.
  CudaRank(std::shared_ptr<CommWorld> world, int rank);
  ~CudaRank() override;
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  cppool_runtime* seam() override { return &table_; }
  std::optional<std::string> FailedInStage() const override;
  void BeginCase() override;
  void Perturb(std::uint64_t seed) override { delays_ = MarkDelays(seed, rank_); }
  void BeginTrace(std::size_t limit) override;
  RankTrace TakeTrace() override;
  void Break(DeviceFault fault, void* byte, cppool_stream stream) override;
  void BeginIteration(int index) override;
  void KeepUp() override;
  void EndIterations() override;
  bool InGroup() const override { return world_->InGroup(rank_); }
  std::vector<GroupShape> Groups() const override { return world_->shapes(rank_); }
  const Place& place() const override { return world_->place(); }
  kernels::Group CopyGroup(GroupShape shape) override;
  std::optional<std::string> WhyNoRing() const override;
  Arrivals StartRing(RingTransfers transfers, cppool_comm comm, cppool_stream stream) override;
  StageSamples Samples() override;
  void Cancel(const std::string& why) override;
  StageTimes EndCase() override;
  void Trim() override;
  MemoryInfo Memory() const override;  // any thread
  LiveMemory Live() const override;
  bool HasRoom(double bytes) const override;
  std::vector<StreamProgress> Progress() const override;  // any thread

  // The state of the work on its streams: cudaSuccess when it is done, cudaErrorNotReady, or the error. Any
  // thread, while the rank's own thread is in no call.
  cudaError_t State() const;

  DeviceInfo Device() const;
  CommWorld& world() { return *world_; }
  int rank() const { return rank_; }
  int device() const { return device_; }
  cudaStream_t main_stream() const { return streams_.front().stream; }

  // The seam, with exceptions: FillSeam turns them into statuses.
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;
  void* Allocate(std::size_t bytes, cudaStream_t stream);
  void Free(void* pointer, cudaStream_t stream);
  void* AllocateHost(std::size_t bytes);
  void FreeHost(void* pointer);
  void Copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream);
  void Fill(void* to, int byte, std::size_t bytes, cudaStream_t stream);
  cudaStream_t CreateStream();
  void DestroyStream(cudaStream_t stream);
  // Waits for the stream's work. Left only by its end, a failure or the world's abort: the daemon's watchdog
  // keeps the deadline.
  void Synchronize(cudaStream_t stream);
  cudaEvent_t CreateEvent();
  void DestroyEvent(cudaEvent_t event);
  void Record(cudaEvent_t event, cudaStream_t stream);
  void WaitFor(cudaStream_t stream, cudaEvent_t event);
  void Enqueue(cudaStream_t stream, void (*function)(void*), void* argument);
  // The rank's communicator of a shape. NULL: it has not been made.
  cppool_comm Group(GroupShape shape, int* rank, int* size);
  // A new one is made together with all other ranks, and used once.
  cppool_comm GroupOf(GroupShape shape, int* rank, int* size);
  void GroupStart();
  void GroupEnd();
  void Send(const void* data, std::size_t bytes, int peer, cppool_comm comm, cudaStream_t stream);
  void Recv(void* data, std::size_t bytes, int peer, cppool_comm comm, cudaStream_t stream);
  void Collect(const CollectiveCall& call, cppool_comm comm, cudaStream_t stream);
  void MarkStage(cudaStream_t stream, const char* stage);

  LastError& last_error() { return last_error_; }

 private:
  struct OwnedStream {
    cudaStream_t stream = nullptr;
    bool handed_out = false;
    bool used = false;  // in this case
  };
  struct HostFailure {
    std::mutex mutex;
    std::string text;
  };
  struct HostCall;
  static void RunHostCall(void* call) noexcept;
  TraceRecorder* Recorder() { return trace_ ? &trace_->recorder() : nullptr; }
  // Before and after a call on a communicator: for Progress, and for a trace. `what`: "send to", "recv from".
  void BeginTransfer(cudaStream_t stream, const char* what, std::size_t bytes, int peer, cppool_comm comm);
  void EndCall() {
    if (trace_) trace_->EndCall();
  }
  void TraceCall(cudaStream_t stream, std::string_view what, std::size_t bytes, int ranks, int peer);
  void ThrowHostFailure();
  void WaitFor(cudaStream_t stream);
  void WaitForStreams();  // those that were used in this case
  void AddStream();
  cudaEvent_t TakeEvent();
  void ReleaseLeftovers();

  const std::shared_ptr<CommWorld> world_;
  const int rank_;
  const int device_;
  cppool_runtime table_{};
  LastError last_error_;

  const std::shared_ptr<DevicePool> pool_;
  PageLockedHeap host_heap_;
  StageMarks marks_;
  StageRanges ranges_;
  std::string marked_;  // the last stage
  std::unordered_map<cudaEvent_t, StagePoint> recorded_;
  int iteration_;
  Backlog<cudaEvent_t> backlog_;
  MarkDelays delays_;
  std::unique_ptr<DeviceTrace> trace_;      // NULL: none was asked for
  std::vector<OwnedStream> streams_;        // the main stream first
  std::vector<cudaEvent_t> spare_events_;   // without pending work
  std::deque<cudaEvent_t> retired_events_;  // given back in this case
  std::unordered_set<cudaEvent_t> events_;  // created in this case
  std::unordered_map<void*, std::size_t> allocations_;
  std::unordered_map<void*, std::size_t> host_allocations_;
  std::atomic<std::size_t> live_allocations_{0};
  // When a stream is stuck, host functions may run after the rank is destroyed: they share the ownership.
  std::shared_ptr<HostFailure> host_failure_;  // of this case
};

// warm_up.cpp: uses every communicator of the rank once, with all its peers, so that no connection is made
// during a case.
void WarmUpCommunicators(CudaRank& rank);
// The same for memory, copies, host functions and marks.
void WarmUpDevice(CudaRank& rank);
// Memory for WarmUpGroup, taken before the ranks meet: one that has none fails before the others wait for it.
struct WarmUpBuffers {
  explicit WarmUpBuffers(cppool_runtime* rt);
  Buffer in, out;
};
// Uses one communicator and waits for the work.
void WarmUpGroup(CudaRank& rank, const CommGroup& group, const WarmUpBuffers& buffers);

}  // namespace cppool::kernels::cuda
