#include "kernels/runtime/cuda/backend.h"

#include <cuda_profiler_api.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "kernels/runtime/common/open_ranks.h"
#include "kernels/runtime/cuda/nccl_world.h"
#include "kernels/runtime/cuda/peer_world.h"
#include "kernels/runtime/cuda/rank.h"

namespace cppool::kernels::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 64;

constexpr std::chrono::seconds kAbortLimit{5};  // for the end of an abort, when the world is destroyed

std::string VisibleDevices(int count) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return std::to_string(count) + (count == 1 ? " is visible" : " are visible") +
         (visible ? " (CUDA_VISIBLE_DEVICES=" + std::string(visible) + ")" : "");
}

std::shared_ptr<CommWorld> MakeWorld(const Place& place, int devices, Transport transport, WorldLink link) {
  const int size = place.ranks;
  if (devices < 1)
    throw RuntimeError(CPPOOL_CUDA, "CUDA ranks need a device, and " + VisibleDevices(devices));
  if (transport == Transport::kAuto)
    transport = devices < size && place.whole() ? Transport::kPeer : Transport::kNccl;
  if (transport == Transport::kPeer) return std::make_shared<PeerWorld>(size, devices);
  if (devices < size) {
    throw RuntimeError(CPPOOL_CUDA, "with NCCL " + std::to_string(size) + " ranks need " +
                                        std::to_string(size) + " CUDA devices, one each, and " +
                                        VisibleDevices(devices) +
                                        (place.whole() ? ": with the transport peer they can share a device"
                                                       : ": start fewer ranks, or more processes"));
  }
  return std::make_shared<NcclWorld>(place, std::move(link));
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const Place& place, Transport transport, WorldLink link);
  ~CudaBackend() override { world_->AwaitAbort(kAbortLimit); }

  std::string name() const override { return "cuda"; }
  std::string transport() const override { return world_->transport(); }
  const Place& place() const override { return place_; }
  std::unique_ptr<RankRuntime> OpenRank(int rank) override;
  std::vector<DeviceInfo> Devices() const override;
  std::vector<std::pair<std::string, double>> InitTimes() const override;
  void Abort(const std::string& reason) override { world_->Abort(reason); }
  void Finished(int rank) override { world_->Finished(rank); }
  void Take(const RankNews& news) override { world_->Take(news); }
  void Profile(bool begin) override {
    // An error is one of the device, which the next call reports too.
    begin ? cudaProfilerStart() : cudaProfilerStop();
  }
  void Recover(std::chrono::milliseconds limit) override;

 private:
  class StageClock;

  const Place place_;
  std::shared_ptr<CommWorld> world_;
  std::shared_ptr<OpenRanks<CudaRank>> open_ = std::make_shared<OpenRanks<CudaRank>>();
  mutable std::mutex mutex_;  // guards what the ranks' threads report
  std::vector<DeviceInfo> devices_;
  std::vector<std::pair<std::string, double>> init_ms_;
};

// Times of the stages of the start, each the slowest rank's.
class CudaBackend::StageClock {
 public:
  explicit StageClock(CudaBackend* backend) : backend_(backend) {}

  void Done(const std::string& stage) {
    const auto now = Clock::now();
    const double ms = std::chrono::duration<double, std::milli>(now - last_).count();
    last_ = now;
    const std::lock_guard lock(backend_->mutex_);
    auto& times = backend_->init_ms_;
    const auto found =
        std::find_if(times.begin(), times.end(), [&](const auto& entry) { return entry.first == stage; });
    if (found == times.end()) {
      times.emplace_back(stage, ms);
    } else {
      found->second = std::max(found->second, ms);
    }
  }

 private:
  CudaBackend* backend_;
  Clock::time_point last_ = Clock::now();
};

// Within a major version of CUDA an older driver runs what a newer toolkit has built, otherwise not;
// cudaGetDeviceCount would say so without the versions.
void CheckDriver() {
  int driver = 0;
  CheckCuda(cudaDriverGetVersion(&driver), "asking for the version of the CUDA driver");
  if (driver / 1000 >= CUDART_VERSION / 1000) return;
  const auto name = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  throw RuntimeError(CPPOOL_CUDA,
                     "the NVIDIA driver is for CUDA " + name(driver) +
                         ", and this CUDA module was built with CUDA " + name(CUDART_VERSION) +
                         ": install a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
                         ", or a build that was made with an older CUDA, or use the host backend");
}

CudaBackend::CudaBackend(const Place& place, Transport transport, WorldLink link) : place_(place) {
  if (place.world_size < 1 || place.world_size > kMostRanks) {
    throw RuntimeError(CPPOOL_INVALID_REQUEST, "a world has 1 to " + std::to_string(kMostRanks) +
                                                   " ranks, not " + std::to_string(place.world_size));
  }
  StageClock clock(this);
  CheckDriver();
  int count = 0;
  CheckCuda(cudaGetDeviceCount(&count), "counting the CUDA devices");
  world_ = MakeWorld(place, count, transport, std::move(link));
  devices_.resize(static_cast<std::size_t>(place.ranks));
  clock.Done("driver");
}

std::unique_ptr<RankRuntime> CudaBackend::OpenRank(int rank) {
  StageClock clock(this);
  std::unique_ptr<CudaRank> opened;
  try {
    opened = std::make_unique<ListedRank<CudaRank>>(world_, rank, open_);
    WarmUpDevice(*opened);
    DeviceInfo device = opened->Device();
    const std::lock_guard lock(mutex_);
    devices_[rank - place_.first] = std::move(device);
  } catch (const std::exception& error) {
    world_->CannotStart(rank, error.what());
    throw;
  }
  clock.Done("contexts");
  world_->Arrive();
  world_->JoinWorld(rank);
  clock.Done(world_->transport());
  const std::vector<GroupShape> shapes = UsualShapes(world_->size());  // the world's is there
  for (std::size_t i = 1; i < shapes.size(); ++i) world_->JoinGroup(rank, shapes[i]);
  if (shapes.size() > 1) clock.Done("groups");
  WarmUpCommunicators(*opened);
  clock.Done("warm_up");
  return opened;
}

void CudaBackend::Recover(std::chrono::milliseconds limit) {
  world_->CheckRestart();
  const std::lock_guard lock(open_->mutex);
  const auto deadline = Clock::now() + limit;
  for (const CudaRank* rank : open_->ranks) {
    cudaError_t state = rank->State();
    for (; state == cudaErrorNotReady && Clock::now() < deadline; state = rank->State())
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    const std::string work = "rank " + std::to_string(rank->rank()) + ": work on its streams";
    if (state == cudaErrorNotReady) throw RuntimeError(CPPOOL_CUDA, work + " does not end");
    CheckCuda(state, work.c_str());
  }
  world_->Restart();
}

std::vector<DeviceInfo> CudaBackend::Devices() const {
  const std::lock_guard lock(mutex_);
  return devices_;
}

std::vector<std::pair<std::string, double>> CudaBackend::InitTimes() const {
  const std::lock_guard lock(mutex_);
  return init_ms_;
}

}  // namespace

std::unique_ptr<Backend> CreateBackend(const Place& place, Transport transport, WorldLink link) {
  return std::make_unique<CudaBackend>(place, transport, std::move(link));
}

}  // namespace cppool::kernels::cuda
