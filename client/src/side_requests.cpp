#include "client/src/side_requests.h"

#include <utility>

namespace cppool::client {

std::optional<Json> SideRequests::Ask(Kind kind, const std::optional<Json>& starting) {
  std::future<std::optional<Json>> answer;
  {
    const std::lock_guard lock(mutex_);
    if (!going_on_) return std::nullopt;
    cancelled_ = cancelled_ || kind == Kind::kCancel;
    if (!sent_ && starting) return starting;
    answer = waiting_.emplace_back(kind, Answer()).second.get_future();
    wake_.Set();
  }
  return answer.get();
}

void SideRequests::Begin() {
  const std::lock_guard lock(mutex_);
  going_on_ = true;
  sent_ = cancelled_ = false;
}

void SideRequests::Sent() {
  const std::lock_guard lock(mutex_);
  sent_ = true;
}

std::vector<std::pair<SideRequests::Kind, SideRequests::Answer>> SideRequests::Take() {
  const std::lock_guard lock(mutex_);
  wake_.Clear();
  return std::exchange(waiting_, {});
}

void SideRequests::End() {
  const std::lock_guard lock(mutex_);
  going_on_ = false;
  for (auto& [kind, answer] : waiting_) answer.set_value(std::nullopt);
  waiting_.clear();
}

bool SideRequests::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

}  // namespace cppool::client
