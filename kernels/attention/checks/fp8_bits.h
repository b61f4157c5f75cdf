// What the checks compare, element by element, of what a case in fp8 has quantized: on the host in loops, on
// a GPU in one kernel for each check. Written from the definitions of the formats in fp64, and independent of
// the casts that they judge.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <variant>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/problem/row_tiles.h"
#include "kernels/attention/tensor.h"
#include "kernels/half.h"
#include "kernels/host_device.h"
#include "kernels/numerics/fp8.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels {

struct BitsTally {
  std::uint64_t wrong = 0, count = 0;
  double largest = 0;  // of the finite differences

  // Expects the same value with the same sign of zero, or NaN for NaN.
  CPPOOL_HOST_DEVICE void Compare(double expected, double stored) {
    ++count;
    const auto bits = [](double x) { return __builtin_bit_cast(std::uint64_t, x); };
    const bool nans = expected != expected && stored != stored;
    if (nans || bits(expected) == bits(stored)) return;
    ++wrong;
    const double apart = expected < stored ? stored - expected : expected - stored;
    if (apart <= 0x1p1000) Raise(apart);
  }
  CPPOOL_HOST_DEVICE void Raise(double value) { largest = value > largest ? value : largest; }
  CPPOOL_HOST_DEVICE void Add(const BitsTally& part) {
    wrong += part.wrong;
    count += part.count;
    Raise(part.largest);
  }
};

namespace fp8_bits {

// A check visits pieces of at most so many elements: neighbours, or those of a block.
inline constexpr int kPiece = kMxBlock;

CPPOOL_HOST_DEVICE inline std::int64_t Pieces(int dim) { return (dim + kPiece - 1) / kPiece; }
CPPOOL_HOST_DEVICE inline double Magnitude(double x) { return x < 0 ? -x : x; }

// Returns the stored value of an element, without its scale.
CPPOOL_HOST_DEVICE inline double ValueAt(Dtype dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case Dtype::kE4M3:
      return E4M3ToFloat(static_cast<const std::uint8_t*>(data)[index]);
    case Dtype::kE5M2:
      return E5M2ToFloat(static_cast<const std::uint8_t*>(data)[index]);
    case Dtype::kFp16:
      return FP16ToFloat(static_cast<const std::uint16_t*>(data)[index]);
    case Dtype::kFp32:
      return static_cast<const float*>(data)[index];
    case Dtype::kFp64:
      return static_cast<const double*>(data)[index];
    case Dtype::kBf16:
      break;
  }
  return BF16ToFloat(static_cast<const std::uint16_t*>(data)[index]);
}

// To nearest even, saturating; a zero has the sign of `value`.
CPPOOL_HOST_DEVICE inline double InFp8(Dtype format, float value) {
  const double rounded = RoundTo(format, value);
  return rounded == 0 ? value * 0.0 : rounded;
}
CPPOOL_HOST_DEVICE inline double InBf16(float value) { return BF16ToFloat(FloatToBF16(value)); }

// The rows with tokens of a tensor [rows, heads, dim] that is part of a whole one.
struct Rows {
  const std::int64_t* rows;  // [count]
  std::int64_t count;
  const std::int64_t* whole;  // [of all rows]: the row of the whole tensor with the same token
};

// An operand, as kernels read it, and the input that it was made of.
struct Operand {
  Rows rows;
  const std::uint16_t* input;  // bf16 [whole rows, all_heads, dim]
  Dtype format;
  const std::uint8_t* payload;  // [rows, heads, dim]
  const std::uint16_t* values;  // bf16, likewise
  int all_heads, head0, heads, dim;

  CPPOOL_HOST_DEVICE std::int64_t At(std::int64_t row, int head, int d) const {
    return (row * heads + head) * dim + d;
  }
  CPPOOL_HOST_DEVICE float Input(std::int64_t row, int head, int d) const {
    return BF16ToFloat(input[(rows.whole[row] * all_heads + head0 + head) * dim + d]);
  }
};

// With one scale: the payload is the cast of input * scale, a product in fp32; the value is the payload's
// times `inverse`.
struct ScaledOperand : Operand {
  float scale, inverse;

  CPPOOL_HOST_DEVICE std::int64_t items() const { return rows.count * heads * Pieces(dim); }
  CPPOOL_HOST_DEVICE void Check(std::int64_t item, BitsTally& tally) const {
    const int begin = static_cast<int>(item % Pieces(dim)) * kPiece;
    const std::int64_t vector = item / Pieces(dim);
    const std::int64_t row = rows.rows[vector / heads];
    const int head = static_cast<int>(vector % heads);
    for (int d = begin; d < (begin + kPiece < dim ? begin + kPiece : dim); ++d) {
      const float scaled = Input(row, head, d) * scale;
      const double stored = ValueAt(format, payload, At(row, head, d));
      tally.Compare(InFp8(format, scaled), stored);
      if (!values) continue;  // the kernel has read the payload
      tally.Compare(InBf16(static_cast<float>(stored) * inverse), BF16ToFloat(values[At(row, head, d)]));
    }
  }
};

// In blocks: the exponent is the smallest e with amax <= 448 * 2^(e - 127), the payload the cast of input /
// 2^(e - 127), and the value their product.
struct BlockOperand : Operand {
  MxAxis axis;
  const std::uint8_t* exponents;  // as in MxTensor
  const RowTile* blocks;          // along the tokens
  std::int64_t block_count;
  std::int64_t row_step;

