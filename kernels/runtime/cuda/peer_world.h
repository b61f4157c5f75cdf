// The transport peer: device copies and events between the ranks of one process, which may share devices. No
// NCCL. The transport nccl has one beside it, for what moves better by copies.
#pragma once

#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/runtime/cuda/comm_world.h"
#include "kernels/runtime/cuda/peer_comm.h"
#include "kernels/runtime/cuda/ring.h"

namespace cppool::kernels::cuda {

class PeerWorld final : public CommWorld {
 public:
  PeerWorld(int size, int devices);

  const char* transport() const override { return "peer"; }
  void JoinWorld(int rank) override { JoinWorld(rank, OpenPool(rank)); }
  void JoinWorld(int rank, std::shared_ptr<DevicePool> pool);  // the pool of what is copied
  void JoinGroup(int rank, GroupShape shape) override;         // the usual shapes exist with the world
  PeerWorld* copies() override { return this; }
  // The rank's communicator of a shape, made on the spot by this rank alone.
  CommGroup CopyGroup(int rank, GroupShape shape) {
    JoinGroup(rank, shape);
    return group(rank, shape);
  }
  // Why the ranks cannot have ring transfers; nothing when they can. On the rank's thread: begins a pass, on
  // `comm` and `stream`, for a kernel on `kernel`.
  std::optional<std::string> WhyNoRing() const;
  Arrivals StartRing(int rank, RingTransfers transfers, cppool_comm comm, cudaStream_t stream,
                     cudaStream_t kernel, RingHooks hooks);
  void Leave(int rank) noexcept override;
  void BeginCase(int rank) override;

  void GroupStart(int rank) override;
  void GroupEnd(int rank) override;
  bool InGroup(int rank) const override { return ranks_[static_cast<std::size_t>(rank)].depth > 0; }
  void Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
            cudaStream_t stream) override;
  void Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
            cudaStream_t stream) override;
  void Collect(int rank, const CollectiveCall& call, cppool_comm comm, cudaStream_t stream) override;

  void CheckCase(int rank) override;
  void Abort(const std::string& reason) override;
  std::vector<WaitingCall> Waiting(int rank) const override;
  // Enqueued work waits only for work that was enqueued before it, and ends by itself; a kernel under ring
  // transfers does after the abort.
  void CheckRestart() const override {}
  void Restart() override;

 protected:
  cppool_status abort_status() const override { return CPPOOL_INTERNAL; }

 private:
  struct Rank {
    std::list<PeerSide> sides;
    std::shared_ptr<EventPool> events;
    std::shared_ptr<DevicePool> pool;
    int depth = 0;               // calls of group_start without their group_end
    std::exception_ptr failure;  // the first one of its calls in this case
    std::vector<std::unique_ptr<PeerOp>> grouped;
    mutable std::mutex mutex;         // for Waiting and Abort: guards what follows where it changes
    std::unique_ptr<RingState> ring;  // where every rank has a device of its own
    // The calls that Run is in.
    const std::vector<std::unique_ptr<PeerOp>>* running = nullptr;
  };
  class Running;
  PeerSide& SideOf(int rank, cppool_comm comm);
  PeerSide& SideTo(int rank, cppool_comm comm, int peer, const char* call);
  void Submit(int rank, std::unique_ptr<PeerOp> op);
  void Run(int rank, std::vector<std::unique_ptr<PeerOp>> ops);
  void Meet(int rank, const std::vector<std::unique_ptr<PeerOp>>& ops);
  // A rank that has finished while this call waits for it; -1: there is none.
  int FinishedWithout(const PeerOp& op) const;

  std::mutex comms_mutex_;
  std::map<GroupShape, std::vector<std::unique_ptr<PeerComm>>> comms_;  // by GroupShape::Index
  std::vector<Rank> ranks_;
};

}  // namespace cppool::kernels::cuda
