#include "runtime/cuda_backend.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>

#include "runtime/cuda_rank.h"

namespace cppool::kernels::cuda {
namespace {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int world_size);

  std::string name() const override { return "cuda"; }
  std::string transport() const override { return "nccl"; }
  int world_size() const override { return world_->size(); }
  std::unique_ptr<RankRuntime> OpenRank(int rank) override;
  std::vector<DeviceInfo> Devices() const override;
  std::vector<std::pair<std::string, double>> InitTimes() const override;
  void Abort(const std::string& reason) override { NcclWorld::Abort(world_, reason); }
  bool Recover() override { return false; }  // NCCL's communicators do not outlive an abort

 private:
  class StageClock;

  std::shared_ptr<NcclWorld> world_;
  mutable std::mutex mutex_;  // guards what the ranks' threads report
  std::vector<DeviceInfo> devices_;
  std::vector<std::pair<std::string, double>> init_ms_;
};

// Time since the stage before, kept as the slowest rank's.
class CudaBackend::StageClock {
 public:
  explicit StageClock(CudaBackend* backend) : backend_(backend) {}

  void Done(const std::string& stage) {
    const auto now = std::chrono::steady_clock::now();
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
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

CudaBackend::CudaBackend(int world_size) {
  if (world_size < 1)
    throw RuntimeError(CPPOOL_INVALID_REQUEST,
                       "a world has at least one rank, not " + std::to_string(world_size));
  StageClock clock(this);
  int count = 0;
  CheckCuda(cudaGetDeviceCount(&count), "counting the CUDA devices");
  if (count < world_size) {
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    throw RuntimeError(CPPOOL_CUDA,
                       std::to_string(world_size) + " ranks need " + std::to_string(world_size) +
                           " CUDA devices, one each, and " + std::to_string(count) + " are visible" +
                           (visible ? " (CUDA_VISIBLE_DEVICES=" + std::string(visible) + ")" : ""));
  }
  world_ = std::make_shared<NcclWorld>(world_size);
  devices_.resize(static_cast<std::size_t>(world_size));
  clock.Done("driver");
}

std::unique_ptr<RankRuntime> CudaBackend::OpenRank(int rank) {
  StageClock clock(this);
  std::unique_ptr<CudaRank> opened;
  try {
    opened = std::make_unique<CudaRank>(world_, rank);
    WarmUpDevice(*opened);
    DeviceInfo device = opened->Device();
    const std::lock_guard lock(mutex_);
    devices_[rank] = std::move(device);
  } catch (const std::exception& error) {
    world_->Arrive(rank, error.what());
    throw;
  }
  clock.Done("contexts");
  world_->Arrive(rank, "");
  world_->JoinWorld(rank);
  clock.Done("nccl");
  if (world_->HasGroups()) {
    world_->JoinGroups(rank);
    clock.Done("groups");
  }
  WarmUpCommunicators(*opened);
  clock.Done("warm_up");
  return opened;
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

std::unique_ptr<Backend> CreateBackend(int world_size) { return std::make_unique<CudaBackend>(world_size); }

}  // namespace cppool::kernels::cuda
