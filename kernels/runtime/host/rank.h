// One rank of the host backend: the seam's functions, and what a case leaves behind.
//
// Threads: everything is for the rank's thread, except Memory(), Progress() and Idle(). The streams' threads
// use the failure, the marks they reach and the memory they release; they take no lock.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime/common/backlog.h"
#include "kernels/runtime/common/last_error.h"
#include "kernels/runtime/common/mark_delays.h"
#include "kernels/runtime/common/stage_tally.h"
#include "kernels/runtime/common/trace_recorder.h"
#include "kernels/runtime/host/comm.h"
#include "kernels/runtime/host/memory.h"
#include "kernels/runtime/host/stream.h"
#include "kernels/runtime/host/world.h"

namespace cppool::kernels::host {

class HostRank : public RankRuntime {
 public:
  HostRank(std::shared_ptr<HostWorld> world, int rank);
  ~HostRank() override;

  cppool_runtime* seam() override { return &seam_; }
  std::optional<std::string> FailedInStage() const override;
  void BeginCase() override;
  void Perturb(std::uint64_t seed) override { delays_ = MarkDelays(seed, rank_); }
  void BeginTrace(std::size_t limit) override;
  RankTrace TakeTrace() override;
  void Break(DeviceFault fault, void* byte, cppool_stream stream) override;
  void BeginIteration(int index) override;
  void KeepUp() override;
  void EndIterations() override;
  bool InGroup() const override { return group_depth_ > 0; }
  std::vector<GroupShape> Groups() const override { return world_->Shapes(); }
  const Place& place() const override { return world_->place(); }
  kernels::Group CopyGroup(GroupShape) override { return {}; }
  std::optional<std::string> WhyNoRing() const override;
  Arrivals StartRing(RingTransfers transfers, cppool_comm comm, cppool_stream stream) override;
  StageSamples Samples() override;
  void Cancel(const std::string& why) override;
  StageTimes EndCase() override;
  void Trim() override;
  MemoryInfo Memory() const override;
  LiveMemory Live() const override;
  bool HasRoom(double bytes) const override { return bytes <= static_cast<double>(Memory().free_bytes); }
  std::vector<StreamProgress> Progress() const override;
  std::set<int> Threads() const override;

  bool Idle() const;  // any thread: no stream has work
  int rank() const { return rank_; }

  LastError& last_error() { return last_error_; }

  // The seam, with exceptions: FillSeam turns them into statuses.
  using Stream = cppool_stream;
  using Event = cppool_event;
  void* Allocate(std::size_t bytes, cppool_stream stream);
  void Free(void* ptr, cppool_stream stream);
  void* AllocateHost(std::size_t bytes);
  void FreeHost(void* ptr);
  void Copy(void* to, const void* from, std::size_t bytes, cppool_stream stream);
  void Fill(void* to, int byte, std::size_t bytes, cppool_stream stream);
  cppool_stream CreateStream();
  void DestroyStream(cppool_stream stream);
  void Synchronize(cppool_stream stream);
  cppool_event CreateEvent();
  void DestroyEvent(cppool_event event);
  void Record(cppool_event event, cppool_stream stream);
  void WaitFor(cppool_stream stream, cppool_event event);
  void Enqueue(cppool_stream stream, std::function<void()> work);
  void Enqueue(cppool_stream stream, void (*function)(void*), void* argument) {
    Enqueue(stream, [=] { function(argument); });
  }
  cppool_comm Group(GroupShape shape, int* rank, int* size) { return GroupOf(shape, rank, size); }
  cppool_comm GroupOf(GroupShape shape, int* rank, int* size);
  void GroupStart() { ++group_depth_; }
  void GroupEnd();
  void Send(const void* data, std::size_t bytes, int peer, cppool_comm comm, cppool_stream stream);
  void Recv(void* data, std::size_t bytes, int peer, cppool_comm comm, cppool_stream stream);
  void Collect(const CollectiveCall& call, cppool_comm comm, cppool_stream stream);
  void MarkStage(cppool_stream stream, const char* stage);

