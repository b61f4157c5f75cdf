// What a recipe has in fp8: a row for each tensor of a step, with blocks for each operand made of one, with
// its format, its scales, when it is cast and what reads it. A tensor without a row stays in 16 bits. All
// that casts, moves, stores or lists tensors in fp8 goes through it. The checks know formats, scales and axes
// by themselves; which results are fp8 they have from here, by Fp8Step.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/fp8_recipe.h"
#include "kernels/attention/tensor.h"
#include "kernels/dtype.h"

namespace cppool::kernels {

// P and dS are never in memory.
enum class Fp8Tensor { kQ, kK, kV, kDout, kOut, kDq, kDk, kDv, kP, kDs };
inline constexpr std::size_t kFp8Tensors = 10;

// A tensor that a product of the kernel reads. The last four exist with casts in blocks alone: a block lies
// along the axis that a product sums over.
enum class Operand { kQ, kK, kV, kDout, kVOfDp, kQOfDk, kKOfDq, kDoutOfDv };
inline constexpr int kOperands = 8;

// One scale for all tensors of a slot.
enum class Fp8Slot { kQkv, kDout, kOut, kDs, kGradients };
inline constexpr int kFp8Slots = 5;

enum class Fp8Cast {
  kBeforeSteps,     // once: steps get the payload
  kBeforeSchedule,  // in each step, and the schedule moves the payload
  kWhereRead,       // the schedule moves 16 bits
  kInKernel,
  kAfterSchedule,  // from 16 bits
};

enum Fp8Reader : unsigned {
  kForwardPass = 1,
  kBackwardPass = 2,
  kBackwardPass16 = 4,  // a backward pass that is not fp8
  kForDelta = 8,        // rowsum(dO * O)
  kForCaller = 16,      // the result has the payload's values
};

struct Fp8Row {
  Fp8Tensor tensor = Fp8Tensor::kQ;
  Dtype format = Dtype::kE4M3;
  Fp8Cast cast = Fp8Cast::kWhereRead;
  unsigned readers = 0;  // Fp8Reader
  // Its scales: that of a slot, of the step or of one before it; those of blocks along an axis; or a
  // constant.
  std::optional<Fp8Slot> slot{};
  bool of_step_before = false;
  std::optional<MxAxis> axis{};
  float constant = 0;
  std::optional<Operand> operand{};  // as which kernels read it from memory

  constexpr bool of_queries() const {
    return tensor == Fp8Tensor::kQ || tensor == Fp8Tensor::kDout || tensor == Fp8Tensor::kOut ||
           tensor == Fp8Tensor::kDq;
  }
  constexpr bool of_v() const {
    return tensor == Fp8Tensor::kV || tensor == Fp8Tensor::kDout || tensor == Fp8Tensor::kOut ||
           tensor == Fp8Tensor::kDv;
  }
  // Whether this rank has a payload of all its own tokens.
  constexpr bool stored() const { return slot && cast != Fp8Cast::kInKernel; }
};

class Fp8Table {
 public:
  // Nothing is added that has no reader.
  constexpr void Add(const Fp8Row& row) {
    if (row.readers != 0) rows_.at(count_++) = row;
  }
  constexpr const Fp8Row* begin() const { return rows_.data(); }
  constexpr const Fp8Row* end() const { return rows_.data() + count_; }
  // The first row of the tensor; NULL: none.
  constexpr const Fp8Row* Find(Fp8Tensor tensor) const {
    for (const Fp8Row& row : *this) {
      if (row.tensor == tensor) return &row;
    }
    return nullptr;
  }
  constexpr const Fp8Row* Find(Fp8Slot slot) const {
    for (const Fp8Row& row : *this) {
      if (row.slot == slot) return &row;
    }
    return nullptr;
  }
  constexpr bool Has(Fp8Tensor tensor, Fp8Reader reader) const {
    const Fp8Row* const row = Find(tensor);
    return row && row->readers & reader;
  }

