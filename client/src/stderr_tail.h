// Reads a daemon's stderr as long as the daemon lives, so that it never blocks on a full pipe, and keeps the
// end of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/unique_fd.h"
#include "client/src/process.h"
#include "protocol/crash.h"
#include "protocol/start.h"

namespace cppool::client {

inline constexpr std::size_t kTailLines = 200;
inline constexpr std::size_t kTailCharacters = 4000;

class StderrTail {
 public:
  // `fd` is non-blocking. `on_line` may be empty; it is called on the reading thread, outside any lock.
  // Throws std::system_error.
  StderrTail(base::UniqueFd fd, std::function<void(std::string_view)> on_line);
  ~StderrTail();  // ends the thread; lines that on_line has not been given are lost
  StderrTail(const StderrTail&) = delete;
  StderrTail& operator=(const StderrTail&) = delete;

  // Waits until everything written before this call has been read, at most until `until`, since on_line may
  // be slow. Output of a process that has left the daemon's group may go on and is not waited for. One thread
  // at a time.
  void CatchUp(Clock::time_point until);
  // Returns the last kTailLines lines, of which the last kTailCharacters characters. Without the lines that
  // StartFailure() and Crash() have read.
  std::string Text() const;

  // Returns the last start line (protocol/start.h) read so far, if any.
  std::optional<cppool::StartFailure> StartFailure() const;
  // The daemon has started: from now on no line counts as a start line.
  void ForgetStart();

  // Returns the last crash line (protocol/crash.h) read so far, if any.
  std::optional<cppool::Crash> Crash() const;

  // In a forked child, which does not have the thread: closes the descriptors. The object must then be
  // leaked.
  void Abandon();

 private:
  void Read();
  void Keep(std::string_view bytes);
  void TakeLine(std::string_view line);

  std::atomic<bool> ending_{false};
  // A byte on wake_ asks the thread to catch up, end of file asks it to end.
  base::UniqueFd fd_, wake_read_, wake_write_;
  std::function<void(std::string_view)> on_line_;
  mutable std::mutex mutex_;
  std::condition_variable caught_up_;
  // Under mutex_; the last bytes read, at least 2 * kTailCharacters once there are so many.
  std::string kept_;
  bool catching_up_ = false;  // under mutex_
  bool ended_ = false;        // under mutex_
  std::atomic<bool> starting_{true};
  std::optional<cppool::StartFailure> start_failure_;  // under mutex_
  std::optional<cppool::Crash> crash_;                 // under mutex_
  std::thread thread_;
};

}  // namespace cppool::client
