// Tests on GPUs that pass where there are too few.
#pragma once

#include "kernels/backend.h"
#include "tests/catch.h"

namespace cppool::test {

// Whether CUDA sees so many devices; if not, warns that something is skipped.
inline bool HasGpus(int wanted = 1) {
  const int devices = kernels::CountCudaDevices();
  if (devices < wanted) WARN("skipped: it needs " << wanted << " devices, and there are " << devices);
  return devices >= wanted;
}

}  // namespace cppool::test
