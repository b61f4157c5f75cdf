// Conversions of the element types that TensorOps reads and writes, and the dispatch on a dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>
#include <type_traits>

#include "kernels/dtype.h"
#include "kernels/error.h"

namespace cppool::kernels::cuda {

// kCount elements that are read or written in one access (two accesses for eight floats).
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Packed {
  T at[kCount];
};

__device__ __forceinline__ float ElementToFloat(float x) { return x; }
__device__ __forceinline__ float ElementToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ElementToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T Rounded(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    static_assert(std::is_same_v<T, float>);
    return x;
  }
}

// Calls `visit` with a value of the type of `dtype`. Throws for fp64 and payloads.
template <typename Visit>
void WithType(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::kFp16:
      return visit(__half{});
    case Dtype::kBf16:
      return visit(__nv_bfloat16{});
    case Dtype::kFp32:
      return visit(float{});
    case Dtype::kFp64:
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_UNSUPPORTED, std::string("no tensor operation for ") + NameOf(dtype));
}

// Calls `visit` with a value of each of these types.
template <typename Visit>
void ForEachType(Visit visit) {
  visit(__half{});
  visit(__nv_bfloat16{});
  visit(float{});
}

}  // namespace cppool::kernels::cuda
