// Why a daemon cannot start, and what to do about it: the process ends with exit code 2.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "protocol/failure.h"

namespace cppool::daemon {

class StartError : public std::runtime_error {
 public:
  // `error` is for people. By default the daemon was asked for what it cannot be: an argument, a case file,
  // the environment.
  explicit StartError(const std::string& error,
                      protocol::FailureKind kind = protocol::FailureKind::kInvalidRequest)
      : std::runtime_error(error), kind_(kind) {}
  protocol::FailureKind kind() const { return kind_; }

  // The members of StartFailure.
  std::string detail;  // empty: `error` itself
  std::optional<int> rank, devices;

 private:
  protocol::FailureKind kind_;
};

}  // namespace cppool::daemon
