// Reads a daemon's stderr for as long as it lives, so that it never blocks on a full pipe, and keeps its end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "client/src/process.h"
#include "posix/unique_fd.h"
#include "protocol/start.h"

namespace cppool::client {

inline constexpr std::size_t kTailLines = 200;
inline constexpr std::size_t kTailCharacters = 4000;

class StderrTail {
 public:
  // `fd` is non-blocking. `on_line` may be empty; it is called on the reading thread, outside any lock.
  // Throws std::system_error.
  StderrTail(posix::UniqueFd fd, std::function<void(std::string_view)> on_line);
  ~StderrTail();  // ends the thread; what has not been handed out by then is lost
  StderrTail(const StderrTail&) = delete;
  StderrTail& operator=(const StderrTail&) = delete;

  // Waits until what was written before this call has been read: once the daemon is dead, its last words, but
  // not what a process that left the group goes on writing. `until`: on_line may be slow. One thread at a time.
  void CatchUp(Clock::time_point until);
  // The last kTailLines lines, of which the last kTailCharacters characters. Without the line that StartFailure() has read.
  std::string Text() const;

  // What the last line so far says that a daemon that cannot start ends with (protocol/start.h).
  std::optional<protocol::StartFailure> StartFailure() const;
  // The daemon has started: no line counts as such from now on.
  void ForgetStart();

  // In a forked child, which has no copy of the thread: closes the descriptors. The object must then be
  // leaked.
  void Abandon();

 private:
  void Read();
  void Keep(std::string_view bytes);
  void TakeLine(std::string_view line);

  std::atomic<bool> ending_{false};
  posix::UniqueFd fd_, wake_read_, wake_write_;  // a byte asks the thread to catch up, the end of file to end
  std::function<void(std::string_view)> on_line_;
  mutable std::mutex mutex_;
  std::condition_variable caught_up_;
  std::string kept_;  // under mutex_; the last bytes, at least kTailCharacters once there were so many
  bool catching_up_ = false;  // under mutex_
  bool ended_ = false;        // under mutex_
  std::atomic<bool> starting_{true};
  std::optional<protocol::StartFailure> start_failure_;  // under mutex_
  std::thread thread_;
};

}  // namespace cppool::client
