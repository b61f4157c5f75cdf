// The family "sm80": tensor core kernels for sm_80 and newer, one code path (mma.sync), bf16 and fp16.
#pragma once

#include "kernels/attention/attention_family.h"

namespace cppool::kernels::cuda {

const AttentionFamily& Sm80Family();

}  // namespace cppool::kernels::cuda
