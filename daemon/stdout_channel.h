// The only way to the original stdout. Output of libraries and cases to fd 1 goes to stderr.
#pragma once

#include <chrono>
#include <optional>
#include <string_view>

#include "base/unique_fd.h"

namespace cppool::daemon {

class StdoutChannel {
 public:
  using Clock = std::chrono::steady_clock;

  // Moves fd 1 to a descriptor that no child inherits, and makes fd 1 a copy of stderr. Call it before anything can write to fd 1.
  // Throws std::system_error when there is no stdout.
  static StdoutChannel TakeStdout();

  explicit StdoutChannel(base::UniqueFd fd);
  int fd() const { return fd_.get(); }

  // Writes `text`; false when not all of it was written by `deadline`, or nobody reads any more. Without a deadline it waits for the
  // reader as long as there is one (the watchdog ends the process when the parent dies). Any thread, one at a time.
  bool Write(std::string_view text, std::optional<Clock::time_point> deadline = std::nullopt);

 private:
  base::UniqueFd fd_;
};

// The same for requests: fd 0 becomes /dev/null, so that nothing else can read them. Throws std::system_error.
base::UniqueFd TakeStdin();

}  // namespace cppool::daemon
