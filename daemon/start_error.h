// Why a daemon cannot start, and what to do about it: the process ends with exit code 2.
#pragma once

#include <stdexcept>

namespace cppool::daemon {

class StartError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace cppool::daemon
