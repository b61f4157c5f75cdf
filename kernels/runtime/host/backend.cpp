// The host backend: no device needed; world sizes 1 to 64.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <mutex>
#include <thread>

#include "kernels/error.h"
#include "kernels/runtime.h"
#include "kernels/runtime/common/open_ranks.h"
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

}  // namespace

struct HostTransport {
  explicit HostTransport(int world_size) : world(world_size) {}
  HostTransport(const Place& place, std::unique_ptr<HostLink> link)
      : link_name(link->name()), world(place, std::move(link)) {}
  const std::string link_name = "host";
  HostWorld world;
  OpenRanks<HostRank> open;  // of all places
};

namespace {

// Uses a communicator once: a sum of ones must be the number of ranks.
void WarmUp(cppool_runtime* rt, GroupShape shape) {
  const Group group = GetGroup(rt, shape);
  std::int32_t value = 1;
  Check(rt, rt->all_reduce(rt, &value, &value, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));
  if (value != group.size)
    throw RuntimeError(CPPOOL_INTERNAL, "the first all_reduce of a communicator gave a wrong sum");
}

void CheckSize(int world_size) {
  if (world_size >= 1 && world_size <= kMostRanks) return;
  throw RuntimeError(CPPOOL_INVALID_REQUEST, "the host backend runs 1 to " + std::to_string(kMostRanks) +
                                                 " ranks, not " + std::to_string(world_size));
}

class HostBackend final : public Backend {
 public:
  HostBackend(const Place& place, std::shared_ptr<HostTransport> transport)
      : place_(place), transport_(std::move(transport)) {}

  std::string name() const override { return "host"; }
  std::string transport() const override { return transport_->link_name; }
  void Profile(bool) override {}
  const Place& place() const override { return place_; }

  std::unique_ptr<RankRuntime> OpenRank(int rank) override {
    if (rank < place_.first || rank >= place_.first + place_.ranks)
      throw RuntimeError(CPPOOL_INTERNAL, "OpenRank of a rank that the place does not have");
    try {
      const auto start = Clock::now();
      auto opened = std::make_unique<ListedRank<HostRank>>(
          std::shared_ptr<HostWorld>(transport_, &transport_->world), rank,
          std::shared_ptr<OpenRanks<HostRank>>(transport_, &transport_->open));
      const auto threads = Clock::now();
      opened->BeginCase();
      for (const GroupShape shape : UsualShapes(place_.world_size)) WarmUp(opened->seam(), shape);
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
    return std::vector<DeviceInfo>(static_cast<std::size_t>(place_.ranks), device);
  }

  std::vector<std::pair<std::string, double>> InitTimes() const override {
    std::lock_guard lock(times_mutex_);
    return {{"streams", streams_ms_}, {"communicators", communicators_ms_}};
  }

  void Abort(const std::string& reason) override { transport_->world.Abort(reason); }

  void Finished(int rank) override { transport_->world.Finished(rank); }

  void Recover(std::chrono::milliseconds limit) override {
    std::lock_guard lock(transport_->open.mutex);
    const auto deadline = Clock::now() + limit;
    for (const HostRank* rank : transport_->open.ranks) {
      while (!rank->Idle()) {
        if (Clock::now() >= deadline) {
          throw RuntimeError(CPPOOL_INTERNAL, "rank " + std::to_string(rank->rank()) +
                                                  ": a function on a stream does not end");
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    transport_->world.Restart();
  }

 private:
  void NoteTimes(Clock::duration streams, Clock::duration communicators) {
    using Ms = std::chrono::duration<double, std::milli>;
    std::lock_guard lock(times_mutex_);
    streams_ms_ = std::max(streams_ms_, Ms(streams).count());
    communicators_ms_ = std::max(communicators_ms_, Ms(communicators).count());
  }

  const Place place_;
  const std::shared_ptr<HostTransport> transport_;
  mutable std::mutex times_mutex_;
  double streams_ms_ = 0, communicators_ms_ = 0;
};

}  // namespace

std::shared_ptr<HostTransport> CreateHostTransport(int world_size) {
  CheckSize(world_size);
  return std::make_shared<HostTransport>(world_size);
}

std::shared_ptr<HostTransport> CreateHostTransport(const Place& place, std::unique_ptr<HostLink> link) {
  CheckSize(place.world_size);
  return std::make_shared<HostTransport>(place, std::move(link));
}

std::unique_ptr<Backend> CreateHostBackend(const Place& place, std::shared_ptr<HostTransport> transport) {
  if (!transport && !place.whole()) {
    throw RuntimeError(CPPOOL_INTERNAL, "a host backend of " + std::to_string(place.ranks) + " of " +
                                            std::to_string(place.world_size) +
                                            " ranks needs the transport of the others");
  }
  if (!transport) transport = CreateHostTransport(place.world_size);
  return std::make_unique<HostBackend>(place, std::move(transport));
}

}  // namespace cppool::kernels
