#include "kernels/attention/families/host/vector_math.h"

#include <type_traits>

#include "kernels/numerics/fp8.h"
#include "kernels/numerics/half.h"

namespace cppool::kernels::host {

namespace baseline {
namespace {
#define CPPOOL_VECTOR_BYTES 16
#include "kernels/attention/families/host/vector_math_body.inc"
#undef CPPOOL_VECTOR_BYTES
constexpr VectorMath kMath = {"baseline", Multiply,        Scale,           Blend,   Gradient<FP32, false>,
                              RoundBlock, kHalfMath<FP16>, kHalfMath<BF16>, kFp8Math};
}  // namespace
}  // namespace baseline

#if defined(__x86_64__)
#define CPPOOL_HAS_AVX2 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
namespace {
#define CPPOOL_VECTOR_BYTES 32
#include "kernels/attention/families/host/vector_math_body.inc"
#undef CPPOOL_VECTOR_BYTES
constexpr VectorMath kMath = {"avx2",     Multiply,        Scale,           Blend,   Gradient<FP32, false>,
                              RoundBlock, kHalfMath<FP16>, kHalfMath<BF16>, kFp8Math};
}  // namespace
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

const HalfMath& HalfMathOf(const VectorMath& math, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
      return math.fp16;
    case Dtype::kBf16:
      return math.bf16;
    case Dtype::kFp32:
    case Dtype::kFp64:
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_UNSUPPORTED,
                     std::string("the host's kernels have no vector code for ") + NameOf(dtype));
}

const VectorMath* VectorMathAt(int index) {
  if (index == 0) return &baseline::kMath;
#if defined(CPPOOL_HAS_AVX2)
  if (index == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::kMath;
#endif
  return nullptr;
}

const VectorMath& BestVectorMath() {
  static const VectorMath* const best = [] {
    int last = 0;
    while (VectorMathAt(last + 1)) ++last;
    return VectorMathAt(last);
  }();
  return *best;
}

}  // namespace cppool::kernels::host