 private:
  static constexpr std::size_t kMostRows = 10;
  std::array<Fp8Row, kMostRows> rows_{};
  std::size_t count_ = 0;
};

// Whether O leaves as a payload while the backward pass has it in 16 bits: both are kept.
constexpr bool KeepsOut16(const Fp8Table& table, bool training) {
  return training && table.Has(Fp8Tensor::kOut, kForCaller) && !table.Has(Fp8Tensor::kOut, kForDelta);
}

constexpr Fp8Reader BackwardPassOf(const Fp8Recipe& recipe) {
  return recipe.bwd ? kBackwardPass : kBackwardPass16;
}

constexpr Fp8Table Fp8TableOf(const Fp8Recipe& recipe, bool training) {
  const unsigned backward = training && recipe.bwd ? kBackwardPass : 0u;
  const unsigned backward16 = training && !recipe.bwd ? kBackwardPass16 : 0u;
  const unsigned all = kForwardPass | backward | backward16;
  Fp8Table table;
  table.Add({.tensor = Fp8Tensor::kP,
             .cast = Fp8Cast::kInKernel,
             .readers = kForwardPass | backward,
             .constant = PScale(recipe)});
  if (InBlocks(recipe)) {
    const auto add = [&](Fp8Tensor tensor, MxAxis axis, Operand operand, unsigned readers) {
      table.Add({.tensor = tensor, .readers = readers, .axis = axis, .operand = operand});
    };
    add(Fp8Tensor::kQ, MxAxis::kDim, Operand::kQ, all);
    add(Fp8Tensor::kK, MxAxis::kDim, Operand::kK, all);
    add(Fp8Tensor::kV, MxAxis::kTokens, Operand::kV, kForwardPass | backward16);
    add(Fp8Tensor::kQ, MxAxis::kTokens, Operand::kQOfDk, backward);
    add(Fp8Tensor::kK, MxAxis::kTokens, Operand::kKOfDq, backward);
    add(Fp8Tensor::kV, MxAxis::kDim, Operand::kVOfDp, backward);
    add(Fp8Tensor::kDout, MxAxis::kDim, Operand::kDout, backward);
    add(Fp8Tensor::kDout, MxAxis::kTokens, Operand::kDoutOfDv, backward);
    // Along keys for dq, along queries for dk.
    table.Add(
        {.tensor = Fp8Tensor::kDs, .cast = Fp8Cast::kInKernel, .readers = backward, .axis = MxAxis::kTokens});
    return table;
  }
  const bool delayed = recipe.scaling_mode == ScalingMode::kDelayed;
  const auto add = [&](Fp8Tensor tensor, Dtype format, Fp8Cast cast, unsigned readers, Fp8Slot slot,
                       std::optional<Operand> operand = {}) {
    table.Add({.tensor = tensor,
               .format = format,
               .cast = cast,
               .readers = readers,
               .slot = slot,
               .of_step_before = delayed || slot == Fp8Slot::kDs,
               .operand = operand});
  };
  const Fp8Cast before = recipe.mha ? Fp8Cast::kBeforeSteps : Fp8Cast::kBeforeSchedule;
  add(Fp8Tensor::kQ, Dtype::kE4M3, before, all, Fp8Slot::kQkv, Operand::kQ);
  add(Fp8Tensor::kK, Dtype::kE4M3, before, all, Fp8Slot::kQkv, Operand::kK);
  add(Fp8Tensor::kV, Dtype::kE4M3, before, all, Fp8Slot::kQkv, Operand::kV);
  add(Fp8Tensor::kDout, Dtype::kE5M2, before, backward ? kBackwardPass | kForDelta : 0, Fp8Slot::kDout,
      Operand::kDout);
  add(Fp8Tensor::kDs, Dtype::kE5M2, Fp8Cast::kInKernel, backward, Fp8Slot::kDs);
  const unsigned leaves = delayed || recipe.mha ? kForCaller : 0u;
  const unsigned of_delta = training && (delayed || (recipe.bwd && !recipe.f16_o)) ? kForDelta : 0u;
  add(Fp8Tensor::kOut, Dtype::kE4M3, Fp8Cast::kAfterSchedule, leaves | of_delta, Fp8Slot::kOut);
  for (const Fp8Tensor gradient : {Fp8Tensor::kDq, Fp8Tensor::kDk, Fp8Tensor::kDv})
    add(gradient, Dtype::kE5M2, Fp8Cast::kAfterSchedule, backward ? leaves : 0, Fp8Slot::kGradients);
  return table;
}

// The dtypes of q, k, v and dout where a payload is moved or handed over in place of each that has one.
constexpr TensorDtypes PayloadDtypes(TensorDtypes dtypes, const Fp8Table& table) {
  for (const Fp8Row& row : table) {
    if (!row.operand || !row.slot) continue;
    (row.tensor == Fp8Tensor::kQ   ? dtypes.q
     : row.tensor == Fp8Tensor::kK ? dtypes.k
     : row.tensor == Fp8Tensor::kV ? dtypes.v
                                   : dtypes.dout) = row.format;
  }
  return dtypes;
}

}  // namespace cppool::kernels
