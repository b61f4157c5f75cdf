#include "daemon/request_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <utility>

namespace cppool::daemon {

RequestReader::RequestReader(UniqueFd input, int stop_fd)
    : input_(std::move(input)), stop_fd_(stop_fd), lines_(protocol::kMaxRequestBytes) {}

std::optional<protocol::LineReader::Line> RequestReader::Next() {
  while (!ended_) {
    if (auto line = lines_.Next()) return line;
    switch (Fill()) {
      case Filled::kBytes:
        break;
      case Filled::kEnd:
        ended_ = true;
        return lines_.Finish();
      case Filled::kStopped:
        ended_ = true;
        break;  // half a line is no request
    }
  }
  return std::nullopt;
}

RequestReader::Filled RequestReader::Fill() {
  char bytes[64 * 1024];
  while (true) {
    pollfd fds[2] = {{input_.get(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};  // a negative descriptor is ignored
    if (poll(fds, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return Filled::kEnd;
    }
    if (fds[1].revents) return Filled::kStopped;
    const ssize_t count = read(input_.get(), bytes, sizeof(bytes));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count <= 0) return Filled::kEnd;
    lines_.Append(std::string_view(bytes, static_cast<std::size_t>(count)));
    return Filled::kBytes;
  }
}

}  // namespace cppool::daemon
