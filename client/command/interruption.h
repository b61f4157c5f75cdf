// SIGINT, SIGTERM and SIGHUP end the process, but not before it has said what it knows.
#pragma once

#include <signal.h>

#include <array>
#include <functional>
#include <thread>

namespace cppool::command {

// While there is one (at most one at a time), the first of these signals calls `last_words` with its number, on a
// thread of its own, and then, after two seconds at the latest, ends the process as the signal would have. A second one
// ends it at once. A signal that is ignored, as under nohup, stays ignored. Throws std::system_error where there is no pipe or thread to be had.
class Interruption {
 public:
  explicit Interruption(std::function<void(int)> last_words);
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

  void Wait(const std::function<void(int)>& last_words) const;
  void SetHandlers(void (*handler)(int)) const;  // but for what was ignored

  int pipe_[2];
  std::array<struct sigaction, kSignals.size()> before_;
  std::thread thread_;
};

}  // namespace cppool::command
