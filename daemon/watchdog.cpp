#include "daemon/watchdog.h"

#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "daemon/stack_sampler.h"

namespace cppool::daemon {
namespace {

constexpr int kParentPollMs = 50;  // without pidfd

base::UniqueFd OpenPidFd(pid_t pid) {
#ifdef SYS_pidfd_open
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));  // close-on-exec by itself
  return base::UniqueFd(fd < 0 ? -1 : fd);
#else
  std::ignore = pid;
  return base::UniqueFd();
#endif
}

base::UniqueFd OrThrow(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return base::UniqueFd(fd);
}

}  // namespace

Watchdog::Watchdog(pid_t parent, int terminate_fd, Events events)
    : parent_(parent),
      terminate_fd_(terminate_fd),
      events_(std::move(events)),
      parent_fd_(parent > 0 ? OpenPidFd(parent) : base::UniqueFd()),
      timer_(OrThrow(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create")),
      thread_([this] { Loop(); }) {
  pthread_setname_np(thread_.native_handle(), "watchdog");  // here: the thread may not run for long
}

Watchdog::~Watchdog() {
  stop_.Set();
  thread_.join();  // the loop blocks in poll only, and the daemon's events end the process
}

void Watchdog::Arm(Clock::time_point deadline) {
  const auto since_epoch =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
  const std::int64_t nanoseconds = since_epoch > 0 ? since_epoch : 1;
  armed_.store(nanoseconds);
  itimerspec when{};
  when.it_value.tv_sec = nanoseconds / 1'000'000'000;
  when.it_value.tv_nsec = nanoseconds % 1'000'000'000;
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);  // steady_clock is CLOCK_MONOTONIC
}

bool Watchdog::Disarm() {
  std::int64_t armed = armed_.load();
  while (armed != kPassed && !armed_.compare_exchange_weak(armed, kIdle)) {
  }
  if (armed == kPassed) return false;
  const itimerspec never{};
  timerfd_settime(timer_.get(), 0, &never, nullptr);
  return true;
}

void Watchdog::TakeTimer() {
  std::uint64_t expirations = 0;
  if (read(timer_.get(), &expirations, sizeof(expirations)) != sizeof(expirations)) return;
  // The timer may have been armed again since: the deadline that is armed now counts.
  std::int64_t armed = armed_.load();
  if (armed <= 0 || Clock::now() < Clock::time_point(std::chrono::nanoseconds(armed))) return;
  if (armed_.compare_exchange_strong(armed, kPassed) && events_.deadline_passed) events_.deadline_passed();
}

void Watchdog::Loop() {
  PrepareStackSampling();  // before anything can be stuck
  bool parent_alive = parent_ > 0;
  while (true) {
    const bool ask = parent_alive && !parent_fd_;
    pollfd fds[4] = {{stop_.fd(), POLLIN, 0},
                     {timer_.get(), POLLIN, 0},
                     {parent_alive ? parent_fd_.get() : -1, POLLIN, 0},
                     {terminate_fd_, POLLIN, 0}};
    if (poll(fds, 4, ask ? kParentPollMs : -1) < 0 && errno != EINTR) return;
    if (fds[0].revents) return;
    if (fds[2].revents || (ask && getppid() != parent_)) {
      parent_alive = false;
      if (events_.parent_died) events_.parent_died();
    }
    if (fds[3].revents) {
      std::uint64_t signals = 0;
      std::ignore = read(terminate_fd_, &signals, sizeof(signals));
      if (events_.terminate) events_.terminate();
    }
    if (fds[1].revents) TakeTimer();
  }
}

}  // namespace cppool::daemon
