// A world without memory, streams or communication, whose failures are up to the test.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/error.h"

namespace cppool::test {

// What the ranks of a fake world share, and what a test sets and looks at.
struct FakeWorld {
  std::mutex mutex;
  std::condition_variable changed;
  std::string aborted;  // the reason, when it is
  std::vector<std::string> calls;
  bool released = false;

  // Before the world is used.
  int rank_that_cannot_open = -1;
  int rank_that_cannot_begin = -1;
  int rank_that_cannot_end = -1;
  bool recovers = true;
  std::atomic<std::size_t> free_bytes{std::size_t{1} << 30};
  std::atomic<std::size_t> left_behind{0};  // allocations that a case leaves on each rank

  void Log(std::string call) {
    const std::lock_guard lock(mutex);
    calls.push_back(std::move(call));
  }
  // As a collective that nobody else joins: waits until the world is aborted.
  void WaitForAbort() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !aborted.empty(); });
    throw kernels::RuntimeError(CPPOOL_NCCL, "released: " + aborted);
  }
  // What no abort ends.
  void WaitForRelease() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return released; });
  }
  void Release() {
    const std::lock_guard lock(mutex);
    released = true;
    changed.notify_all();
  }
};

class FakeRank : public kernels::RankRuntime {
 public:
  FakeRank(std::shared_ptr<FakeWorld> world, int rank, int world_size) : world_(std::move(world)) {
    seam_.abi = CPPOOL_RUNTIME_ABI;
    seam_.struct_size = sizeof(seam_);
    seam_.backend = "host";
    seam_.rank = rank;
    seam_.world_size = world_size;
    seam_.device = -1;
    seam_.self = world_.get();
    seam_.last_error = [](cppool_runtime*) -> const char* { return "the runtime's last error"; };
  }
  cppool_runtime* seam() override { return &seam_; }
  void BeginCase() override {
    Log("begin");
    if (seam_.rank == world_->rank_that_cannot_begin)
      throw kernels::RuntimeError(CPPOOL_CUDA, "no clean state");
  }
  void Perturb(std::uint64_t seed) override { Log("perturb " + std::to_string(seed)); }
  void Break(kernels::DeviceFault, void*, cppool_stream) override { Log("break"); }
  void BeginIteration(int index) override { Log("iteration " + std::to_string(index)); }
  void EndIterations() override { Log("end iterations"); }
  kernels::StageTimes EndCase() override {
    Log("end");
    if (seam_.rank == world_->rank_that_cannot_end)
      throw kernels::RuntimeError(CPPOOL_CUDA, "the work failed");
    // Rank r takes r + 1 times as long.
    return {{"forward", 2.0 * (seam_.rank + 1)}};
  }
  void Trim() override { Log("trim"); }
  kernels::MemoryInfo Memory() const override { return {0, world_->free_bytes, world_->left_behind}; }
  std::size_t LiveAllocations() const override { return world_->left_behind; }
  bool HasRoom(double bytes) const override { return bytes <= static_cast<double>(world_->free_bytes); }
  std::vector<kernels::StreamProgress> Progress() const override {
    return {{"main", "p2p step 2 of 4", 1.5, false}, {"stream 1", "", 0, true}};
  }

 private:
  void Log(const std::string& call) { world_->Log(std::to_string(seam_.rank) + " " + call); }

  std::shared_ptr<FakeWorld> world_;
  cppool_runtime seam_{};
};

class FakeBackend : public kernels::Backend {
 public:
  FakeBackend(std::shared_ptr<FakeWorld> world, int world_size)
      : world_(std::move(world)), world_size_(world_size) {}
  std::string name() const override { return "host"; }
  std::string transport() const override { return "host"; }
  int world_size() const override { return world_size_; }
  std::unique_ptr<kernels::RankRuntime> OpenRank(int rank) override {
    if (rank == world_->rank_that_cannot_open) throw kernels::RuntimeError(CPPOOL_CUDA, "the device is gone");
    if (world_->rank_that_cannot_open >= 0) world_->WaitForAbort();
    return std::make_unique<FakeRank>(world_, rank, world_size_);
  }
  std::vector<kernels::DeviceInfo> Devices() const override {
    return std::vector<kernels::DeviceInfo>(world_size_, {"a fake", "", -1, "", std::size_t{1} << 30});
  }
  std::vector<std::pair<std::string, double>> InitTimes() const override { return {{"start", 1.0}}; }
  void Abort(const std::string& reason) override {
    const std::lock_guard lock(world_->mutex);
    world_->aborted = reason;
    world_->calls.emplace_back("abort");
    world_->changed.notify_all();
  }
  bool Recover() override {
    const std::lock_guard lock(world_->mutex);
    world_->calls.emplace_back("recover");
    if (world_->recovers) world_->aborted.clear();
    return world_->recovers;
  }

 private:
  std::shared_ptr<FakeWorld> world_;
  int world_size_;
};

}  // namespace cppool::test
