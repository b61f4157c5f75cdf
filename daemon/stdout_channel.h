// The only way to the original stdout. Everything else that writes to fd 1 (a library, a case) ends up on stderr.
#pragma once

#include <chrono>
#include <optional>
#include <string_view>

#include "posix/unique_fd.h"

namespace cppool::daemon {

class StdoutChannel {
 public:
  using Clock = std::chrono::steady_clock;

  // Moves fd 1 to a descriptor that no child inherits, and points fd 1 at stderr. Call it before anything else can write there.
  // Throws std::system_error when there is no stdout.
  static StdoutChannel TakeStdout();

  explicit StdoutChannel(posix::UniqueFd fd);

  // Writes all of `text`, or as much as the reader takes until `deadline`. False when that was not all. Without a deadline it waits for
  // a slow reader for as long as there is one (the watchdog ends the process when the parent dies).
  // Any thread, one at a time: a request is answered by one thread only.
  bool Write(std::string_view text, std::optional<Clock::time_point> deadline = std::nullopt);

 private:
  posix::UniqueFd fd_;
};

// Likewise for requests: fd 0 becomes /dev/null, so that nothing else reads them. Throws std::system_error.
posix::UniqueFd TakeStdin();

}  // namespace cppool::daemon
