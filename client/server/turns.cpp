#include "client/server/turns.h"

#include <algorithm>
#include <utility>

namespace cppool::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kKept{2};  // without a turn of its client

}  // namespace

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
    if (!entry_->kept) turns_->Extend(entry_->client);
    turns_->entries_.erase(entry_);
  }
  std::exchange(turns_, nullptr)->changed_.notify_all();
}

bool Turns::IsFirst(std::list<Entry>::const_iterator entry, Clock::time_point* again) const {
  bool first = true;
  for (auto before = entries_.begin(); before != entry; ++before) {
    if (before->kept && (before->client == entry->client || before->kept_until <= Clock::now())) continue;
    if (std::ranges::none_of(before->resources, [&](const std::string& resource) {
          return entry->resources.count(resource) != 0;
        }))
      continue;
    if (before->kept) *again = std::min(*again, before->kept_until);
    first = false;
  }
  return first;
}

void Turns::Extend(const std::string& client) {
  for (Entry& entry : entries_)
    if (entry.kept && entry.client == client && entry.kept_until > Clock::now())
      entry.kept_until = Clock::now() + kKept;
}

Turns::Turn Turns::Take(const std::string& client, const Resources& resources, Clock::time_point until,
                        const std::function<bool()>& given_up) {
  std::unique_lock lock(mutex_);
  const auto kept = std::ranges::find_if(entries_, [&](const Entry& entry) {
    return entry.kept && entry.client == client && entry.kept_until > Clock::now();
  });
  // While it waits for others that came before the turn that it keeps, or has a turn, nobody else's comes.
  if (kept != entries_.end()) kept->kept_until = Clock::time_point::max();
  const auto entry =
      entries_.insert(kept == entries_.end() ? kept : std::next(kept), Entry{client, resources});
  for (;;) {
    auto again = until;
    if (IsFirst(entry, &again)) return {this, entry};
    if (given_up()) break;
    if (changed_.wait_until(lock, again) == std::cv_status::timeout && Clock::now() >= until) break;
  }
  Extend(client);
  entries_.erase(entry);
  changed_.notify_all();  // those behind it
  return {};
}

Turns::Turn Turns::TryTake(const Resources& resources) {
  return Take("", resources, {}, [] { return true; });
}

void Turns::Keep(Turn& turn) {
  const std::lock_guard lock(turn.turns_->mutex_);
  turn.entry_->kept = true;
  turn.entry_->kept_until = Clock::now() + kKept;
}

void Turns::Wake() {
  { const std::lock_guard lock(mutex_); }  // whoever is about to wait does so before
  changed_.notify_all();
}

}  // namespace cppool::server
