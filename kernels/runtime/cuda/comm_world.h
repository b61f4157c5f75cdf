// Communication between the ranks of one process, each on a thread of its own, and what they share to start
// and to stop together. A transport is an implementation: NcclWorld, PeerWorld.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/error.h"
#include "kernels/runtime/cuda/device_pool.h"

namespace cppool::kernels::cuda {

// One communicator as one rank has it. NULL: the world has no such group.
struct CommGroup {
  cppool_comm comm = nullptr;
  int rank = 0;
  int size = 0;
};

// A call that the rank's thread waits in for its peers' calls.
struct WaitingCall {
  cudaStream_t stream = nullptr;
  std::string doing;        // "waiting for recv of 32 bytes from rank 1"
  std::vector<int> awaits;  // the ranks of the world that have not made theirs
};

class CommWorld {
 public:
  // The ranks are dealt to the first `devices` devices in blocks: rank r has device r where there are enough.
  CommWorld(int size, int devices);
  virtual ~CommWorld() = default;
  CommWorld(const CommWorld&) = delete;
  CommWorld& operator=(const CommWorld&) = delete;

  virtual const char* transport() const = 0;  // "nccl", "peer"
  int size() const { return size_; }
  int device(int rank) const { return rank * devices_ / size_; }
  int devices() const { return devices_; }
  bool HasGroups() const { return size_ >= 4 && size_ % 2 == 0; }  // pairs and strides

  // The memory of the rank's device, shared by its ranks; with its context current.
  std::shared_ptr<DevicePool> OpenPool(int rank);

  // Every rank arrives once, or says what keeps it from starting, before any joins a communicator: it would wait
  // for ever for a rank that does not come. Arrive waits for the others, and throws RuntimeError when one of them
  // cannot start or does not arrive; CannotStart only tells them.
  void Arrive();
  void CannotStart(int rank, const std::string& failure);
  // On the rank's thread with its device current; all ranks at once. Throw RuntimeError.
  virtual void JoinWorld(int rank) = 0;
  virtual void JoinGroups(int rank) = 0;  // where the world has them
  // Releases the rank's communicators; nothing of theirs may be pending. After an abort, or in a group of calls,
  // they may be left to the end of the process.
  virtual void Leave(int rank) noexcept = 0;

  virtual CommGroup group(int rank, cppool_group which) const = 0;
  // Forgets what a case began and did not end; where that cannot be forgotten, throws RuntimeError.
  virtual void BeginCase(int rank) = 0;

  // The seam's calls, on the rank's thread. Throw RuntimeError.
  virtual void GroupStart(int rank) = 0;
  virtual void GroupEnd(int rank) = 0;
  virtual bool InGroup(int rank) const = 0;  // between the two
  virtual void Send(int rank, const void* data, std::size_t bytes, int peer, cppool_comm comm,
                    cudaStream_t stream) = 0;
  virtual void Recv(int rank, void* data, std::size_t bytes, int peer, cppool_comm comm,
                    cudaStream_t stream) = 0;
  virtual void AllGather(int rank, const void* in, void* out, std::size_t bytes, cppool_comm comm,
                         cudaStream_t stream) = 0;
  virtual void ReduceScatter(int rank, const void* in, void* out, std::size_t count, cppool_dtype dtype,
                             cppool_reduce reduce, cppool_comm comm, cudaStream_t stream) = 0;
  virtual void AllReduce(int rank, const void* in, void* out, std::size_t count, cppool_dtype dtype,
                         cppool_reduce reduce, cppool_comm comm, cudaStream_t stream) = 0;

  // Throw RuntimeError after an abort; CheckHealth also when a communicator of the rank has failed by itself.
  void ThrowIfAborted() const;
  virtual void CheckHealth(int) { ThrowIfAborted(); }
  // When the rank's work of a case is over: throws what a call threw that was made, failed, and left its peers with
  // theirs. A case cannot pass over it.
  virtual void CheckCase(int) {}
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  // Any thread, does not wait: later calls fail with `reason`, and what is stuck ends soon.
  virtual void Abort(const std::string& reason) = 0;
  // Until what an abort has to do in the background is over, but no longer than `limit`: a process that ends in the
  // middle of it would crash.
  virtual void AwaitAbort(std::chrono::milliseconds) {}
  // Any thread. Empty also where the waiting is the device's, or the transport cannot tell.
  virtual std::vector<WaitingCall> Waiting(int) const { return {}; }
  // As Backend's. Where the transport cannot tell who waits for whom: nothing.
  virtual void Finished(int) {}
  // Forgets an abort and everything under way. CheckRestart throws RuntimeError when the transport cannot, as
  // things are. No rank may be in a call.
  virtual void CheckRestart() const = 0;
  virtual void Restart() = 0;

 protected:
  // False when the world was aborted before; else keeps the reason.
  bool NoteAbort(const std::string& reason);
  void ForgetAbort();
  virtual cppool_status abort_status() const = 0;

 private:
  const int size_;
  const int devices_;

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
