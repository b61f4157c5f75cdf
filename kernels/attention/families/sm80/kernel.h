// The compiled matrix kernels and what is needed to launch them. Each takes its parameters (parameters.h) by
// value; blockIdx.x counts tiles times heads (key/value heads for dk and dv).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/families/sm80/config.h"
#include "kernels/attention/families/sm80/parameters.h"

namespace cppool::kernels::cuda {

// A kernel with parameters of one type.
template <typename Parameters>
struct Kernel {
  const void* function = nullptr;  // NULL: there is none
  int threads = 0;
  int shared_bytes = 0;  // dynamic
  int tile_rows = 0;     // maximum number of tokens in a tile
};

template <typename Config, int kSharedBytes, typename Parameters>
Kernel<Parameters> InstanceOf(void (*kernel)(Parameters)) {
  static_assert(kSharedBytes < kMaxSharedBytes);
  return {reinterpret_cast<const void*>(kernel), Config::kThreads, kSharedBytes, Config::kTileRows};
}

enum class Variant {
  kPlain,
  kExtended,  // with bias, ALiBi and max_logit: the registers they need would slow down the plain instances
  kFp8,       // the same, and with scales of the operands and casts of P and dS; bf16 alone
};

// The kernels for the head dims and dtype of `shape`; without a function if there is no such kernel.
template <Variant kVariant>
Kernel<ForwardParameters> ForwardKernelOf(const KernelShape& shape);
template <Variant kVariant>
Kernel<BackwardParameters> BackwardQueryKernelOf(const KernelShape& shape);
// One or two kernels, to be launched one after the other; if there is one, the second has no function. Both
// use the same tiles.
template <Variant kVariant>
std::array<Kernel<BackwardParameters>, 2> BackwardKeyKernelsOf(const KernelShape& shape);
// It uses the tiles of the kernels for dk and dv.
template <bool kFp8>
Kernel<BiasGradientParameters> BackwardBiasKernelOf(const KernelShape& shape);

template <Variant kVariant, typename T>
inline constexpr bool kHasInstance = kVariant != Variant::kFp8 || std::is_same_v<T, __nv_bfloat16>;

template <Dtype>
struct ElementOf;
template <>
struct ElementOf<Dtype::kBf16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<Dtype::kFp16> {
  using Type = __half;
};

// Returns make.operator()<T, kDimQk, kDimV>() for the dtype and head dims of `shape`, or an empty Result if
// they are not in kDtypes and kHeadDimTiles.
template <typename Result, typename Make>
Result ForInstance(const KernelShape& shape, Make make) {
  Result result{};
  const auto with_dims = [&]<std::size_t kDims, std::size_t kType>() {
    constexpr HeadDims dims = kHeadDimTiles[kDims].dims;
    if (!(HeadDims{shape.dim_qk, shape.dim_v} == dims)) return;
    result = make.template operator()<typename ElementOf<kDtypes[kType]>::Type, dims.qk, dims.v>();
  };
  const auto with_type = [&]<std::size_t kType, std::size_t... kDims>(std::index_sequence<kDims...>) {
    if (shape.dtypes.q == kDtypes[kType]) (with_dims.template operator()<kDims, kType>(), ...);
  };
  [&]<std::size_t... kType>(std::index_sequence<kType...>) {
    (with_type.template operator()<kType>(std::make_index_sequence<std::size(kHeadDimTiles)>()), ...);
  }
  (std::make_index_sequence<std::size(kDtypes)>());
  return result;
}

}  // namespace cppool::kernels::cuda
