// A status of the C interfaces as the protocol's kind of failure.
#pragma once

#include <cppool/runtime.h>

#include "protocol/failure.h"

namespace cppool::daemon {

// kInternal for CPPOOL_OK, which is no failure, and for a number that is no status.
inline protocol::FailureKind ToFailureKind(cppool_status status) {
  using protocol::FailureKind;
  switch (status) {
    case CPPOOL_INVALID_REQUEST:
      return FailureKind::kInvalidRequest;
    case CPPOOL_INAPPLICABLE:
      return FailureKind::kInapplicable;
    case CPPOOL_UNSUPPORTED:
      return FailureKind::kUnsupported;
    case CPPOOL_MISMATCH:
      return FailureKind::kMismatch;
    case CPPOOL_OUT_OF_MEMORY:
      return FailureKind::kOutOfMemory;
    case CPPOOL_CUDA:
      return FailureKind::kCuda;
    case CPPOOL_NCCL:
      return FailureKind::kNccl;
    case CPPOOL_TIMEOUT:
      return FailureKind::kTimeout;
    case CPPOOL_CANCELLED:
      return FailureKind::kCancelled;
    case CPPOOL_OK:
    case CPPOOL_INTERNAL:
      break;
  }
  return FailureKind::kInternal;
}

// The status that ToFailureKind makes the kind of; CPPOOL_INTERNAL where none does.
inline cppool_status StatusOf(protocol::FailureKind kind) {
  for (int status = CPPOOL_INVALID_REQUEST; status <= CPPOOL_CANCELLED; ++status)
    if (ToFailureKind(static_cast<cppool_status>(status)) == kind) return static_cast<cppool_status>(status);
  return CPPOOL_INTERNAL;
}

}  // namespace cppool::daemon
