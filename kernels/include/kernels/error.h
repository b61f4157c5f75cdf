// The one exception of the kernels: a kind of failure (the seam's status) and what happened.
#pragma once

#include <cppool/runtime.h>

#include <stdexcept>
#include <string>

namespace cppool::kernels {

class RuntimeError : public std::runtime_error {
 public:
  RuntimeError(cppool_status status, const std::string& detail)
      : std::runtime_error(detail), status_(status) {}
  cppool_status status() const { return status_; }

 private:
  cppool_status status_;
};

}  // namespace cppool::kernels
