// The host backend: no device needed; world sizes 1 to 64.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <mutex>
#include <thread>

#include "kernels/error.h"
#include "kernels/runtime.h"
#include "kernels/runtime/host/rank.h"

namespace cppool::kernels {
namespace {

using host::HostRank;
using host::HostWorld;
using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 64;

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const auto colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "processor";
}

// The ranks that are open, for Recover. Ranks may outlive the backend and the other way round.
struct OpenRanks {
  std::mutex mutex;
  std::vector<HostRank*> ranks;
};

// What OpenRank returns: a HostRank that removes itself from the list.
class ListedRank final : public RankRuntime {
 public:
  ListedRank(std::shared_ptr<HostWorld> world, int rank, std::shared_ptr<OpenRanks> open)
      : rank_(std::move(world), rank), open_(std::move(open)) {
    std::lock_guard lock(open_->mutex);
    open_->ranks.push_back(&rank_);
  }
  ~ListedRank() override {
    std::lock_guard lock(open_->mutex);
    std::erase(open_->ranks, &rank_);
  }
  cppool_runtime* seam() override { return rank_.seam(); }
  std::optional<std::string> FailedInStage() const override { return rank_.FailedInStage(); }
  void BeginCase() override { rank_.BeginCase(); }
  void Perturb(std::uint64_t seed) override { rank_.Perturb(seed); }
  void BeginTrace(std::size_t limit) override { rank_.BeginTrace(limit); }
  RankTrace TakeTrace() override { return rank_.TakeTrace(); }
  void Break(DeviceFault fault, void* byte, cppool_stream stream) override {
    rank_.Break(fault, byte, stream);
  }
  void BeginIteration(int index) override { rank_.BeginIteration(index); }
  void EndIterations() override { rank_.EndIterations(); }
  StageSamples Samples() override { return rank_.Samples(); }
  bool InGroup() const override { return rank_.InGroup(); }
  std::vector<GroupShape> Groups() const override { return rank_.Groups(); }
  StageTimes EndCase() override { return rank_.EndCase(); }
  void Trim() override { rank_.Trim(); }
  MemoryInfo Memory() const override { return rank_.Memory(); }
  LiveMemory Live() const override { return rank_.Live(); }
  bool HasRoom(double bytes) const override { return rank_.HasRoom(bytes); }
  std::vector<StreamProgress> Progress() const override { return rank_.Progress(); }
  std::set<int> Threads() const override { return rank_.Threads(); }

 private:
  HostRank rank_;
  std::shared_ptr<OpenRanks> open_;
};

// Uses a communicator once: a sum of ones must be the number of ranks.
void WarmUp(cppool_runtime* rt, GroupShape shape) {
  const Group group = GetGroup(rt, shape);
  std::int32_t value = 1;
  Check(rt, rt->all_reduce(rt, &value, &value, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));
  if (value != group.size)
    throw RuntimeError(CPPOOL_INTERNAL, "the first all_reduce of a communicator gave a wrong sum");
}

class HostBackend final : public Backend {
 public:
  explicit HostBackend(int world_size) : world_(std::make_shared<HostWorld>(world_size)) {}

  std::string name() const override { return "host"; }
  std::string transport() const override { return "host"; }
  void Profile(bool) override {}
  int world_size() const override { return world_->size(); }

  std::unique_ptr<RankRuntime> OpenRank(int rank) override {
    if (rank < 0 || rank >= world_->size())
      throw RuntimeError(CPPOOL_INTERNAL, "OpenRank of a rank that the world does not have");
    try {
      const auto start = Clock::now();
      auto opened = std::make_unique<ListedRank>(world_, rank, open_);
      const auto threads = Clock::now();
      opened->BeginCase();
      for (const GroupShape shape : UsualShapes(world_->size())) WarmUp(opened->seam(), shape);
      opened->EndCase();
      NoteTimes(threads - start, Clock::now() - threads);
      return opened;
    } catch (const std::exception& e) {
      Abort("rank " + std::to_string(rank) + " did not start: " + e.what());  // the others are waiting for it
      throw;
    }
  }

  std::vector<DeviceInfo> Devices() const override {
    DeviceInfo device;
    device.name = ProcessorName();
    device.total_bytes = host::TotalMemory();
    return std::vector<DeviceInfo>(static_cast<std::size_t>(world_->size()), device);
  }

  std::vector<std::pair<std::string, double>> InitTimes() const override {
    std::lock_guard lock(times_mutex_);
    return {{"streams", streams_ms_}, {"communicators", communicators_ms_}};
  }

  void Abort(const std::string& reason) override { world_->Abort(reason); }

  void Finished(int rank) override { world_->Finished(rank); }

  void Recover(std::chrono::milliseconds limit) override {
    std::lock_guard lock(open_->mutex);
    const auto deadline = Clock::now() + limit;
    for (const HostRank* rank : open_->ranks) {
      while (!rank->Idle()) {
        if (Clock::now() >= deadline) {
          throw RuntimeError(CPPOOL_INTERNAL, "rank " + std::to_string(rank->rank()) +
                                                  ": a function on a stream does not end");
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    world_->Restart();
  }

 private:
  void NoteTimes(Clock::duration streams, Clock::duration communicators) {
    using Ms = std::chrono::duration<double, std::milli>;
    std::lock_guard lock(times_mutex_);
    streams_ms_ = std::max(streams_ms_, Ms(streams).count());
    communicators_ms_ = std::max(communicators_ms_, Ms(communicators).count());
  }

  std::shared_ptr<HostWorld> world_;
  std::shared_ptr<OpenRanks> open_ = std::make_shared<OpenRanks>();
  mutable std::mutex times_mutex_;
  double streams_ms_ = 0, communicators_ms_ = 0;
};

}  // namespace

std::unique_ptr<Backend> CreateHostBackend(int world_size) {
  if (world_size < 1 || world_size > kMostRanks) {
    throw RuntimeError(CPPOOL_INVALID_REQUEST, "the host backend runs 1 to " + std::to_string(kMostRanks) +
                                                   " ranks, not " + std::to_string(world_size));
  }
  return std::make_unique<HostBackend>(world_size);
}

}  // namespace cppool::kernels
