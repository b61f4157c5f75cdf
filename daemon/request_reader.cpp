#include "daemon/request_reader.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <string_view>
#include <system_error>
#include <utility>

namespace cppool::daemon {
namespace {

using Line = protocol::LineReader::Line;

// An empty line is no request.
bool IsEmpty(const std::optional<Line>& line) {
  return line && !line->overlong && line->text.find_first_not_of(" \t\r") == std::string::npos;
}

}  // namespace

RequestReader::RequestReader(base::UniqueFd input, int stop_fd,
                             std::optional<std::chrono::milliseconds> idle_limit)
    : input_(std::move(input)),
      stop_fd_(stop_fd),
      idle_limit_(idle_limit),
      lines_(protocol::kMaxRequestBytes) {}

std::optional<Line> RequestReader::Next() {
  std::optional<Clock::time_point> idle_until;
  if (idle_limit_) idle_until = waiting_since_.value_or(Clock::now()) + *idle_limit_;
  waiting_since_.reset();
  while (!ended_) {
    std::optional<Line> line = lines_.Next();
    while (IsEmpty(line)) line = lines_.Next();
    if (line) return line;
    const bool begun = lines_.buffered() > 0;  // a line that has begun is not idleness
    switch (Fill(begun ? std::nullopt : idle_until)) {
      case Filled::kBytes:
        break;
      case Filled::kEnd:
        ended_ = true;
        line = lines_.Finish();
        return IsEmpty(line) ? std::nullopt : line;
      case Filled::kStopped:
        ended_ = true;
        break;  // a part of a line is not a request
      case Filled::kIdle:
        ended_ = idled_ = true;
        break;
    }
  }
  return std::nullopt;
}

bool RequestReader::Arrives(std::chrono::milliseconds within) {
  if (ended_ || lines_.buffered() > 0) return true;
  if (!waiting_since_) waiting_since_ = Clock::now();
  pollfd fds[2] = {{input_.get(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  return poll(fds, 2, static_cast<int>(within.count())) != 0;
}

RequestReader::Filled RequestReader::Fill(std::optional<Clock::time_point> idle_until) {
  char bytes[64 * 1024];
  while (true) {
    pollfd fds[2] = {{input_.get(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};  // a negative descriptor is ignored
    int timeout = -1;
    if (idle_until) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*idle_until - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<long long>(left, 0, INT_MAX));
    }
    const int ready = poll(fds, 2, timeout);
    if (ready < 0) {
      if (errno == EINTR) continue;
      return Filled::kEnd;
    }
    if (ready == 0) return Filled::kIdle;
    if (fds[1].revents) return Filled::kStopped;
    const ssize_t count = read(input_.get(), bytes, sizeof(bytes));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category(), "stdin cannot be read");
    if (count == 0) return Filled::kEnd;
    lines_.Append(std::string_view(bytes, static_cast<std::size_t>(count)));
    return Filled::kBytes;
  }
}

}  // namespace cppool::daemon
