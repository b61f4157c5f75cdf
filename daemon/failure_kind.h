// A status of the C interfaces as the protocol's kind of failure.
#pragma once

#include <utility>

#include <cppool/runtime.h>

#include "protocol/failure.h"

namespace cppool::daemon {

inline constexpr std::pair<cppool_status, protocol::FailureKind> kFailureKinds[] = {
    {CPPOOL_INVALID_REQUEST, protocol::FailureKind::kInvalidRequest},
    {CPPOOL_INAPPLICABLE, protocol::FailureKind::kInapplicable},
    {CPPOOL_UNSUPPORTED, protocol::FailureKind::kUnsupported},
    {CPPOOL_MISMATCH, protocol::FailureKind::kMismatch},
    {CPPOOL_OUT_OF_MEMORY, protocol::FailureKind::kOutOfMemory},
    {CPPOOL_CUDA, protocol::FailureKind::kCuda},
    {CPPOOL_NCCL, protocol::FailureKind::kNccl},
    {CPPOOL_TIMEOUT, protocol::FailureKind::kTimeout},
    {CPPOOL_CANCELLED, protocol::FailureKind::kCancelled}};

// kInternal for CPPOOL_OK, which is no failure, and for a number that is no status.
inline protocol::FailureKind ToFailureKind(cppool_status status) {
  for (const auto& [known, kind] : kFailureKinds)
    if (known == status) return kind;
  return protocol::FailureKind::kInternal;
}

// The status that ToFailureKind makes the kind of; CPPOOL_INTERNAL where none does.
inline cppool_status StatusOf(protocol::FailureKind wanted) {
  for (const auto& [status, kind] : kFailureKinds)
    if (kind == wanted) return status;
  return CPPOOL_INTERNAL;
}

}  // namespace cppool::daemon
