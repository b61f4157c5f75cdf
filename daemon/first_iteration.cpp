#include "daemon/first_iteration.h"

#include <algorithm>
#include <cstddef>

namespace cppool::daemon {

FirstIteration::FirstIteration(int ranks) : here_(static_cast<std::size_t>(ranks)) {}

std::optional<FirstIteration::Obstacle> FirstIteration::Meet(int rank) {
  std::unique_lock lock(mutex_);
  here_[static_cast<std::size_t>(rank)] = true;
  if (std::all_of(here_.begin(), here_.end(), [](bool here) { return here; })) {
    decided_ = true;
    met_.notify_all();
  }
  met_.wait(lock, [&] { return decided_; });
  return obstacle_;
}

void FirstIteration::Leave(int rank, cppool_status status) {
  const std::lock_guard lock(mutex_);
  here_[static_cast<std::size_t>(rank)] = true;
  if (decided_) return;
  if (status != CPPOOL_OK && status != CPPOOL_MISMATCH)
    obstacle_ = {rank, status};
  else if (std::find(here_.begin(), here_.end(), false) != here_.end())
    return;
  decided_ = true;
  met_.notify_all();
}

std::vector<int> FirstIteration::Missing() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> missing;
  for (std::size_t rank = 0; rank < here_.size(); ++rank) {
    if (!here_[rank]) missing.push_back(static_cast<int>(rank));
  }
  return missing;
}

}  // namespace cppool::daemon
