// fp16, bf16, fp32 and the 8-bit formats as types for templates, and elements of tensors by their dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "kernels/dtype.h"
#include "kernels/error.h"
#include "kernels/half.h"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels {

// The storage types, for templates: T::Bits in memory. Payloads are values as they are stored, without a
// scale.
template <Dtype kOf, typename Stored, auto kToFloat, auto kFromFloat>
struct Narrow {
  using Bits = Stored;
  static constexpr Dtype kDtype = kOf;
  static float ToFloat(Bits bits) { return kToFloat(bits); }
  static Bits FromFloat(float value) { return kFromFloat(value); }
  static Bits FromDouble(double value) { return kFromFloat(RoundToOdd(value)); }
};
using BF16 = Narrow<Dtype::kBf16, std::uint16_t, BF16ToFloat, FloatToBF16>;
using FP16 = Narrow<Dtype::kFp16, std::uint16_t, FP16ToFloat, FloatToFP16>;
using E4M3 = Narrow<Dtype::kE4M3, std::uint8_t, E4M3ToFloat, FloatToE4M3>;
using E5M2 = Narrow<Dtype::kE5M2, std::uint8_t, E5M2ToFloat, FloatToE5M2>;

struct FP32 {
  using Bits = float;
  static constexpr Dtype kDtype = Dtype::kFp32;
  static float ToFloat(Bits bits) { return bits; }
  static Bits FromFloat(float value) { return value; }
  static Bits FromDouble(double value) { return static_cast<float>(value); }
};

struct FP64 {
  using Bits = double;
  static constexpr Dtype kDtype = Dtype::kFp64;
  static double ToFloat(Bits bits) { return bits; }
  static Bits FromDouble(double value) { return value; }
};

// Calls function(BF16{}), function(FP16{}) or function(FP32{}). Throws for fp64, whose values do not fit into
// fp32, and for payloads.
template <typename Function>
decltype(auto) DispatchDtype(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kBf16:
      return std::forward<Function>(function)(BF16{});
    case Dtype::kFp16:
      return std::forward<Function>(function)(FP16{});
    case Dtype::kFp32:
      return std::forward<Function>(function)(FP32{});
    case Dtype::kFp64:
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "host kernels: dtype " + std::to_string(static_cast<int>(dtype)) +
                                          " is not fp16, bf16 or fp32");
}

// Calls function(E4M3{}) or function(E5M2{}). Throws for every other type.
template <typename Function>
decltype(auto) DispatchFp8(Dtype dtype, Function&& function) {
  if (dtype == Dtype::kE4M3) return std::forward<Function>(function)(E4M3{});
  if (dtype == Dtype::kE5M2) return std::forward<Function>(function)(E5M2{});
  throw RuntimeError(CPPOOL_INTERNAL, std::string("host kernels: dtype ") + NameOf(dtype) + " is no fp8");
}

// Like DispatchDtype, but also calls function(FP64{}), whose ToFloat returns a double.
template <typename Function>
decltype(auto) DispatchAnyDtype(Dtype dtype, Function&& function) {
  if (dtype == Dtype::kFp64) return std::forward<Function>(function)(FP64{});
  return DispatchDtype(dtype, std::forward<Function>(function));
}

// Rounds once, from double.
inline void StoreElement(Dtype dtype, void* data, std::int64_t index, double value) {
  DispatchAnyDtype(dtype, [&](auto type) {
    static_cast<typename decltype(type)::Bits*>(data)[index] = decltype(type)::FromDouble(value);
  });
}

}  // namespace cppool::kernels
