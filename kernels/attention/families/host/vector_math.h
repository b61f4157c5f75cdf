// The inner loops of the host's attention on blocks of fp32 in scratch memory, compiled once for every
// processor of the architecture and once more for x86 with AVX2 and FMA, chosen at the first use. (Not by
// target_clones: their resolvers run before the sanitizers do.)
//
// A block is a tile of at most kTile tokens against at most kBlock tokens of the other side. The tile's
// tokens lie along the lanes, so that nothing is ever reduced or transposed within a vector: logits are
// [other][tile].
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace cppool::kernels::host {

inline constexpr int kTile = 64;
inline constexpr int kBlock = 64;
inline constexpr int kLanes = 16;  // leading dimensions and the width of products are padded to this
inline constexpr int kPad =
    16;  // and this is added to strides, so that rows do not fall on the same cache sets
inline constexpr int kLogitStride = kTile + kPad;

// c = a * b, or c += a * b. Element (i, x) of a is a[i * a_row + x * a_step]; b and c are row-major.
struct Product {
  int rows, columns, depth;  // columns: a multiple of kLanes
  const float* a;
  std::ptrdiff_t a_row, a_step;
  const float* b;
  std::ptrdiff_t b_stride;
  float* c;
  std::ptrdiff_t c_stride;
  bool accumulate;
};

// Token x of the other side is visible to token t of the tile when low <= position of x - position of t <=
// high.
struct Block {
  float* logits;  // [rows][kLogitStride], unscaled
  int rows;
  int lanes;  // a multiple of kLanes
  float scale;
  bool masked;  // false: every pair is visible, positions and band are not read
  std::int32_t low, high;
  const std::int32_t* row_position;   // [rows]
  const std::int32_t* lane_position;  // [lanes]
  const float* added = nullptr;       // [rows][kLogitStride], to the scaled logits; NULL: nothing
  // VectorMath::fp8 rounds P * p_scale to E4M3, and dS * ds_scale to E5M2 unless ds_scale is 0.
  float p_scale = 0, ds_scale = 0, ds_inverse = 0;
};

// For the two 16-bit types, instantiated for FP16 and BF16 of half.h; and for bf16 in memory with the casts
// of fp8.
struct HalfMath {
  void (*load)(const std::uint16_t* from, std::int64_t count, float* to);
  void (*store)(const float* from, std::int64_t count, std::uint16_t* to);
  // One step of the online softmax for each lane: `maximum` and `sum` go on, `correction` is what earlier
  // sums and outputs are to be multiplied with, and logits become exp(logit - maximum), rounded to the dtype
  // for the product with v.
  void (*softmax)(const Block&, float* maximum, float* sum, float* correction);
  // Probabilities from a row's lse and dS = P * (dP - delta): logits become P and dp becomes dS, both rounded
  // to the dtype. lse and delta are those of the lanes' tokens or of the rows' tokens.
  void (*gradient_by_lane)(const Block&, float* dp, const float* lse, const float* delta);
  void (*gradient_by_row)(const Block&, float* dp, const float* lse, const float* delta);
};

struct VectorMath {
  const char* name;  // "baseline", "avx2"
  void (*multiply)(const Product&);
  void (*scale)(float* to, float factor, int count);
  // to = to * to_scale + from * from_scale; they do not overlap.
  void (*blend)(float* to, float to_scale, const float* from, float from_scale, int count);
  // gradient_by_row of HalfMath with nothing rounded: dS as a bias gets it.
  void (*exact_gradient_by_row)(const Block&, float* dp, const float* lse, const float* delta);
  // Rounds `rows` rows of dS to E4M3 with a power of two for each lane: the block of fp8.h's E8M0Of.
  void (*round_block)(float* ds, int rows, int lanes);
  HalfMath fp16, bf16, fp8;
};

// That of a 16-bit type. Throws RuntimeError for another one.
const HalfMath& HalfMathOf(const VectorMath& math, Dtype dtype);

// The fastest that this processor has.
const VectorMath& BestVectorMath();
// All that this processor has, the baseline first; for tests. NULL past the last.
const VectorMath* VectorMathAt(int index);

}  // namespace cppool::kernels::host
