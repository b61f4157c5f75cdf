// The calls of ranks in a world of several processes: by letters (mail.h) instead of shared memory. They mean
// the same, fail with the same words, and reduce in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/runtime/host/comm.h"

namespace cppool::kernels::host {

std::unique_ptr<CommOp> MakeLetterSend(HostComm& comm, int rank, int peer, std::uint64_t position,
                                       const void* data, std::size_t bytes);
std::unique_ptr<CommOp> MakeLetterRecv(HostComm& comm, int rank, int peer, std::uint64_t position, void* data,
                                       std::size_t bytes);
std::unique_ptr<CommOp> MakeLetterCollective(HostComm& comm, int rank, std::uint64_t position,
                                             const CollectiveCall& call);

}  // namespace cppool::kernels::host
