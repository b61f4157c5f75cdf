// The floating-point environment of a thread: rounding, traps, and whether subnormal numbers count as zero
// (FTZ and DAZ).
#pragma once

#include <cfenv>

namespace cppool::kernels {

// Put around calls of foreign code on the calling thread: what it changes ends with this. Libraries that are
// linked with -ffast-math turn subnormal numbers into zero when they are opened, and kernels do so when they
// run.
class FloatEnvironment {
 public:
  FloatEnvironment() { std::fegetenv(&saved_); }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace cppool::kernels
