// A thread that waits for a passed deadline, the parent's death and SIGTERM, even when all other threads are
// stuck.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "base/event.h"

namespace cppool::daemon {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // Called on the watchdog's thread. A null one is ignored.
  struct Events {
    std::function<void()> deadline_passed;  // must answer the request: Disarm() returns false from now on
    std::function<void()> parent_died;
    std::function<void()> terminate;  // `terminate_fd` became readable; it has been read
  };

  // `parent`: 0: none. A pidfd is used because PR_SET_PDEATHSIG reports the end of the parent's thread that
  // spawned this process. `terminate_fd` is an eventfd, not owned; -1: none.
  Watchdog(pid_t parent, int terminate_fd, Events events);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void Arm(Clock::time_point deadline);
  // True: the deadline is cancelled, and the caller answers. False: it has passed, and `deadline_passed`
  // answers.
  bool Disarm();

 private:
  void Loop();
  void TakeTimer();

  const pid_t parent_;
  const int terminate_fd_;
  const Events events_;
  base::UniqueFd parent_fd_;  // empty without pidfds in the kernel: then getppid() is polled
  base::UniqueFd timer_;
  const base::Event stop_;
  // The armed deadline in nanoseconds, kIdle or kPassed. It alone decides who answers.
  static constexpr std::int64_t kIdle = 0;
  static constexpr std::int64_t kPassed = -1;
  std::atomic<std::int64_t> armed_{kIdle};
  std::thread thread_;
};

}  // namespace cppool::daemon
