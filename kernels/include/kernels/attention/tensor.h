// References to tensors in device memory (memory on the host), and the element types of all tensors of a
// case.
#pragma once

#include "kernels/dtype.h"

namespace cppool::kernels {

// A tensor that is read. `scale`: one fp32 value in device memory that stored elements are multiplied with
// (the inverse of the scale that an fp8 payload was made with); it travels with the data it belongs to. NULL:
// the elements are the values.
struct TensorRef {
  const void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  const float* scale = nullptr;
};

// A tensor that is written. `scale` as in TensorRef: values are divided by it before they are stored.
struct TensorOut {
  void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  const float* scale = nullptr;

  operator TensorRef() const { return {data, dtype, scale}; }  // to be read again
};

// The element type of each tensor of a case. lse, delta, max_logit, softmax offsets and the accumulators
// between calls are fp32 always.
struct TensorDtypes {
  Dtype q, k, v;
  Dtype dout;
  Dtype out;
  Dtype dq, dk, dv;
  Dtype bias, dbias;

  // Gives all tensors the same dtype.
  explicit constexpr TensorDtypes(Dtype all = Dtype::kBf16)
      : q(all), k(all), v(all), dout(all), out(all), dq(all), dk(all), dv(all), bias(all), dbias(all) {}
  bool operator==(const TensorDtypes&) const = default;
};

}  // namespace cppool::kernels
