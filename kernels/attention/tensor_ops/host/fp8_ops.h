// Fp8Ops on the host: each call is one function enqueued on the stream.
#pragma once

#include <memory>

#include "kernels/attention/fp8_ops.h"

namespace cppool::kernels::host {

// `runtime` outlives it and its enqueued work.
std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime);

}  // namespace cppool::kernels::host
