#include "base/stdout_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>
#include <utility>

#include "base/poll_timeout.h"

namespace cppool::base {
namespace {

[[noreturn]] void ThrowErrno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// A pipe of this size holds a suite's requests and many answers: a script that writes all requests before it
// reads an answer does not block.
constexpr int kPipeBytes = 1 << 20;

// A copy above 2 that children do not inherit. A pipe gets a larger buffer, where the system allows it.
UniqueFd MoveAway(int fd, const char* what) {
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (moved < 0) ThrowErrno(what);
  fcntl(moved, F_SETPIPE_SZ, kPipeBytes);
  return UniqueFd(moved);
}

}  // namespace

bool WriteAll(int fd, std::string_view text, std::optional<std::chrono::steady_clock::time_point> deadline) {
  while (!text.empty()) {
    pollfd ready{fd, POLLOUT, 0};
    const int count = poll(&ready, 1, deadline ? PollTimeout(*deadline) : -1);
    if (count == 0) return false;
    if (count < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    if (ready.revents & (POLLERR | POLLNVAL)) return false;
    // A pipe that polls as ready takes PIPE_BUF bytes without blocking, even without O_NONBLOCK.
    const ssize_t written = write(fd, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    if (written < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return false;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

StdoutChannel StdoutChannel::TakeStdout() {
  UniqueFd original = MoveAway(STDOUT_FILENO, "stdout is closed: there is no channel for answers");
  if (fcntl(STDERR_FILENO, F_GETFD) < 0) {
    const int null = open("/dev/null", O_WRONLY);
    if (null < 0 || (null != STDERR_FILENO && dup2(null, STDERR_FILENO) < 0)) ThrowErrno("stderr is closed");
    if (null != STDERR_FILENO) close(null);
  }
  if (dup2(STDERR_FILENO, STDOUT_FILENO) < 0) ThrowErrno("stdout");
  return StdoutChannel(std::move(original));
}

StdoutChannel::StdoutChannel(UniqueFd fd) : fd_(std::move(fd)) {}

bool StdoutChannel::Write(std::string_view text, std::optional<Clock::time_point> deadline) {
  std::unique_lock lock(*mutex_, std::defer_lock);
  if (!deadline) lock.lock();
  if (deadline) {
    // By the system's clock: ThreadSanitizer of GCC 12 does not see a lock that is taken by the steady one.
    const auto left = *deadline - Clock::now();
    if (!lock.try_lock_until(std::chrono::system_clock::now() + left)) return false;
  }
  return WriteAll(fd_.get(), text, deadline);
}

bool StdoutChannel::WriteIfReady(std::string_view text) {
  const std::unique_lock lock(*mutex_, std::try_to_lock);
  pollfd ready{fd_.get(), POLLOUT, 0};
  return lock && poll(&ready, 1, 0) == 1 && WriteAll(fd_.get(), text);
}

UniqueFd TakeStdin() {
  UniqueFd original = MoveAway(STDIN_FILENO, "stdin is closed: there are no requests to read");
  UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null || dup2(null.get(), STDIN_FILENO) < 0) ThrowErrno("/dev/null");
  return original;
}

}  // namespace cppool::base
