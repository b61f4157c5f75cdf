// The one exception of the kernels: the kind of failure (the seam's status), what happened, and which rank
// caused it.
#pragma once

#include <cppool/runtime.h>

#include <stdexcept>
#include <string>

namespace cppool::kernels {

class RuntimeError : public std::runtime_error {
 public:
  // The culprit, as cppool_failure has it: a rank by its number, or one of these.
  static constexpr int kOwn = CPPOOL_CULPRIT_SELF;
  static constexpr int kElsewhere = CPPOOL_CULPRIT_ELSEWHERE;

  RuntimeError(cppool_status status, const std::string& detail, int culprit = kOwn)
      : std::runtime_error(detail), status_(status), culprit_(culprit) {}
  cppool_status status() const { return status_; }
  int culprit() const { return culprit_; }

 private:
  cppool_status status_;
  int culprit_;
};

// The end of the error where a thread cannot be started.
inline constexpr char kThreadLimits[] = " (see `ulimit -u` and the container's limit on processes)";

}  // namespace cppool::kernels
