// CheckKernels on the host: each call is one function enqueued on the stream.
#pragma once

#include <cppool/runtime.h>

#include <memory>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels {

// Holds no memory between calls. `runtime` must outlive it and its enqueued work.
std::unique_ptr<CheckKernels> MakeHostCheckKernels(cppool_runtime* runtime);

// The oracle as one blocking call (oracle.cpp). It works row by row and allocates a few vectors of length
// seqlen_kv and copies of k and v in fp64.
void HostOracle(const OracleArgs& args);

}  // namespace cppool::kernels
