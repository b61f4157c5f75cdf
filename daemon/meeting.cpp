#include "daemon/meeting.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace cppool::daemon {

MemoryMeeting::MemoryMeeting(int ranks, const std::optional<SamplingRule>& sampling,
                             std::function<void(bool begin)> profile,
                             std::shared_ptr<protocol::RunControl> control)
    : ranks_(ranks),
      control_(std::move(control)),
      begun_(ranks),
      profile_(std::move(profile)),
      here_(static_cast<std::size_t>(ranks)) {
  if (sampling) sampling_.emplace(*sampling, ranks);
}

bool MemoryMeeting::Begin(int, bool clean) {
  if (!clean) unclean_ = true;
  begun_.arrive_and_wait();
  return !unclean_;
}

std::optional<Meeting::Obstacle> MemoryMeeting::FirstIteration(int rank) {
  std::unique_lock lock(mutex_);
  here_[static_cast<std::size_t>(rank)] = true;
  if (std::ranges::all_of(here_, [](bool here) { return here; })) {
    decided_ = true;
    met_.notify_all();
  }
  met_.wait(lock, [&] { return decided_; });
  return obstacle_;
}

void MemoryMeeting::Leave(int rank, cppool_status status) {
  if (sampling_) sampling_->Leave();
  const std::lock_guard lock(mutex_);
  here_[static_cast<std::size_t>(rank)] = true;
  if (decided_) return;
  if (status != CPPOOL_OK && status != CPPOOL_MISMATCH)
    obstacle_ = {rank, status};
  else if (std::ranges::find(here_, false) != here_.end())
    return;
  decided_ = true;
  met_.notify_all();
}

std::vector<int> MemoryMeeting::NotReady() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> missing;
  for (std::size_t rank = 0; rank < here_.size(); ++rank) {
    if (!here_[rank]) missing.push_back(static_cast<int>(rank));
  }
  return missing;
}

void MemoryMeeting::Profile(bool begin) {
  if (begin) {
    std::call_once(profile_begins_, [this] {
      profile_(true);
      profile_begun_ = true;
    });
  } else if (++profiles_ended_ == ranks_) {
    profile_(false);
  }
}

void MemoryMeeting::EndProfile() {
  if (profile_begun_ && profiles_ended_ < ranks_) profile_(false);
}

}  // namespace cppool::daemon
