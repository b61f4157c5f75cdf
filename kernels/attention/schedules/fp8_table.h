// The operands of a recipe that are fp8: for each the tensor that it is made of, its format, the axis of its
// blocks, and the passes that read it. All that moves, makes, stores or lists operands goes through it.
// Formats of what has one scale, results and dS too, are FormatOf its slot. Results have no rows: no product
// reads them, so that axis and passes would be empty, and when they are cast are questions to three flags
// together (Fp8Use), which rows would have to ask as well. Nor have P and dS, which are never stored: each
// call says how they are cast (PScale, Fp8Casts).
#pragma once

#include <optional>
#include <span>

#include "kernels/attention/fp8_recipe.h"
#include "kernels/attention/schedule.h"

namespace cppool::kernels {

// Passes of a case; the forward pass is fp8 in every recipe.
enum Fp8Pass : unsigned { kForwardPass = 1, kBackwardPass = 2, kBackwardPass16 = 4 };

// Scales of a step. dS and delayed scales come from a step before.
enum class Fp8Slot { kQkv, kDout, kOut, kDs, kGradients };
inline constexpr int kFp8Slots = 5;

constexpr Dtype FormatOf(Fp8Slot slot) {
  return slot == Fp8Slot::kQkv || slot == Fp8Slot::kOut ? Dtype::kE4M3 : Dtype::kE5M2;
}

struct Fp8Operand {
  Operand operand;
  InputTensor tensor;
  const char* name;  // of its memory
  Dtype format;
  // Of its blocks, the one that the product sums over: cast where it is read, from a tensor that moves in 16
  // bits. None: one scale for the tensor, cast before the schedule, which moves the payload.
  std::optional<MxAxis> axis;
  unsigned passes;

  constexpr bool of_queries() const { return tensor == InputTensor::kQ || tensor == InputTensor::kDout; }
  constexpr bool of_v() const { return tensor == InputTensor::kV || tensor == InputTensor::kDout; }
};

inline constexpr Fp8Operand kFp8ByTensor[] = {
    {Operand::kQ, InputTensor::kQ, "q for kernels", FormatOf(Fp8Slot::kQkv), {}, 7},
    {Operand::kK, InputTensor::kK, "k for kernels", FormatOf(Fp8Slot::kQkv), {}, 7},
    {Operand::kV, InputTensor::kV, "v for kernels", FormatOf(Fp8Slot::kQkv), {}, 7},
    {Operand::kDout, InputTensor::kDout, "dout for kernels", FormatOf(Fp8Slot::kDout), {}, kBackwardPass},
};

inline constexpr Fp8Operand kFp8InBlocks[] = {
    {Operand::kQ, InputTensor::kQ, "q for kernels", Dtype::kE4M3, MxAxis::kDim, 7},
    {Operand::kK, InputTensor::kK, "k for kernels", Dtype::kE4M3, MxAxis::kDim, 7},
    {Operand::kV, InputTensor::kV, "v for kernels", Dtype::kE4M3, MxAxis::kTokens,
     kForwardPass | kBackwardPass16},
    {Operand::kQOfDk, InputTensor::kQ, "q for dk", Dtype::kE4M3, MxAxis::kTokens, kBackwardPass},
    {Operand::kKOfDq, InputTensor::kK, "k for dq", Dtype::kE4M3, MxAxis::kTokens, kBackwardPass},
    {Operand::kVOfDp, InputTensor::kV, "v for dP", Dtype::kE4M3, MxAxis::kDim, kBackwardPass},
    {Operand::kDout, InputTensor::kDout, "dout for kernels", Dtype::kE4M3, MxAxis::kDim, kBackwardPass},
    {Operand::kDoutOfDv, InputTensor::kDout, "dout for dv", Dtype::kE4M3, MxAxis::kTokens, kBackwardPass},
};

constexpr std::span<const Fp8Operand> Fp8TableOf(const Fp8Recipe& recipe) {
  return InBlocks(recipe) ? std::span<const Fp8Operand>(kFp8InBlocks) : kFp8ByTensor;
}

constexpr Fp8Pass BackwardPassOf(const Fp8Recipe& recipe) {
  return recipe.bwd ? kBackwardPass : kBackwardPass16;
}

// Those of a case.
constexpr unsigned PassesOf(const Fp8Recipe& recipe, bool training) {
  return kForwardPass | (training ? BackwardPassOf(recipe) : 0u);
}

}  // namespace cppool::kernels
