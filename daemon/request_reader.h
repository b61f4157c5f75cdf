// Lines from stdin, as many bytes at a time as the pipe holds. What is not yet read waits in the pipe: that bounds memory.
#pragma once

#include <chrono>
#include <optional>

#include "posix/unique_fd.h"
#include "protocol/framing.h"

namespace cppool::daemon {

class RequestReader {
 public:
  using Clock = std::chrono::steady_clock;

  // `stop_fd` becomes readable when no further request is wanted (SIGTERM); -1: never. Not owned. `idle_limit`: how long Next() waits
  // for the first byte of a line.
  RequestReader(posix::UniqueFd input, int stop_fd, std::optional<std::chrono::milliseconds> idle_limit = {});

  // Waits for the next line: without an idle limit for as long as it takes, since a daemon's life is waiting for requests. Nothing at
  // the end of input, when stopped or when idle for too long; of the lines that come later none has been read then.
  std::optional<protocol::LineReader::Line> Next();
  bool idled() const { return idled_; }  // whether the idle limit was the reason

 private:
  enum class Filled { kBytes, kEnd, kStopped, kIdle };
  Filled Fill(std::optional<Clock::time_point> idle_until);

  posix::UniqueFd input_;
  int stop_fd_;
  std::optional<std::chrono::milliseconds> idle_limit_;
  protocol::LineReader lines_;
  bool ended_ = false;
  bool idled_ = false;
};

}  // namespace cppool::daemon
