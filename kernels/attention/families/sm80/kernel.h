// The compiled matrix kernels, as what is needed to launch them. Each takes its parameters (parameters.h) by value; blockIdx.x counts
// tiles times heads (key/value heads for dk and dv).
#pragma once

#include <array>

#include "kernels/attention/attention_kernels.h"

namespace cppool::kernels::cuda {

struct Kernel {
  const void* function = nullptr;  // NULL: there is none
  int threads = 0;
  int shared_bytes = 0;  // dynamic
  int tile_rows = 0;     // tokens of a tile, at most
};

// Without a function for head dims or a dtype that there is no kernel for. kExtended: with what few cases need,
// bias, ALiBi and max_logit.
template <bool kExtended>
Kernel ForwardKernelOf(const KernelShape& shape);
template <bool kExtended>
Kernel BackwardQueryKernelOf(const KernelShape& shape);
// To launch one after another; the second may be none. Both have the same tiles.
template <bool kExtended>
std::array<Kernel, 2> BackwardKeyKernelsOf(const KernelShape& shape);
// Its tiles are those of dk and dv.
Kernel BackwardBiasKernelOf(const KernelShape& shape);

// Calls make.operator()<kDimQk, kDimV>() for the head dims of `shape`: the list of what there is.
template <typename Result, typename Make>
Result ForHeadDims(const KernelShape& shape, Make make) {
  const int qk = shape.dim_qk, v = shape.dim_v;
  if (qk == 64 && v == 64) return make.template operator()<64, 64>();
  if (qk == 128 && v == 128) return make.template operator()<128, 128>();
  if (qk == 192 && v == 128) return make.template operator()<192, 128>();
  if (qk == 128 && v == 64) return make.template operator()<128, 64>();
  if (qk == 256 && v == 256) return make.template operator()<256, 256>();
  return Result{};
}

}  // namespace cppool::kernels::cuda
