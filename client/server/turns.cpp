#include "client/server/turns.h"

#include <algorithm>
#include <utility>

namespace cppool::server {

Turns::Turn::Turn(Turn&& other) noexcept
    : turns_(std::exchange(other.turns_, nullptr)), entry_(other.entry_) {}

Turns::Turn& Turns::Turn::operator=(Turn&& other) noexcept {
  if (this == &other) return *this;
  End();
  turns_ = std::exchange(other.turns_, nullptr);
  entry_ = other.entry_;
  return *this;
}

void Turns::Turn::End() {
  if (turns_ == nullptr) return;
  {
    const std::lock_guard lock(turns_->mutex_);
    turns_->entries_.erase(entry_);
  }
  std::exchange(turns_, nullptr)->changed_.notify_all();
}

bool Turns::IsFirst(std::list<Entry>::const_iterator entry) const {
  return std::none_of(entries_.begin(), entry, [&](const Entry& before) {
    return std::any_of(before.resources.begin(), before.resources.end(),
                       [&](const std::string& resource) { return entry->resources.count(resource) != 0; });
  });
}

Turns::Turn Turns::Take(const Resources& resources, std::chrono::steady_clock::time_point until,
                        const std::function<bool()>& given_up) {
  std::unique_lock lock(mutex_);
  const auto entry = entries_.insert(entries_.end(), Entry{resources});
  while (!IsFirst(entry)) {
    if (!given_up() && changed_.wait_until(lock, until) == std::cv_status::no_timeout) continue;
    entries_.erase(entry);
    changed_.notify_all();  // those behind it
    return {};
  }
  return {this, entry};
}

Turns::Turn Turns::TryTake(const Resources& resources) {
  return Take(resources, {}, [] { return true; });
}

void Turns::Wake() {
  { const std::lock_guard lock(mutex_); }  // whoever is about to wait does so before
  changed_.notify_all();
}

}  // namespace cppool::server
