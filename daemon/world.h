// The world, or the place in it that this process is: a backend, its ranks and their threads. Made once per
// process and used by every case.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/rank_threads.h"
#include "kernels/backend.h"

namespace cppool::daemon {

enum class BackendChoice { kAuto, kCuda, kHost };

// Makes the backend. kAuto is cuda exactly when CUDA sees a device. Narrows CUDA_VISIBLE_DEVICES to as many
// devices as the place has ranks, since CUDA's start takes longer with every device that it sees. Call it
// before anything uses CUDA, and while no other thread reads the environment. For a place that is a part
// of its world: `connect` makes the link to the other processes on the host, and `link` is that on CUDA.
// Throws StartError.
std::unique_ptr<kernels::Backend> ChooseBackend(
    BackendChoice choice, kernels::Transport transport, const kernels::Place& place,
    const std::function<std::unique_ptr<kernels::HostLink>()>& connect = {}, kernels::WorldLink link = {});

// The first `count` entries of a CUDA_VISIBLE_DEVICES list; null (unset): 0, 1, ... The narrowed list must
// mean the same to CUDA for the devices that it keeps. So an empty list stays empty, and one that names a
// device twice, with which CUDA sees none, stays whole.
std::string NarrowDevices(const char* visible, int count);

class World {
 public:
  using Clock = std::chrono::steady_clock;

  explicit World(std::unique_ptr<kernels::Backend> backend);
  ~World();  // leaks what a stuck rank still uses
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Opens all ranks at once. Throws StartError with the reason of the first rank that failed, or at
  // `deadline`. Then ranks may be stuck, and the process must end.
  void Open(Clock::time_point deadline);

  // Closes every rank on its own thread. False when one has not closed in time: then the process must end
  // without destructors.
  bool Close();

  const kernels::Place& place() const { return backend_->place(); }
  int size() const {
    return threads_.count();
  }  // ranks of the place: of the world, where the place is whole, as a dispatcher needs it
  kernels::Backend& backend() { return *backend_; }
  kernels::RankRuntime& rank(int rank) { return *ranks_[At(rank)]; }  // by its number in the world
  RankThreads& threads() { return threads_; }

  // Starts to return pooled memory, on all ranks, which must be idle. FinishTrim() waits for it, and throws a
  // CUDA or NCCL failure of a rank in it, once.
  void StartTrim();
  void FinishTrim();

  // How many ranks share the memory of `rank`, itself included: on the host all.
  int RanksSharingMemoryOf(int rank) const;
  const std::vector<kernels::DeviceInfo>& devices() const { return devices_; }
  double open_ms() const { return open_ms_; }

 private:
  std::size_t At(int rank) const { return static_cast<std::size_t>(rank - place().first); }

  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<kernels::RankRuntime>> ranks_;
  std::vector<std::exception_ptr> trim_errors_;  // by rank; null: none
  std::vector<kernels::DeviceInfo> devices_;
  double open_ms_ = 0;
  bool closed_ = false;
  RankThreads threads_;
};

}  // namespace cppool::daemon
