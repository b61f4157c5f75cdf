#include "protocol/run_control.h"

#include <algorithm>
#include <utility>

namespace cppool::protocol {

bool RunControl::Cancel() {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  if (!std::exchange(cancelled_, true) && notify_) notify_();
  return true;
}

bool RunControl::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

void RunControl::OnCancel(std::function<void()> notify) {
  const std::lock_guard lock(mutex_);
  notify_ = std::move(notify);
  if (cancelled_ && notify_) notify_();
}

bool RunControl::MayBegin(std::int64_t index) {
  const std::lock_guard lock(mutex_);
  if (cancelled_ && index >= begun_) return false;
  begun_ = std::max(begun_, index + 1);
  return true;
}

std::int64_t RunControl::begun() const {
  const std::lock_guard lock(mutex_);
  return begun_;
}

bool RunControl::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  return cancelled_;
}

bool RunControl::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace cppool::protocol
