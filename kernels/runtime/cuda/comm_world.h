// Communication between ranks, each on a thread of its own, and what those of this process share to start and
// to stop together. The transports implement it: NcclWorld, also between processes, and PeerWorld.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/error.h"
#include "kernels/group_shape.h"
#include "kernels/runtime/common/collective_call.h"
#include "kernels/runtime/common/group_meeting.h"
#include "kernels/runtime/common/wake_up.h"
#include "kernels/runtime/cuda/device_pool.h"

namespace cppool::kernels::cuda {

// One rank's communicator of a shape.
struct CommGroup {
  cppool_comm comm = nullptr;  // NULL: the rank has none
  GroupShape shape;
  int rank = 0;  // in the group
  int size = 0;
};

// A call in which the rank's thread waits for its peers' calls.
struct WaitingCall {
  cudaStream_t stream = nullptr;
  std::string doing;        // "waiting for recv of 32 bytes from rank 1"
  std::vector<int> awaits;  // the ranks of the world that have not made their call
};

class PeerWorld;

class CommWorld {
 public:
  // The ranks of the place are assigned to the first `devices` devices in blocks: rank r of them has device r
  // where there are enough. Ranks of other processes are only known by what they tell.
  CommWorld(const Place& place, int devices, std::function<void(const RankNews&)> tell = {});
  virtual ~CommWorld() = default;
  CommWorld(const CommWorld&) = delete;
  CommWorld& operator=(const CommWorld&) = delete;

  virtual const char* transport() const = 0;  // "nccl", "peer"
  int size() const { return place_.world_size; }
  const Place& place() const { return place_; }
  int device(int rank) const { return (rank - place_.first) * devices_ / place_.ranks; }
  int devices() const { return devices_; }

  // Returns the memory of the rank's device, which its ranks share. The device's context is current.
  std::shared_ptr<DevicePool> OpenPool(int rank);

  // Every rank of the place arrives once, or says what keeps it from starting, before any joins a
  // communicator: joining waits without limit for a rank that does not come. Arrive waits for the others, and
  // throws RuntimeError when one of them cannot start or does not arrive; CannotStart only tells them.
  void Arrive();
  void CannotStart(int rank, const std::string& failure);
  // On the rank's thread with its device current; all ranks at once. Throw RuntimeError.
  virtual void JoinWorld(int rank) = 0;
  // Makes the rank's communicator of a shape, which all ranks make now.
  virtual void JoinGroup(int rank, GroupShape shape) = 0;
  // The same for a shape that a case asks for: waits until all ranks have asked for it. The rank's work on
  // NCCL's communicators must be over.
  CommGroup MakeGroup(int rank, GroupShape shape);
  // Releases the rank's communicators; nothing of theirs may be pending. After an abort, or in a group of
  // calls, they may be left to the end of the process.
  virtual void Leave(int rank) noexcept = 0;

  // The rank's communicators, in the order in which they were made: the world's first.
  std::vector<GroupShape> shapes(int rank) const;
  CommGroup group(int rank, GroupShape shape) const;  // comm is NULL: not made
  // comm is NULL: not one of this rank's
  virtual CommGroup group(int rank, cppool_comm comm) const;
  // What copies between the ranks' devices. NULL: they do not reach each other, or there are several
  // processes.
  virtual PeerWorld* copies() = 0;
  // Forgets what a case began and did not end; where that cannot be forgotten, throws RuntimeError.
  virtual void BeginCase(int rank);

  // The seam's calls, on the rank's thread. Throw RuntimeError.
  virtual void GroupStart(int rank) = 0;
  virtual void GroupEnd(int rank) = 0;
  virtual bool InGroup(int rank) const = 0;  // between the two
  virtual void Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
                    cudaStream_t stream) = 0;
  virtual void Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
                    cudaStream_t stream) = 0;
  virtual void Collect(int rank, const CollectiveCall& call, cppool_comm comm, cudaStream_t stream) = 0;

  // Throw RuntimeError after an abort; CheckHealth also when a communicator of the rank has failed by itself.
  void ThrowIfAborted() const;
  virtual void CheckHealth(int) { ThrowIfAborted(); }
  // When the rank's work of a case is over: throws the error of a call that failed and so left its peers'
  // calls without a partner. A case cannot ignore it.
  virtual void CheckCase(int) {}
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  // Any thread, does not wait: later calls fail with `reason`, and what is stuck ends soon.
  virtual void Abort(const std::string& reason) = 0;
  // Waits until the abort's work in the background is over, but no longer than `limit`: a process that ends
  // in the middle of it would crash.
  virtual void AwaitAbort(std::chrono::milliseconds) {}
  // Any thread. Empty also where the device waits, or the transport cannot tell.
  virtual std::vector<WaitingCall> Waiting(int) const { return {}; }
  // Any thread: what the rank waits for in MakeGroup.
  std::optional<GroupMeeting::Wait> WaitingForGroup(int rank) const { return meeting_.WaitOf(rank); }
  // As Backend's. NCCL's own calls do not notice.
  virtual void Finished(int rank);
  void Take(const RankNews& news);  // of a rank of another process; any thread
  // Forgets an abort and all calls under way. CheckRestart throws RuntimeError when the transport cannot. No
  // rank may be in a call.
  virtual void CheckRestart() const = 0;
  virtual void Restart();

 protected:
  static std::size_t At(int rank) { return static_cast<std::size_t>(rank); }
  bool finished(int rank) const { return finished_[At(rank)].load(std::memory_order_acquire); }
  std::vector<WakeUp>& wake_ups() { return wake_ups_; }  // by rank: notified of what its thread may wait for
  void WakeAll();
  // The rank's thread. A thread that aborts may read the rank's communicators meanwhile.
  void AddGroup(int rank, GroupShape shape, cppool_comm comm);
  void ForgetGroups(int rank) { groups_[At(rank)].count = 0; }
  template <typename Use>
  void ForEachGroup(int rank, Use use) const {  // the last one that was made first
    const RankGroups& mine = groups_[At(rank)];
    for (int i = mine.count.load(std::memory_order_acquire); i > 0; --i) use(mine.all[At(i - 1)]);
  }

  // False when the world was aborted before; else keeps the reason.
  bool NoteAbort(const std::string& reason);
  void ForgetAbort();
  virtual cppool_status abort_status() const = 0;

 private:
  // More than there are shapes of a world of up to 64 ranks.
  static constexpr std::size_t kMostGroups = 64;
  struct RankGroups {
    std::array<CommGroup, kMostGroups> all;
    std::atomic<int> count{0};
  };

  template <typename Member>
  CommGroup Find(int rank, Member CommGroup::*member, const Member& value) const;
  bool Here(int rank) const { return rank >= place_.first && rank < place_.first + place_.ranks; }

  const Place place_;
  const int devices_;
  const std::function<void(const RankNews&)> tell_;
  std::vector<RankGroups> groups_;  // by rank

  std::vector<WakeUp> wake_ups_;
  std::vector<std::atomic<bool>> finished_;  // by rank
  GroupMeeting meeting_;
  std::atomic<bool> asked_{false};  // in this case a rank of another process has come to the meeting
  std::mutex agreed_mutex_;
  std::set<GroupShape> agreed_;  // all ranks have asked for these

  std::mutex pools_mutex_;
  std::vector<std::weak_ptr<DevicePool>> pools_;  // by device

  std::mutex start_mutex_;
  std::condition_variable start_changed_;
  int arrived_ = 0;
  std::string start_failure_;

  std::atomic<bool> aborted_{false};
  mutable std::mutex abort_mutex_;
  std::string abort_reason_;
};

}  // namespace cppool::kernels::cuda
