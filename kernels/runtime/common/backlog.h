// How far a rank's thread is ahead of its work: the iterations that it has begun and whose work is not known
// to be done. It waits before it gets far ahead, so that a cancelled case ends soon, and begins the next one
// early enough that the device always has work. Used on the rank's thread only.
#pragma once

#include <chrono>
#include <deque>
#include <utility>

namespace cppool::kernels {

// `Point`: a place in the main stream's work.
template <typename Point>
class Backlog {
 public:
  using Clock = std::chrono::steady_clock;

  // An iteration begins. `point`: where, in the stream's work.
  void Begin(Point point) { begun_.push_back(std::move(point)); }

  // Whether the next iteration must wait: two are not done, and these are more than were done in the last 10
  // ms. `reached`: whether the work has come to a point. `drop`: takes a point that is not needed any more.
  template <typename Reached, typename Drop>
  bool IsLong(Reached reached, Drop drop) {
    const auto now = Clock::now();
    while (begun_.size() > 1 && reached(begun_[1])) {  // the first one is done when the second has begun
      DropFirst(drop);
      done_.push_back(now);
    }
    while (!done_.empty() && done_.front() < now - kMost) done_.pop_front();
    return begun_.size() > 1 && begun_.size() > done_.size();
  }

  template <typename Drop>
  void Clear(Drop drop) {
    while (!begun_.empty()) DropFirst(drop);
    done_.clear();
  }

 private:
  static constexpr std::chrono::milliseconds kMost{10};

  template <typename Drop>
  void DropFirst(Drop& drop) {
    drop(std::move(begun_.front()));
    begun_.pop_front();
  }

  std::deque<Point> begun_;
  std::deque<Clock::time_point> done_;  // when iterations were found done, in the last 10 ms
};

}  // namespace cppool::kernels
