// The world: a backend, its ranks, and their threads. Made once, used by every case.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/rank_threads.h"
#include "kernels/backend.h"

namespace cppool::daemon {

enum class BackendChoice { kAuto, kCuda, kHost };

// Decides as the contract says (`auto` is cuda exactly when CUDA sees a device), narrows CUDA_VISIBLE_DEVICES to the first `world_size`
// devices, since CUDA's start grows with what it sees, and makes the backend. Before anything else touches CUDA, on a process that
// has no other threads reading the environment. Throws StartError.
std::unique_ptr<kernels::Backend> ChooseBackend(BackendChoice choice, kernels::Transport transport,
                                                int world_size);

// The first `count` entries of a CUDA_VISIBLE_DEVICES list; null (unset) is 0, 1, ... CUDA makes of them what it makes of the whole list,
// but for fewer devices: so an empty one stays empty, and one that names a device twice, with which CUDA sees none, stays whole.
std::string NarrowDevices(const char* visible, int count);

class World {
 public:
  using Clock = std::chrono::steady_clock;

  explicit World(std::unique_ptr<kernels::Backend> backend);
  ~World();  // what a stuck rank still uses is leaked
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Opens all ranks at once. Throws StartError with the first rank's reason, or at `deadline`; end the process then: ranks may be stuck.
  void Open(Clock::time_point deadline);

  // Closes every rank on its own thread. False when one does not come back in time: end the process then, without destructors.
  bool Close();

  int size() const { return threads_.count(); }
  kernels::Backend& backend() { return *backend_; }
  kernels::RankRuntime& rank(int rank) { return *ranks_[rank]; }
  RankThreads& threads() { return threads_; }

  // Starts to give pooled memory back, on all ranks, which must be idle: that is the barrier. FinishTrim() waits for it, and throws
  // once what a rank met in it.
  void StartTrim();
  void FinishTrim();

  // How many ranks have their memory where `rank` has its own (all of them on the host).
  int RanksSharingMemoryOf(int rank) const;
  const std::vector<kernels::DeviceInfo>& devices() const { return devices_; }
  double open_ms() const { return open_ms_; }
  std::uint64_t CountLook() { return ++looks_; }  // looks at the world's soundness, this one included

 private:
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<kernels::RankRuntime>> ranks_;
  std::vector<std::exception_ptr> trim_errors_;  // of each rank; null: none
  std::vector<kernels::DeviceInfo> devices_;
  double open_ms_ = 0;
  std::uint64_t looks_ = 0;
  bool closed_ = false;
  RankThreads threads_;
};

}  // namespace cppool::daemon
