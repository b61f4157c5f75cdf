// Elements of tensors, for tests that compare them one by one.
#pragma once

#include <cstdint>

#include "kernels/numerics/half.h"

namespace cppool::kernels {

// Reads one element of a tensor of any dtype, without rounding.
inline double LoadElement(Dtype dtype, const void* data, std::int64_t index) {
  return DispatchAnyDtype(dtype, [&](auto type) -> double {
    return decltype(type)::ToFloat(static_cast<const typename decltype(type)::Bits*>(data)[index]);
  });
}

}  // namespace cppool::kernels
