// The family "sm90": kernels for what Hopper (compute capability 9.0) has and no other GPU: bf16, fp16
// and fp8, both passes.
#pragma once

#include <memory>

#include "kernels/attention/attention_family.h"

namespace cppool::kernels::cuda {

// `general` does everything else, supports at least the same requests, and lives as long.
std::unique_ptr<const AttentionFamily> MakeSm90Family(const AttentionFamily& general);

}  // namespace cppool::kernels::cuda
