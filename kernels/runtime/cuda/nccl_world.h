// The transport nccl: every rank has a device of its own, and the communicators are NCCL's. Where all devices
// reach each other there are communicators of copies too: beside a kernel that fills the device, NCCL's
// kernels wait for free SMs, and copies do not.
#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/runtime/cuda/comm_world.h"
#include "kernels/runtime/cuda/nccl_api.h"
#include "kernels/runtime/cuda/peer_world.h"

namespace cppool::kernels::cuda {

class NcclWorld final : public CommWorld, public std::enable_shared_from_this<NcclWorld> {
 public:
  // Finds NCCL, checks its version and starts to make the id on a thread of its own, beside CUDA's start.
  // In a world of several processes the first one makes it, and `link` takes it to the others. Throws
  // RuntimeError.
  explicit NcclWorld(const Place& place, WorldLink link = {});

  const char* transport() const override { return "nccl"; }
  void JoinWorld(int rank) override;
  void JoinGroup(int rank, GroupShape shape) override;  // ncclCommSplit of the world's communicator
  using CommWorld::group;
  CommGroup group(int rank, cppool_comm comm) const override;
  PeerWorld* copies() override { return copying_ ? &copies_ : nullptr; }
  void Leave(int rank) noexcept override;
  void BeginCase(int rank) override;

  void GroupStart(int rank) override;
  void GroupEnd(int rank) override;
  bool InGroup(int rank) const override { return ranks_[rank]->group_depth > 0; }
  void Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
            cudaStream_t stream) override;
  void Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
            cudaStream_t stream) override;
  void Collect(int rank, const CollectiveCall& call, cppool_comm comm, cudaStream_t stream) override;

  void CheckHealth(int rank) override;
  void CheckCase(int rank) override { copies_.CheckCase(rank); }
  std::vector<WaitingCall> Waiting(int rank) const override { return copies_.Waiting(rank); }
  void Finished(int rank) override {
    CommWorld::Finished(rank);
    copies_.Finished(rank);
  }
  void Abort(const std::string& reason) override;
  void AwaitAbort(std::chrono::milliseconds limit) override;
  // NCCL's communicators do not outlive an abort, and making them again takes half as long as a new process.
  // A thread can leave a group of calls only by making the calls, and their buffers and partners are gone.
  // Nor may the ranks differ in the communicators that they have.
  void CheckRestart() const override;
  void Restart() override {
    copies_.Restart();
    CommWorld::Restart();
  }

 protected:
  cppool_status abort_status() const override { return CPPOOL_NCCL; }

 private:
  struct Rank {
    std::timed_mutex in_call;
    int group_depth = 0;  // calls of group_start without their group_end
  };
  // Held during every NCCL call of a rank: an abort waits for calls that return, and no new ones begin.
  // Throws as ThrowIfAborted.
  class Call {
   public:
    Call(NcclWorld& world, int rank) : lock_(world.ranks_[rank]->in_call) { world.ThrowIfAborted(); }

   private:
    std::unique_lock<std::timed_mutex> lock_;
  };
  ncclUniqueId ExchangeId();
  ncclUniqueId IdFor(int rank);
  void AbortCommunicators();
  bool IsOfCopies(int rank, cppool_comm comm) const { return copies_.group(rank, comm).comm; }

  const NcclApi& nccl_;
  PeerWorld copies_;
  const bool copying_;       // false: not all devices reach each other, or there are several processes
  const Exchange exchange_;  // empty: there are not
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::shared_future<ncclUniqueId> id_;   // of the process that has rank 0
  std::promise<ncclUniqueId> shared_id_;  // between processes
  const std::shared_future<ncclUniqueId> shared_id_over_ = shared_id_.get_future().share();
  std::atomic<bool> split_failed_{false};  // on some rank
  std::promise<void> abort_done_;
  const std::shared_future<void> abort_over_ = abort_done_.get_future().share();
};

}  // namespace cppool::kernels::cuda
