// A thread that waits for three things, whatever the others are stuck in: a passed deadline, the parent's death, SIGTERM.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "posix/unique_fd.h"

namespace cppool::daemon {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // Called on the watchdog's thread. A null one is not waited for.
  struct Events {
    std::function<void()>
        deadline_passed;  // the answer is this function's to write: Disarm() says false from now on
    std::function<void()> parent_died;
    std::function<void()> terminate;  // `terminate_fd` became readable; it has been read
  };

  // `parent`: the process whose death counts, 0: none. Threads of it come and go unnoticed: only the death of the whole process
  // counts, which is why this is a pidfd and not PR_SET_PDEATHSIG. `terminate_fd` is an eventfd, not owned; -1: none.
  Watchdog(pid_t parent, int terminate_fd, Events events);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void Arm(Clock::time_point deadline);
  // True: the deadline no longer counts, and the answer is the caller's. False: it has passed, and `deadline_passed` answers.
  bool Disarm();

 private:
  void Loop();
  void TakeTimer();

  const pid_t parent_;
  const int terminate_fd_;
  const Events events_;
  posix::UniqueFd parent_fd_;  // empty where the kernel has no pidfd: then getppid() is asked now and then
  posix::UniqueFd timer_;
  posix::UniqueFd stop_;
  // Nanoseconds of the armed deadline, kIdle or kPassed. The only word on who answers.
  static constexpr std::int64_t kIdle = 0;
  static constexpr std::int64_t kPassed = -1;
  std::atomic<std::int64_t> armed_{kIdle};
  std::thread thread_;
};

}  // namespace cppool::daemon
