// The transport nccl: every rank has a device of its own, and NCCL's communicators over them.
#pragma once

#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/runtime/cuda/comm_world.h"
#include "kernels/runtime/cuda/nccl_api.h"

namespace cppool::kernels::cuda {

class NcclWorld final : public CommWorld, public std::enable_shared_from_this<NcclWorld> {
 public:
  // Finds NCCL, checks its version and starts to make the id on a thread of its own, beside CUDA's start.
  // Throws RuntimeError.
  explicit NcclWorld(int size);

  const char* transport() const override { return "nccl"; }
  void JoinWorld(int rank) override;
  void JoinGroups(int rank) override;  // splits PAIR and STRIDE off
  void Leave(int rank) noexcept override;
  CommGroup group(int rank, cppool_group which) const override;
  void BeginCase(int rank) override;

  void GroupStart(int rank) override;
  void GroupEnd(int rank) override;
  bool InGroup(int rank) const override { return ranks_[rank]->group_depth > 0; }
  void Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
            cudaStream_t stream) override;
  void Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
            cudaStream_t stream) override;
  void AllGather(int rank, const void* in, void* out, std::size_t bytes, cppool_comm comm,
                 cudaStream_t stream) override;
  void ReduceScatter(int rank, const void* in, void* out, std::size_t count, cppool_dtype dtype,
                     cppool_reduce reduce, cppool_comm comm, cudaStream_t stream) override;
  void AllReduce(int rank, const void* in, void* out, std::size_t count, cppool_dtype dtype,
                 cppool_reduce reduce, cppool_comm comm, cudaStream_t stream) override;

  void CheckHealth(int rank) override;
  void Abort(const std::string& reason) override;
  void AwaitAbort(std::chrono::milliseconds limit) override;
  // NCCL's communicators do not outlive an abort, and to make them again takes half as long as a fresh process.
  // Nor does a thread get out of a group of calls but by making them, whose buffers and partners are gone.
  void CheckRestart() const override;
  void Restart() override {}

 protected:
  cppool_status abort_status() const override { return CPPOOL_NCCL; }

 private:
  struct Group {
    ncclComm_t comm = nullptr;
    int rank = 0;
    int size = 0;
  };
  struct Rank {
    std::timed_mutex in_call;
    Group groups[CPPOOL_STRIDE + 1];  // by cppool_group
    int group_depth = 0;              // of groups of calls, as the seam has begun and ended them
  };
  // Held over every NCCL call of a rank: the abort waits for calls that return and lets none begin. Throws as
  // ThrowIfAborted.
  class Call {
   public:
    Call(NcclWorld& world, int rank) : lock_(world.ranks_[rank]->in_call) { world.ThrowIfAborted(); }

   private:
    std::unique_lock<std::timed_mutex> lock_;
  };
  void AbortCommunicators();

  const NcclApi& nccl_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::shared_future<ncclUniqueId> id_;
  std::promise<void> abort_done_;
  const std::shared_future<void> abort_over_ = abort_done_.get_future().share();
};

}  // namespace cppool::kernels::cuda
