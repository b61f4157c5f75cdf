// The shapes and dtypes that a family has kernels for, as one table that both its answer and its instances
// come from.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "kernels/attention/attention_kernel.h"

namespace cppool::kernels {

struct HeadDims {
  int qk, v;
  bool operator==(const HeadDims&) const = default;
};

// Why a family with these head dims, and these dtypes for all tensors alike, refuses the request; nothing
// when it does not. `family` is named in the text.
std::optional<std::string> RefuseShape(const char* family, std::span<const HeadDims> dims,
                                       std::span<const Dtype> dtypes, const KernelRequest& request);

}  // namespace cppool::kernels
