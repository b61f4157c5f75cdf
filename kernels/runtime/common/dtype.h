// The seam's dtypes and reductions, as sizes and as words.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>

namespace cppool::kernels {

std::size_t WidthOf(cppool_dtype dtype);   // bytes; 0 for a value that is not a dtype
const char* NameOf(cppool_dtype dtype);    // "bfloat16"
const char* NameOf(cppool_reduce reduce);  // "sum"

// Throw RuntimeError for a value that the C enums do not have.
void CheckDtype(cppool_dtype dtype);
void CheckReduction(cppool_reduce reduce);

}  // namespace cppool::kernels
