// The only way to the original stdout, and writing to pipes whose reader is slow or gone. Output of libraries
// and cases to fd 1 goes to stderr.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include "base/unique_fd.h"

namespace cppool::base {

// Writes `text` to `fd`, also one that somebody made non-blocking, in parts of at most PIPE_BUF bytes. False
// when not all of it was written by `deadline`, or it cannot be written: nobody reads any more. Without a
// deadline it waits for the reader as long as there is one. SIGPIPE must be ignored. Any thread; allocates
// nothing.
bool WriteAll(int fd, std::string_view text,
              std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

class StdoutChannel {
 public:
  using Clock = std::chrono::steady_clock;

  // Moves fd 1 to a descriptor that no child inherits, and makes fd 1 a copy of stderr. Call it before
  // anything can write to fd 1. Throws std::system_error when there is no stdout.
  static StdoutChannel TakeStdout();

  explicit StdoutChannel(UniqueFd fd);
  int fd() const { return fd_.get(); }

  // Writes `text`, which no other thread's text interrupts; false when not all of it was written by
  // `deadline`, or nobody reads any more. Without a deadline it waits for the reader as long as there is one
  // (the watchdog ends the process when the parent dies). Any thread.
  bool Write(std::string_view text, std::optional<Clock::time_point> deadline = std::nullopt);
  // Writes it, unless the reader or another thread's text must be waited for before it can begin: false when
  // nothing was written.
  bool WriteIfReady(std::string_view text);

 private:
  std::unique_ptr<std::timed_mutex> mutex_ = std::make_unique<std::timed_mutex>();
  UniqueFd fd_;
};

// Moves fd 0, which has the requests, and makes it /dev/null, so that nothing else can read them. Throws
// std::system_error.
UniqueFd TakeStdin();

}  // namespace cppool::base
