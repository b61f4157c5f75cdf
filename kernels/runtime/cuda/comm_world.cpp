#include "kernels/runtime/cuda/comm_world.h"

#include <algorithm>
#include <chrono>

namespace cppool::kernels::cuda {

using namespace std::chrono_literals;

CommWorld::CommWorld(int size, int devices)
    : size_(size), devices_(std::min(size, devices)), pools_(static_cast<std::size_t>(devices_)) {}

std::shared_ptr<DevicePool> CommWorld::OpenPool(int rank) {
  const std::lock_guard lock(pools_mutex_);
  std::weak_ptr<DevicePool>& known = pools_[static_cast<std::size_t>(device(rank))];
  std::shared_ptr<DevicePool> pool = known.lock();
  if (!pool) {
    pool = std::make_shared<DevicePool>(device(rank));
    known = pool;
  }
  return pool;
}

void CommWorld::CannotStart(int rank, const std::string& failure) {
  const std::lock_guard lock(start_mutex_);
  if (start_failure_.empty())
    start_failure_ = "rank " + std::to_string(rank) + " could not start: " + failure;
  start_changed_.notify_all();
}

void CommWorld::Arrive() {
  std::unique_lock lock(start_mutex_);
  ++arrived_;
  start_changed_.notify_all();
  // A context takes seconds on a busy machine; a rank that has not come after a minute will not.
  const bool all =
      start_changed_.wait_for(lock, 60s, [&] { return arrived_ == size_ || !start_failure_.empty(); });
  if (!start_failure_.empty()) throw RuntimeError(CPPOOL_CUDA, start_failure_, RuntimeError::kElsewhere);
  if (!all) {
    throw RuntimeError(CPPOOL_TIMEOUT, std::to_string(size_ - arrived_) + " of " + std::to_string(size_) +
                                           " ranks have no CUDA context after 60 s");
  }
}

void CommWorld::ThrowIfAborted() const {
  if (!aborted()) return;
  const std::lock_guard lock(abort_mutex_);
  throw RuntimeError(abort_status(), "the world was aborted: " + abort_reason_, RuntimeError::kElsewhere);
}

bool CommWorld::NoteAbort(const std::string& reason) {
  const std::lock_guard lock(abort_mutex_);
  if (aborted_) return false;
  abort_reason_ = reason;
  aborted_.store(true, std::memory_order_release);
  return true;
}

void CommWorld::ForgetAbort() {
  const std::lock_guard lock(abort_mutex_);
  abort_reason_.clear();
  aborted_.store(false, std::memory_order_release);
}

}  // namespace cppool::kernels::cuda
