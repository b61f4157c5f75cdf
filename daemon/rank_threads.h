// One thread per rank for the life of the daemon. A job is a function that all threads run at once.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace cppool::daemon {

class RankThreads {
 public:
  using Clock = std::chrono::steady_clock;
  using Job = std::function<void(int rank)>;

  // For the ranks from `first` on. Throws StartError when a thread cannot be started.
  explicit RankThreads(int count, int first = 0);
  // Joins the threads. Detaches them when they are still in a job after 5 s: then the process is about to
  // end.
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int count() const;
  std::vector<pid_t> ids() const;  // the kernel's, by rank

  // Starts `job` on every thread and returns. The previous job must have finished (Wait). `job` must not
  // throw.
  void Start(Job job);
  // True when every thread has finished its job; false at `deadline`. From the thread that starts jobs.
  bool WaitUntil(Clock::time_point deadline);
  // For waits that the watchdog's deadline covers.
  void Wait() { WaitUntil(Clock::time_point::max()); }

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads, which may outlive this
};

}  // namespace cppool::daemon
