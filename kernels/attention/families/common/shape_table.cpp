#include "kernels/attention/families/common/shape_table.h"

#include <algorithm>

namespace cppool::kernels {
namespace {

std::string Text(std::span<const HeadDims> dims) {
  std::string text;
  for (const HeadDims& each : dims) {
    text += (text.empty() ? "" : ", ") + std::to_string(each.qk);
    if (each.v != each.qk) text += " with head_dim_v " + std::to_string(each.v);
  }
  return text;
}

std::string Text(std::span<const Dtype> dtypes) {
  std::string text;
  for (const Dtype each : dtypes) text += (text.empty() ? "" : ", ") + std::string(NameOf(each));
  return text;
}

}  // namespace

std::optional<std::string> RefuseShape(const char* family, std::span<const HeadDims> dims,
                                       std::span<const Dtype> dtypes, const KernelRequest& request) {
  const KernelShape& shape = request.shape;
  const HeadDims wanted{shape.dim_qk, shape.dim_v};
  if (std::find(dims.begin(), dims.end(), wanted) == dims.end()) {
    return "head_dim_qk " + std::to_string(wanted.qk) + " with head_dim_v " + std::to_string(wanted.v) +
           " is not supported: the kernel family '" + family + "' has kernels for " + Text(dims);
  }
  const Dtype dtype = shape.dtypes.q;
  if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
    return std::string("dtype ") + NameOf(dtype) + " is not supported: the kernel family '" + family +
           "' has kernels for " + Text(dtypes);
  }
  if (!(shape.dtypes == TensorDtypes(dtype)))
    return std::string("tensors of different dtypes are not supported by the kernel family '") + family + "'";
  if (request.fp8 && request.fp8->products == Fp8Products::kNative) {
    return std::string("fp8_products is 'native', and the kernel family '") + family +
           "' multiplies the values of payloads in bf16: use 'auto' or 'bf16'";
  }
  return std::nullopt;
}

}  // namespace cppool::kernels
