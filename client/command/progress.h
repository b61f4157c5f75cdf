// What a person sees while a command asks its pools, and when it is interrupted.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>

namespace cppool::command {

// On a terminal one line, which is renewed every second and replaced by the next. Elsewhere nothing, but for
// a line every half minute, so that a log shows that the run goes on. A thread of its own writes while a step
// is shown, that is from Show to Clear; at other times `err` is the caller's. The calls are for one thread.
class Progress {
 public:
  // `total`: how many steps there are. `heartbeat`: between two lines that are not on a terminal; 0: none.
  Progress(std::ostream& err, bool terminal, std::size_t total,
           std::chrono::milliseconds heartbeat = std::chrono::seconds(30));
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // "[3/20] 0:07, 17.1/min, 0:41 left, 1 failed, DOING". `share`: of the step under way that is done, from 0
  // to 1. The rate and the time left, an estimate, are of the steps so far, shown once there is one; the time
  // starts again when there are fewer than before.
  void Show(int done, int failed, const std::string& doing, double share = 0);
  void Clear();

 private:
  void Beat();
  std::string Line() const;  // under mutex_
  void Write();              // under mutex_

  std::ostream& err_;
  const bool terminal_;
  const std::size_t total_;
  const std::chrono::milliseconds interval_;
  std::mutex mutex_;  // guards err_ while a step is shown, and the members below
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point next_;  // when the thread writes
  bool shown_ = false, over_ = false;
  int done_ = 0, failed_ = 0;
  double share_ = 0;
  std::string doing_;
  std::thread thread_;
};

// "interrupted (Hangup) with 8 of 20 cells done".
std::string DescribeInterruption(int signal, int done, std::size_t total, const std::string& steps);

}  // namespace cppool::command
