// The one exception of the kernels: a kind of failure (the seam's status), what happened, and whose doing it is.
#pragma once

#include <cppool/runtime.h>

#include <stdexcept>
#include <string>

namespace cppool::kernels {

class RuntimeError : public std::runtime_error {
 public:
  // The culprit: a rank by its number, or one of these.
  static constexpr int kOwn = -1;        // the rank that reports it
  static constexpr int kElsewhere = -2;  // not that rank: an abort, a communicator that failed

  RuntimeError(cppool_status status, const std::string& detail, int culprit = kOwn)
      : std::runtime_error(detail), status_(status), culprit_(culprit) {}
  cppool_status status() const { return status_; }
  int culprit() const { return culprit_; }

 private:
  cppool_status status_;
  int culprit_;
};

// The end of what is said where a thread cannot be started.
inline constexpr char kThreadLimits[] = " (see `ulimit -u` and the container's limit on processes)";

}  // namespace cppool::kernels
