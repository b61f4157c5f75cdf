#include "kernels/runtime/common/dtype.h"

#include <string>

#include "kernels/error.h"

namespace cppool::kernels {

std::size_t WidthOf(cppool_dtype dtype) {
  switch (dtype) {
    case CPPOOL_FLOAT16:
    case CPPOOL_BFLOAT16:
      return 2;
    case CPPOOL_FLOAT32:
    case CPPOOL_INT32:
      return 4;
    case CPPOOL_FLOAT64:
    case CPPOOL_INT64:
      return 8;
    case CPPOOL_UINT8:
      return 1;
  }
  return 0;
}

const char* NameOf(cppool_dtype dtype) {
  switch (dtype) {
    case CPPOOL_FLOAT16:
      return "float16";
    case CPPOOL_BFLOAT16:
      return "bfloat16";
    case CPPOOL_FLOAT32:
      return "float32";
    case CPPOOL_FLOAT64:
      return "float64";
    case CPPOOL_INT32:
      return "int32";
    case CPPOOL_INT64:
      return "int64";
    case CPPOOL_UINT8:
      return "uint8";
  }
  return "unknown";
}

const char* NameOf(cppool_reduce reduce) { return reduce == CPPOOL_SUM ? "sum" : "max"; }

void CheckDtype(cppool_dtype dtype) {
  if (WidthOf(dtype) > 0) return;
  throw RuntimeError(CPPOOL_INTERNAL, "no such dtype: " + std::to_string(static_cast<int>(dtype)));
}

void CheckReduction(cppool_reduce reduce) {
  if (reduce == CPPOOL_SUM || reduce == CPPOOL_MAX) return;
  throw RuntimeError(CPPOOL_INTERNAL, "no such reduction: " + std::to_string(static_cast<int>(reduce)));
}

}  // namespace cppool::kernels
