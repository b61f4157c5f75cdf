#include "kernels/runtime/cuda/comm_world.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace cppool::kernels::cuda {

using namespace std::chrono_literals;

CommWorld::CommWorld(const Place& place, int devices, std::function<void(const RankNews&)> tell)
    : place_(place),
      devices_(std::min(place.ranks, devices)),
      tell_(std::move(tell)),
      groups_(At(size())),
      wake_ups_(At(size())),
      finished_(At(size())),
      meeting_(
          wake_ups_, [this] { return aborted(); }, [this](int rank) { return finished(rank); }),
      pools_(At(devices_)) {
  if (!tell_) return;
  meeting_.TellOthers([this](int rank, std::uint32_t round, GroupShape shape) {
    tell_({rank, round, shape});
  });
}

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
  // A context takes seconds on a busy machine; a rank that has not arrived after a minute will not.
  const bool all =
      start_changed_.wait_for(lock, 60s, [&] { return arrived_ == place_.ranks || !start_failure_.empty(); });
  if (!start_failure_.empty()) throw RuntimeError(CPPOOL_CUDA, start_failure_, RuntimeError::kElsewhere);
  if (!all) {
    throw RuntimeError(CPPOOL_TIMEOUT, std::to_string(place_.ranks - arrived_) + " of " +
                                           std::to_string(place_.ranks) +
                                           " ranks have no CUDA context after 60 s");
  }
}

CommGroup CommWorld::MakeGroup(int rank, GroupShape shape) {
  const auto agreed = [&] {
    const std::lock_guard lock(agreed_mutex_);
    return agreed_.count(shape) > 0;
  };
  // A rank that failed after a meeting finds the shape agreed on in the next case, as those do that went on.
  if (!agreed()) {
    if (!meeting_.Meet(rank, shape)) ThrowIfAborted();
    const std::lock_guard lock(agreed_mutex_);
    agreed_.insert(shape);
  }
  JoinGroup(rank, shape);
  return group(rank, shape);
}

std::vector<GroupShape> CommWorld::shapes(int rank) const {
  std::vector<GroupShape> shapes;
  ForEachGroup(rank, [&](const CommGroup& group) { shapes.insert(shapes.begin(), group.shape); });
  return shapes;
}

template <typename Member>
CommGroup CommWorld::Find(int rank, Member CommGroup::*member, const Member& value) const {
  CommGroup found;
  ForEachGroup(rank, [&](const CommGroup& group) {
    if (group.*member == value) found = group;
  });
  return found;
}

CommGroup CommWorld::group(int rank, GroupShape shape) const { return Find(rank, &CommGroup::shape, shape); }
CommGroup CommWorld::group(int rank, cppool_comm comm) const { return Find(rank, &CommGroup::comm, comm); }

void CommWorld::AddGroup(int rank, GroupShape shape, cppool_comm comm) {
  RankGroups& mine = groups_[At(rank)];
  const int count = mine.count.load(std::memory_order_relaxed);
  if (At(count) == kMostGroups) throw RuntimeError(CPPOOL_INTERNAL, "too many communicators");
  mine.all[At(count)] = {comm, shape, shape.Member(rank), shape.size};
  mine.count.store(count + 1, std::memory_order_release);
}

void CommWorld::WakeAll() {
  for (WakeUp& wake_up : wake_ups_) wake_up.Notify();
}

// All ranks begin before any of them communicates, so that no news of this case has come yet.
void CommWorld::BeginCase(int rank) {
  finished_[At(rank)] = false;
  if (!tell_) return;
  asked_ = false;
  for (int other = 0; other < size(); ++other) {
    if (!Here(other)) finished_[At(other)] = false;
  }
}

// The other processes want to know it only while one of their ranks waits in the meeting: whichever comes
// last, the end or the question, sees the other one.
void CommWorld::Finished(int rank) {
  finished_[At(rank)] = true;
  WakeAll();
  if (tell_ && asked_) tell_({rank, 0, {}});
}

void CommWorld::Take(const RankNews& news) {
  if (news.rank < 0 || news.rank >= size() || Here(news.rank)) return;
  if (news.round == 0) {
    finished_[At(news.rank)] = true;
    return WakeAll();
  }
  asked_ = true;
  meeting_.Take(news.rank, news.round, news.shape);
  for (int rank = place_.first; rank < place_.first + place_.ranks; ++rank) {
    if (finished(rank)) tell_({rank, 0, {}});
  }
}

void CommWorld::Restart() {
  meeting_.Restart();
  for (auto& finished : finished_) finished = false;
  ForgetAbort();
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
