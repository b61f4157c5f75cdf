// The family "host": attention on the host runtime's streams. fp16 or bf16 in memory, fp32 arithmetic, and P
// and dS rounded to the tensors' dtype before their matrix products, so that errors are like those of
// tensor-core kernels.
#pragma once

#include "kernels/attention/attention_family.h"

namespace cppool::kernels::host {

const AttentionFamily& HostFamily();

}  // namespace cppool::kernels::host