 private:
  // This rank's place in a communicator, and how many calls it has made there. A handle is the address.
  struct Side {
    HostComm* comm = nullptr;
    int rank = 0;  // in the communicator
    std::uint64_t collectives = 0;
    std::vector<std::uint64_t> sends, recvs;  // by peer
    std::uint32_t rings = 0;                  // passes of ring transfers
  };
  struct HostEvent {
    EventRecord* latest = nullptr;  // NULL before the first record
  };

  // How many threads without a stream a rank keeps.
  static constexpr std::size_t kSpareThreads = 8;

  HostStream& At(cppool_stream stream) const;
  HostEvent& At(cppool_event event) const;
  Side& At(cppool_comm comm);
  void ResetSides();
  void Submit(HostStream& stream, std::unique_ptr<CommOp> op);
  // A slice of the trace for a call; NULL: the trace has no room. `peer`: in the communicator.
  TraceSlice* TraceTransfer(const HostStream& stream, const Side& side, const char* what, std::size_t bytes,
                            std::optional<int> peer);
  void RunOps(HostStream& stream, std::vector<std::unique_ptr<CommOp>> ops);
  std::unique_ptr<HostStream> NewStream(int number);
  std::unique_ptr<HostStream> SpareStream();  // NULL: there is none
  void* Take(std::size_t bytes);
  void CountReleased(std::size_t bytes);
  void CheckGuards(const void* ptr, std::size_t bytes) noexcept;
  void Poison(void* ptr, std::size_t bytes, bool untouched) const noexcept;
  void SynchronizeAll();
  // No work that was marked is pending, except on other streams than the main one. `now`: the end of stages
  // without one.
  StageTally TallyMarks(std::int64_t now) const;
  std::string NameOfStream(int index) const;
  void ReleaseAll();
  void ReleaseMemory();

  std::shared_ptr<HostWorld> world_;
  int rank_;
  cppool_runtime seam_{};
  LastError last_error_;
  Failure failure_;

  std::unordered_map<void*, std::size_t> buffers_, host_buffers_;  // live, with their bytes
  std::unordered_map<void*, std::size_t> freed_host_buffers_;      // kept to the end of the case
  std::atomic<std::size_t> held_bytes_{0}, live_{0};

  std::set<HostEvent*> events_;  // owned
  std::deque<EventRecord> records_;

  std::map<GroupShape, Side> sides_;  // of the groups that this rank has asked for
  std::uint64_t epoch_ = 0;           // of the world, when the sides were last reset
  int group_depth_ = 0;
  std::vector<std::pair<HostStream*, std::vector<std::unique_ptr<CommOp>>>>
      grouped_;  // by stream, in order of first use

  int iteration_ = StageTally::kOnce;
  std::int64_t begun_ = 0;                      // iterations of this case
  std::atomic<std::int64_t> begun_on_main_{0};  // of these, what the main stream's work has come to
  Backlog<std::int64_t> backlog_;               // points are numbers of iterations, from 1
  MarkDelays delays_;
  std::unique_ptr<TraceRecorder> trace_;  // NULL: none was asked for
  int streams_made_ = 0;                  // threads, for their names
  int next_stream_ = 1;                   // in this case

  // Progress() holds this while it reads. The rank's thread holds it while it changes what is read, and never
  // while it waits. The streams' threads never take it.
  mutable std::mutex progress_mutex_;
  std::vector<std::unique_ptr<HostStream>> streams_;  // in use; the first is the main one
  std::vector<std::unique_ptr<HostStream>> retired_;  // destroyed in this case, oldest first; may have work
  std::vector<std::unique_ptr<HostStream>> idle_;     // of earlier cases: their threads are used again
  std::deque<Mark> marks_;
  std::string marked_;                         // the last stage
  std::set<std::string, std::less<>> stages_;  // the text of the marks
};

}  // namespace cppool::kernels::host
