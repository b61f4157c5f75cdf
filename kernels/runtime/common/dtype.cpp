#include "kernels/runtime/common/dtype.h"

#include <cstddef>
#include <iterator>
#include <string>

#include "kernels/error.h"

namespace cppool::kernels {
namespace {

struct DtypeInfo {
  const char* name;
  std::size_t width;
};
// In the order of the enumerators. A case may pass any number.
constexpr DtypeInfo kDtypes[] = {{"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
                                 {"int32", 4},   {"int64", 8},    {"uint8", 1}};
static_assert(std::size(kDtypes) == CPPOOL_UINT8 + 1);

DtypeInfo InfoOf(cppool_dtype dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  return index < std::size(kDtypes) ? kDtypes[index] : DtypeInfo{"unknown", 0};
}

}  // namespace

std::size_t WidthOf(cppool_dtype dtype) { return InfoOf(dtype).width; }
const char* NameOf(cppool_dtype dtype) { return InfoOf(dtype).name; }
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
