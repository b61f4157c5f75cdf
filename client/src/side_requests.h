// What other threads ask of a daemon while a call waits for its answer: `cancel` and `status`. The call's own
// thread sends these, and hands the answers back.
#pragma once

#include <future>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <cppool/pool.h>
#include "base/event.h"

namespace cppool::client {

class SideRequests {
 public:
  enum class Kind { kCancel, kStatus };
  // The answer; nothing: the call has ended before there was one. An exception is for who asked.
  using Answer = std::promise<std::optional<Json>>;

  // Any thread: waits for the answer. Nothing: no call of Run or Validate goes on, or it has ended first.
  // `starting`: what is answered at once as long as the request has not been sent; nothing: it is waited for.
  std::optional<Json> Ask(Kind kind, const std::optional<Json>& starting);

  // On the call's thread, in this order. Between Begin and End the call may be sent to several daemons.
  void Begin();
  void Sent();  // from now on there is something to ask of
  std::vector<std::pair<Kind, Answer>> Take();
  void End();
  bool cancelled() const;  // a cancel was asked for since Begin

  int fd() const { return wake_.fd(); }  // is readable when there is something to take

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<Kind, Answer>> waiting_;
  bool going_on_ = false, sent_ = false, cancelled_ = false;
  const base::Event wake_;
};

// Begins, and ends with its scope.
class SideScope {
 public:
  explicit SideScope(SideRequests* side) : side_(side) {
    if (side_) side_->Begin();
  }
  ~SideScope() {
    if (side_) side_->End();
  }
  SideScope(const SideScope&) = delete;
  SideScope& operator=(const SideScope&) = delete;

 private:
  SideRequests* const side_;
};

}  // namespace cppool::client
