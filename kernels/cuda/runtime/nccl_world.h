// What the ranks of one process share: NCCL's id, the communicators, the start line and the abort.
#pragma once

#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/cuda_check.h"

namespace cppool::kernels::cuda {

// One communicator as one rank has it. NULL: the world has no such group.
struct NcclGroup {
  ncclComm_t comm = nullptr;
  int rank = 0;
  int size = 1;
};

class NcclWorld {
 public:
  // Checks NCCL's version and starts to make the id on a thread of its own, beside CUDA's start. Throws
  // RuntimeError.
  explicit NcclWorld(int size);
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int size() const { return size_; }

  // Every rank arrives once, with what kept it from starting or "", before any joins a communicator: NCCL
  // would wait for ever for a rank that does not come. Throws RuntimeError when another rank failed or does
  // not arrive.
  void Arrive(int rank, const std::string& failure);

  // On the rank's thread with its device current; all ranks at once. Throws RuntimeError.
  void JoinWorld(int rank);
  void JoinGroups(int rank);  // splits PAIR and STRIDE off, where the world has them
  bool HasGroups() const { return size_ >= 4 && size_ % 2 == 0; }
  // Releases the rank's communicators; nothing of theirs may be pending. After an abort they are left to the
  // end of the process.
  void Leave(int rank) noexcept;

  const NcclGroup& group(int rank, cppool_group which) const { return ranks_[rank]->groups[which]; }

  // Throws RuntimeError(CPPOOL_NCCL): after an abort; CheckHealth also when a communicator of the rank has
  // failed by itself.
  void ThrowIfAborted() const;
  void CheckHealth(int rank);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  // Any thread, does not wait: later calls fail with `reason`, and work that is stuck ends soon. The world is
  // of no use afterwards.
  static void Abort(const std::shared_ptr<NcclWorld>& world, const std::string& reason);

  // Held over every NCCL call of a rank: the abort waits for calls that return and lets none begin. Throws as
  // ThrowIfAborted.
  class Call {
   public:
    Call(NcclWorld& world, int rank) : lock_(world.ranks_[rank]->in_call) { world.ThrowIfAborted(); }

   private:
    std::unique_lock<std::timed_mutex> lock_;
  };

 private:
  struct Rank {
    std::timed_mutex in_call;
    NcclGroup groups[CPPOOL_STRIDE + 1];  // by cppool_group
  };
  void AbortCommunicators();

  const int size_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::shared_future<ncclUniqueId> id_;

  std::mutex start_mutex_;
  std::condition_variable start_changed_;
  int arrived_ = 0;
  std::string start_failure_;

  std::atomic<bool> aborted_{false};
  mutable std::mutex abort_mutex_;
  std::string abort_reason_;
};

}  // namespace cppool::kernels::cuda
