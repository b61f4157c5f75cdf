// Lets a process print its results so far before SIGINT, SIGTERM or SIGHUP ends it, and where it is at
// SIGQUIT.
#pragma once

#include <signal.h>

#include <functional>
#include <thread>

#include "base/event.h"

namespace cppool::command {

// During its life SIGQUIT calls `where` on another thread, and the process goes on. The first of the others
// calls `last_words` with its number on another thread and ends the process, as the signal would have, when
// that returns or after two seconds. A second signal ends the process at once. An ignored signal, as under
// nohup, stays ignored. The constructing thread and the threads that it starts have these signals blocked.
// Throws std::system_error when there is no descriptor or thread left.
class Interruption {
 public:
  Interruption(std::function<void(int)> last_words, std::function<void()> where);
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

 private:
  void Wait(const std::function<void(int)>& last_words, const std::function<void()>& where) const;

  sigset_t signals_, before_;
  int arrived_;  // a signalfd
  const base::Event over_;
  std::thread thread_;
};

}  // namespace cppool::command
