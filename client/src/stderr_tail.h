// Reads a daemon's stderr for as long as it lives, so that it never blocks on a full pipe, and keeps the last
// lines.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "process.h"
#include "unique_fd.h"

namespace cppool::internal {

inline constexpr std::size_t kTailLines = 200;
inline constexpr std::size_t kTailCharacters = 4000;

class StderrTail {
 public:
  // `fd` is non-blocking. `on_line` may be empty; it is called on the reading thread, outside any lock.
  // Throws std::system_error.
  StderrTail(UniqueFd fd, std::function<void(std::string_view)> on_line);
  ~StderrTail();  // ends the thread; what has not been read by then is lost
  StderrTail(const StderrTail&) = delete;
  StderrTail& operator=(const StderrTail&) = delete;

  // Waits for the end of the stream, so that a dead daemon's last words are in the tail. A grandchild may
  // keep it open: hence `until`.
  void WaitEnd(Clock::time_point until) const;
  std::string Text() const;  // the last kTailLines lines, of which the last kTailCharacters characters

  // In a forked child, which has no copy of the thread: closes the descriptors. The object must then be
  // leaked.
  void Abandon();

 private:
  void Read();
  void Keep(std::string line);

  UniqueFd fd_, wake_read_, wake_write_;  // closing wake_write_ ends the thread
  std::function<void(std::string_view)> on_line_;
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_changed_;
  std::deque<std::string> lines_;  // under mutex_
  bool ended_ = false;             // under mutex_
  std::thread thread_;
};

}  // namespace cppool::internal
