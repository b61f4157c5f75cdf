#include "daemon/write_all.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace cppool::daemon {

bool WriteAll(int fd, std::string_view text, std::optional<std::chrono::steady_clock::time_point> deadline) {
  while (!text.empty()) {
    int timeout = -1;
    if (deadline) {
      const auto left = *deadline - std::chrono::steady_clock::now();
      timeout = static_cast<int>(
          std::clamp<long long>(std::chrono::ceil<std::chrono::milliseconds>(left).count(), 0, INT_MAX));
    }
    pollfd ready{fd, POLLOUT, 0};
    const int count = poll(&ready, 1, timeout);
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

}  // namespace cppool::daemon
