// SIGINT, SIGTERM and SIGHUP end the process, but not before it has said what it knows.
#pragma once

#include <signal.h>

#include <functional>
#include <thread>

namespace cppool::command {

// While there is one, the first of these signals calls `last_words` with its number, on a thread of its own, and then,
// after two seconds at the latest, ends the process as the signal would have. A second one ends it at once. A signal
// that is ignored, as under nohup, stays ignored. The thread that makes it, and those that it makes meanwhile, have
// these signals blocked. Throws std::system_error where there is no descriptor or thread to be had.
class Interruption {
 public:
  explicit Interruption(std::function<void(int)> last_words);
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

 private:
  void Wait(const std::function<void(int)>& last_words) const;

  sigset_t signals_, before_;
  int arrived_, over_;  // a signalfd; an eventfd
  std::thread thread_;
};

}  // namespace cppool::command
