#include "daemon/stdout_channel.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "daemon/write_all.h"

namespace cppool::daemon {
namespace {

[[noreturn]] void ThrowErrno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Room for a suite's requests and many answers, so that a script that writes all requests before it reads an answer does
// not block.
constexpr int kPipeBytes = 1 << 20;

// A copy above 2 that children do not inherit. A pipe gets a larger buffer, where the system allows it.
base::UniqueFd MoveAway(int fd, const char* what) {
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (moved < 0) ThrowErrno(what);
  fcntl(moved, F_SETPIPE_SZ, kPipeBytes);
  return base::UniqueFd(moved);
}

}  // namespace

StdoutChannel StdoutChannel::TakeStdout() {
  base::UniqueFd original = MoveAway(STDOUT_FILENO, "stdout is closed: there is no channel for answers");
  if (fcntl(STDERR_FILENO, F_GETFD) < 0) {
    const int null = open("/dev/null", O_WRONLY);
    if (null < 0 || (null != STDERR_FILENO && dup2(null, STDERR_FILENO) < 0)) ThrowErrno("stderr is closed");
    if (null != STDERR_FILENO) close(null);
  }
  if (dup2(STDERR_FILENO, STDOUT_FILENO) < 0) ThrowErrno("stdout");
  return StdoutChannel(std::move(original));
}

StdoutChannel::StdoutChannel(base::UniqueFd fd) : fd_(std::move(fd)) {}

bool StdoutChannel::Write(std::string_view text, std::optional<Clock::time_point> deadline) {
  return WriteAll(fd_.get(), text, deadline);
}

base::UniqueFd TakeStdin() {
  base::UniqueFd original = MoveAway(STDIN_FILENO, "stdin is closed: there are no requests to read");
  base::UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null || dup2(null.get(), STDIN_FILENO) < 0) ThrowErrno("/dev/null");
  return original;
}

}  // namespace cppool::daemon
