// Lines from stdin. It reads only when no whole line is buffered, so that the pipe bounds the memory of requests that wait.
#pragma once

#include <chrono>
#include <optional>

#include "base/unique_fd.h"
#include "protocol/framing.h"

namespace cppool::daemon {

class RequestReader {
 public:
  using Clock = std::chrono::steady_clock;

  // `stop_fd` (not owned, -1: none) becomes readable when reading must stop (SIGTERM). `idle_limit`: how long Next() waits for the
  // first byte of a line.
  RequestReader(base::UniqueFd input, int stop_fd, std::optional<std::chrono::milliseconds> idle_limit = {});

  // Waits for the next line that is not empty; without an idle limit, without a limit. Nothing at the end of input, after a stop, or
  // after the idle limit: then no byte of a later line has been read.
  std::optional<protocol::LineReader::Line> Next();
  // Waits for at most `within`, which counts towards the idle limit of Next. False: no byte of a later line has come, nor the end of
  // input or a stop.
  bool Arrives(std::chrono::milliseconds within);
  bool idled() const { return idled_; }  // whether the idle limit was the reason

 private:
  enum class Filled { kBytes, kEnd, kStopped, kIdle };
  Filled Fill(std::optional<Clock::time_point> idle_until);

  base::UniqueFd input_;
  int stop_fd_;
  std::optional<std::chrono::milliseconds> idle_limit_;
  std::optional<Clock::time_point> waiting_since_;  // the first Arrives before Next
  protocol::LineReader lines_;
  bool ended_ = false;
  bool idled_ = false;
};

}  // namespace cppool::daemon
