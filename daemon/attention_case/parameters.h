// The parameters of the attention case, by Transformer Engine's names.
#pragma once

#include <cppool/case.h>

#include <cstddef>

namespace cppool::attention_case {

extern const cppool_parameter kParameters[];
extern const std::size_t kParameterCount;

}  // namespace cppool::attention_case
