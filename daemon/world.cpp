#include "daemon/world.h"

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/visible_devices.h"
#include "daemon/failure_kind.h"
#include "daemon/log.h"
#include "daemon/start_error.h"
#include "kernels/build_id.h"
#include "kernels/error.h"

namespace cppool::daemon {

using protocol::FailureKind;

namespace {

// When a rank has failed to open, the others have kGrace to finish by themselves, then kAbortLimit to return
// from an abort.
constexpr std::chrono::milliseconds kGrace{200};
constexpr std::chrono::seconds kAbortLimit{2};
constexpr std::chrono::seconds kCloseLimit{10};

struct Opening {
  std::mutex mutex;
  std::condition_variable changed;
  int done = 0;
  std::optional<StartError> first_error;
};

StartError CannotOpen(int rank, const char* why, FailureKind kind) {
  StartError error("rank " + std::to_string(rank) + " could not open: " + why, kind);
  error.detail = why;
  error.rank = rank;
  return error;
}

std::string Describe(int count) { return count == 1 ? "1 device" : std::to_string(count) + " devices"; }

std::string DescribeList(const char* visible) {
  if (!visible) return "CUDA_VISIBLE_DEVICES is not set";
  const std::string odd = base::ExplainVisibleDevices(visible);
  return "CUDA_VISIBLE_DEVICES='" + std::string(visible) + "'" + (odd.empty() ? "" : "; ") + odd;
}

}  // namespace

std::string NarrowDevices(const char* visible, int count) {
  if (!visible) {
    std::string narrowed;
    for (int i = 0; i < count; ++i) narrowed += (i > 0 ? "," : "") + std::to_string(i);
    return narrowed;
  }
  const std::string_view list = visible;
  if (base::ReadVisibleDevices(list).repeated) return visible;
  std::size_t end = 0;
  for (int i = 0; i < count && end != std::string_view::npos; ++i) end = list.find(',', end + (i > 0));
  return std::string(list.substr(0, end));
}

std::unique_ptr<kernels::Backend> ChooseBackend(
    BackendChoice choice, kernels::Transport transport, const kernels::Place& place,
    const std::function<std::unique_ptr<kernels::HostLink>()>& connect, kernels::WorldLink link) {
  const auto host = [&] {
    if (transport != kernels::Transport::kAuto) {
      throw StartError(std::string("--transport ") +
                       (transport == kernels::Transport::kNccl ? "nccl" : "peer") +
                       " needs the backend cuda, and this is host");
    }
    if (place.whole()) return kernels::CreateHostBackend(place);
    return kernels::CreateHostBackend(place, kernels::CreateHostTransport(place, connect()));
  };
  try {
    if (choice == BackendChoice::kHost) return host();
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::string before = DescribeList(visible);
    setenv("CUDA_VISIBLE_DEVICES", NarrowDevices(visible, place.ranks).c_str(), 1);
    const int devices = kernels::CountCudaDevices();
    if (devices == 0 && choice == BackendChoice::kAuto) return host();
    if (devices == 0) {
      StartError none("--backend cuda: CUDA sees no device (" + before +
                          "): check nvidia-smi and the driver, or start with --backend host",
                      FailureKind::kCuda);
      none.detail = "CUDA sees no device (" + before + ")";
      none.devices = 0;
      throw none;
    }
    if (devices < place.ranks && (transport == kernels::Transport::kNccl || !place.whole())) {
      const std::string ranks = std::to_string(place.ranks);
      StartError too_few(
          place.whole() ? "--transport nccl: --world-size " + ranks +
                              " needs as many devices, and CUDA sees " + Describe(devices) + " (" + before +
                              "): ranks can share a GPU with --transport peer; or start with a smaller "
                              "--world-size"
                        : ranks + " of " + std::to_string(place.world_size) +
                              " ranks would be here, each needs a device of its own, and CUDA sees " +
                              Describe(devices) + " (" + before +
                              "): start with a smaller --world-size, or have --launch start agents on "
                              "more GPUs",
          FailureKind::kUnsupported);
      too_few.detail = "CUDA sees " + Describe(devices) + " (" + before + ")";
      too_few.devices = devices;
      throw too_few;
    }
    // A rank's streams and NCCL's are more than CUDA has queues by default. Streams that share a queue wait
    // for each other: work would run in an order that no event asks for, a kernel behind copies that are to
    // come under it.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    return kernels::CreateCudaBackend(place, transport, kernels::Commit(), std::move(link));
  } catch (const kernels::RuntimeError& error) {
    throw StartError(error.what(), ToFailureKind(error.status()));
  }
}

World::World(std::unique_ptr<kernels::Backend> backend)
    : backend_(std::move(backend)),
      ranks_(static_cast<std::size_t>(place().ranks)),
      trim_errors_(ranks_.size()),
      threads_(place().ranks, place().first) {}

World::~World() {
  if (Close()) return;
  // A stuck rank still uses its runtime.
  for (auto& rank : ranks_) std::ignore = rank.release();
  std::ignore = backend_.release();
}

bool World::Close() {
  if (closed_) return true;
  const auto limit = Clock::now() + kCloseLimit;
  if (!threads_.WaitUntil(limit)) return false;
  threads_.Start([this](int rank) { ranks_[At(rank)].reset(); });
  closed_ = threads_.WaitUntil(limit);
  return closed_;
}

void World::Open(Clock::time_point deadline) {
  const auto start = Clock::now();
  const auto opening = std::make_shared<Opening>();
  threads_.Start([this, opening](int rank) {
    const LogTags tags(rank, "");
    std::optional<StartError> error;
    try {
      ranks_[At(rank)] = backend_->OpenRank(rank);
    } catch (const kernels::RuntimeError& e) {
      error = CannotOpen(rank, e.what(), ToFailureKind(e.status()));
    } catch (const std::exception& e) {
      error = CannotOpen(rank, e.what(), FailureKind::kInternal);
    }
    const std::lock_guard lock(opening->mutex);
    ++opening->done;
    if (error && !opening->first_error) opening->first_error = error;
    opening->changed.notify_all();
  });

  std::unique_lock lock(opening->mutex);
  const auto all_done = [&] { return opening->done == size(); };
  const bool in_time =
      opening->changed.wait_until(lock, deadline, [&] { return all_done() || opening->first_error; });
  if (in_time && opening->first_error && !opening->changed.wait_for(lock, kGrace, all_done)) {
    const std::string reason = "rank " + std::to_string(*opening->first_error->rank) + " could not open";
    lock.unlock();
    backend_->Abort(reason);
    lock.lock();
    opening->changed.wait_for(lock, kAbortLimit, all_done);
  }
  if (opening->first_error) throw *opening->first_error;
  if (!in_time) {
    throw StartError("the world did not open in time: " + std::to_string(opening->done) + " of " +
                         std::to_string(size()) + " ranks are ready; is another process holding the devices?",
                     FailureKind::kTimeout);
  }
  lock.unlock();
  threads_.Wait();
  devices_ = backend_->Devices();
  open_ms_ = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void World::StartTrim() {
  threads_.Start([this](int rank) {
    try {
      ranks_[At(rank)]->Trim();
    } catch (const std::exception& error) {
      const LogTags tags(rank, "");
      Log(LogLevel::kWarning, std::string("memory was not given back: ") + error.what());
      const auto* runtime = dynamic_cast<const kernels::RuntimeError*>(&error);
      if (runtime && (runtime->status() == CPPOOL_CUDA || runtime->status() == CPPOOL_NCCL))
        trim_errors_[At(rank)] = std::current_exception();
    }
  });
}

void World::FinishTrim() {
  threads_.Wait();
  for (const auto& error : std::exchange(trim_errors_, std::vector<std::exception_ptr>(ranks_.size()))) {
    if (error) std::rethrow_exception(error);
  }
}

int World::RanksSharingMemoryOf(int rank) const {
  const int ordinal = devices_.at(rank).ordinal;
  int ranks = 0;
  for (const auto& device : devices_) ranks += device.ordinal == ordinal;
  return ranks;
}

}  // namespace cppool::daemon
