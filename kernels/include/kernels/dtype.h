// Element types of tensors. A switch over Dtype has no default, so that the compiler (-Wswitch) names every place
// that a new type has to touch; what follows the switch is unreachable and throws.
#pragma once

#include <cstddef>
#include <stdexcept>

namespace cppool::kernels {

enum class Dtype { kFp16, kBf16, kFp32, kFp64 };

// Bytes of one element.
constexpr std::size_t SizeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
    case Dtype::kBf16:
      return 2;
    case Dtype::kFp32:
      return 4;
    case Dtype::kFp64:
      return 8;
  }
  throw std::invalid_argument("SizeOf: no such dtype");
}

// "fp16", "bf16", "fp32", "fp64".
constexpr const char* NameOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
      return "fp16";
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kFp32:
      return "fp32";
    case Dtype::kFp64:
      return "fp64";
  }
  throw std::invalid_argument("NameOf: no such dtype");
}

}  // namespace cppool::kernels