  CPPOOL_HOST_DEVICE std::int64_t items() const {
    return axis == MxAxis::kTokens ? block_count * heads * dim : rows.count * heads * Pieces(dim);
  }
  CPPOOL_HOST_DEVICE static int ExpectedExponent(double amax) {
    if (amax > 0x1p200) return 0xfe;  // infinity
    if (amax == 0) return 0;
    int e = 0;
    double power = 0x1p-127;
    while (448 * power < amax) power *= 2, ++e;
    return e;
  }
  CPPOOL_HOST_DEVICE void Check(std::int64_t item, BitsTally& tally) const {
    const bool of_tokens = axis == MxAxis::kTokens;
    const std::int64_t columns = of_tokens ? dim : Pieces(dim);
    const std::int64_t vector = item / columns;
    const int head = static_cast<int>(vector % heads);
    const int d = static_cast<int>(item % columns) * (of_tokens ? 1 : kPiece);
    const RowTile block =
        of_tokens ? blocks[vector / heads] : RowTile{rows.rows[vector / heads], std::int64_t{kPiece}};
    const auto row = [&](std::int64_t i) { return of_tokens ? block.row + i * row_step : block.row; };
    const auto column = [&](std::int64_t i) { return of_tokens ? d : d + static_cast<int>(i); };
    double most = 0;
    for (std::int64_t i = 0; i < block.length; ++i) {
      const double size = Magnitude(Input(row(i), head, column(i)));
      if (size > most) most = size;  // NaN does not count
    }
    const int exponent = ExpectedExponent(most);
    tally.Compare(exponent, exponents[of_tokens ? item : (block.row * heads + head) * columns + d / kPiece]);
    double power = 1;
    for (int e = exponent; e > 127; --e) power *= 2;
    for (int e = exponent; e < 127; ++e) power /= 2;
    for (std::int64_t i = 0; i < block.length; ++i) {
      const std::int64_t at = At(row(i), head, column(i));
      const double stored = E4M3ToFloat(payload[at]);
      tally.Compare(InFp8(Dtype::kE4M3, static_cast<float>(Input(row(i), head, column(i)) / power)), stored);
      tally.Compare(InBf16(static_cast<float>(stored * power)), BF16ToFloat(values[at]));
    }
  }
};

// O beside its payload: the same where results leave as payloads, else within half a unit of the cast.
struct Out {
  Rows rows;
  const std::uint8_t* payload;  // E4M3 [rows, columns]
  const std::uint16_t* out;     // bf16
  int columns;
  float inverse;
  bool same;

  CPPOOL_HOST_DEVICE std::int64_t items() const { return rows.count * Pieces(columns); }
  CPPOOL_HOST_DEVICE void Check(std::int64_t item, BitsTally& tally) const {
    const int begin = static_cast<int>(item % Pieces(columns)) * kPiece;
    const std::int64_t row = rows.rows[item / Pieces(columns)];
    for (int i = begin; i < (begin + kPiece < columns ? begin + kPiece : columns); ++i) {
      const float value = E4M3ToFloat(payload[row * columns + i]) * inverse;
      const double stored = BF16ToFloat(out[row * columns + i]);
      if (same) {
        tally.Compare(InBf16(value), stored);
      } else {
        tally.Compare(
            1, Magnitude(value - stored) <= 0x1.0001p-4 * Magnitude(stored) + 0x1.0001p-10 * inverse ? 1 : 0);
      }
    }
  }
};

// delta = rowsum(dO * O), of sums in fp32.
struct Delta {
  Rows rows;
  TensorRef out, dout;  // [rows, heads, dim]; their scales are these:
  double out_scale, dout_scale;
  const float* delta;  // [rows, heads]
  int heads, dim;

  CPPOOL_HOST_DEVICE std::int64_t items() const { return rows.count * heads; }
  CPPOOL_HOST_DEVICE void Check(std::int64_t item, BitsTally& tally) const {
    const std::int64_t vector = rows.rows[item / heads] * heads + item % heads;
    double sum = 0, size = 0;
    for (int d = 0; d < dim; ++d) {
      const double term = ValueAt(out.dtype, out.data, vector * dim + d) * out_scale *
                          (ValueAt(dout.dtype, dout.data, vector * dim + d) * dout_scale);
      sum += term;
      size += Magnitude(term);
    }
    const double stored = delta[vector];
    // Terms below fp32's normal numbers may be lost.
    tally.Compare(Magnitude(stored - sum) <= 0x1p-16 * size + dim * 0x1p-126 ? stored : sum, stored);
  }
};

// Not a check: tally.largest becomes the amax of bf16 rows; NaN does not count.
struct Amax {
  Rows rows;
  const std::uint16_t* values;  // [rows, columns]
  std::int64_t columns;

  CPPOOL_HOST_DEVICE std::int64_t items() const { return rows.count * ((columns + kPiece - 1) / kPiece); }
  CPPOOL_HOST_DEVICE void Check(std::int64_t item, BitsTally& tally) const {
    const std::int64_t pieces = (columns + kPiece - 1) / kPiece, begin = item % pieces * kPiece;
    const std::int64_t end = begin + kPiece < columns ? begin + kPiece : columns;
    for (std::int64_t i = begin; i < end; ++i)
      tally.Raise(Magnitude(BF16ToFloat(values[rows.rows[item / pieces] * columns + i])));
  }
};

}  // namespace fp8_bits

struct BitsCheck {
  std::variant<fp8_bits::ScaledOperand, fp8_bits::BlockOperand, fp8_bits::Out, fp8_bits::Delta,
               fp8_bits::Amax>
      what;
};

}  // namespace cppool::kernels
