// Writes to a descriptor that may be a pipe whose reader is slow or gone.
#pragma once

#include <chrono>
#include <optional>
#include <string_view>

namespace cppool::daemon {

// Writes `text` to `fd`, also one that somebody made non-blocking, in parts of at most PIPE_BUF bytes. False when not all of it was
// written by `deadline`, or it cannot be written: nobody reads any more. Without a deadline it waits for the reader as long as there
// is one. SIGPIPE must be ignored. Any thread; allocates nothing.
bool WriteAll(int fd, std::string_view text,
              std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

}  // namespace cppool::daemon
