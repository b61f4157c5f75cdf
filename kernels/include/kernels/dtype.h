// Element types of tensors. A switch over Dtype has no default, so that the compiler (-Wswitch) names every
// place that a new type has to touch; what follows the switch is unreachable and throws.
#pragma once

#include <cstddef>
#include <stdexcept>

namespace cppool::kernels {

enum class Dtype { kFp16, kBf16, kFp32, kFp64, kE4M3, kE5M2 };  // the last two: payloads, see fp8.h

// Returns the bytes of one element.
constexpr std::size_t SizeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
    case Dtype::kBf16:
      return 2;
    case Dtype::kFp32:
      return 4;
    case Dtype::kFp64:
      return 8;
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      return 1;
  }
  throw std::invalid_argument("SizeOf: no such dtype");
}

// Returns "fp16", "bf16", "fp32", "fp64", "e4m3" or "e5m2".
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
    case Dtype::kE4M3:
      return "e4m3";
    case Dtype::kE5M2:
      return "e5m2";
  }
  throw std::invalid_argument("NameOf: no such dtype");
}

constexpr bool IsFp8(Dtype dtype) { return dtype == Dtype::kE4M3 || dtype == Dtype::kE5M2; }

}  // namespace cppool::kernels
