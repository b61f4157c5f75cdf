// What the passes of attention_tiles.h share: scratch memory, the tokens of a tile or block in fp32, and the
// walk over a tile's ranges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/families/host/vector_math.h"
#include "kernels/attention/layout.h"
#include "kernels/numerics/half.h"

namespace cppool::kernels::host {

inline constexpr int kMaxDim = 256;
inline constexpr int kMaxStride = kMaxDim + kPad;

// Several heads of the same tokens lie one after another, in the rows of a block and in the lanes of a tile.
struct Scratch {
  // The tile's results, [tokens][dim + kPad], and its operands, [dim][kLogitStride].
  alignas(64) float result_a[kMaxStride * kTile];
  alignas(64) float result_b[kMaxStride * kTile];
  alignas(64) float tile_a[kMaxDim * kLogitStride];
  alignas(64) float tile_b[kMaxDim * kLogitStride];
  // The block of the other side, [tokens][dim + kPad].
  alignas(64) float block_a[kMaxStride * kBlock];
  alignas(64) float block_b[kMaxStride * kBlock];
  alignas(64) float logits[kBlock * kLogitStride];
  alignas(64) float dp[kBlock * kLogitStride];
  alignas(64) float added[kBlock * kLogitStride];
  // Each token of the tile is a lane, and each of the block a row.
  alignas(64) std::int32_t lane_position[kTile];
  alignas(64) std::int32_t row_position[kBlock];
  alignas(64) float maximum[kTile], sum[kTile], correction[kTile];
  alignas(64) float lse[kTile], delta[kTile];
};

// The calling thread's own, kept until the thread ends: a stream's thread works on one call at a time.
inline Scratch& ThreadScratch() {
  thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  return *scratch;
}

inline int RoundUp(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// `tokens` rows of a tensor [rows, heads, dim], of `count` heads: head after head, each with its tokens.
struct TokenBlock {
  std::int64_t row;
  std::int64_t step;
  int tokens;
  int heads;  // of the tensor
  int head;   // the first
  int count;

  int rows() const { return count * tokens; }
  // Returns where row i of the block is in [rows, heads].
  std::int64_t Index(int i) const { return (row + i % tokens * step) * heads + head + i / tokens; }
};

// Loads the block to [rows][dim + kPad] and multiplies it with the tensor's scale.
inline void LoadBlock(const HalfMath& math, const TokenBlock& block, int dim, const TensorRef& tensor,
                      float* to) {
  const auto* from = static_cast<const std::uint16_t*>(tensor.data);
  for (int i = 0; i < block.rows(); ++i) {
    float* row = to + i * (dim + kPad);
    math.load(from + block.Index(i) * dim, dim, row);
    if (tensor.scale) BestVectorMath().scale(row, *tensor.scale, dim);
  }
}

// Loads the block to [dim][kLogitStride], by way of `temporary`; lanes past the rows become 0.
inline void LoadTransposed(const HalfMath& math, const TokenBlock& block, int dim, const TensorRef& tensor,
                           float* temporary, float* to) {
  LoadBlock(math, block, dim, tensor, temporary);
  const int rows = block.rows();
  for (int i = 0; i < RoundUp(rows, kLanes); ++i) {
    for (int d = 0; d < dim; ++d)
      to[d * kLogitStride + i] = i < rows ? temporary[i * (dim + kPad) + d] : 0.0f;
  }
}

// Positions of a block's rows, head after head.
inline void FillPositions(std::int32_t first, const TokenBlock& block, std::int32_t* positions) {
  for (int i = 0; i < block.rows(); ++i) positions[i] = first + i % block.tokens;
}

// The band as seen from the tile: a token of the other side minus one of the tile.
inline Band SeenFrom(Side self, Band band) {
  return self == Side::kQuery ? band : Band{-band.high, -band.low};
}

// Whether some pair of a block is not visible.
inline bool IsMasked(Band seen, std::int32_t self, int self_count, std::int32_t other, int other_count) {
  return other - (self + self_count - 1) < seen.low || other + other_count - 1 - self > seen.high;
}

// Calls attend(Range) for a tile's ranges, cut to at most kBlock tokens; `aligned`: where a position is a
// multiple of kBlock.
template <typename Function>
void ForEachBlock(const WorkList& list, const Tile& tile, bool aligned, Function&& attend) {
  for (std::int32_t i = tile.range_begin; i < tile.range_end; ++i) {
    const Range& range = list.ranges[static_cast<std::size_t>(i)];
    std::int32_t length = 0;
    for (std::int32_t done = 0; done < range.length; done += length) {
      const std::int32_t position = range.position + done;
      length = std::min(range.length - done, kBlock - (aligned ? position % kBlock : 0));
      attend(Range{range.row + std::int64_t{done} * list.other_step, position, length});
    }
  }
}

// What `bias` adds to the scaled logits of these queries, from position `query` on, and `count` (at most
// kBlock) keys from position `key` on: logits [key][query] seen from a tile of queries, [query][key] seen
// from one of keys. Returns `to`, or NULL when there is no bias.
inline const float* LoadBias(const HalfMath& math, const BiasArgs& bias, Side self, const Tile& tile,
                             const TokenBlock& queries, std::int32_t query, std::int32_t key, int count,
                             float* to) {
  if (!bias.tensor.data && !bias.alibi_slopes) return nullptr;
  const int query_step = self == Side::kQuery ? 1 : kLogitStride;
  const int key_step = self == Side::kQuery ? kLogitStride : 1;
  float values[kBlock];
  for (int i = 0; i < queries.rows(); ++i) {
    const int head = queries.head + i / queries.tokens;
    const std::int32_t position = query + i % queries.tokens;
    if (bias.tensor.data) {
      math.load(static_cast<const std::uint16_t*>(bias.tensor.data) + tile.sequence * bias.batch_stride +
                    head * bias.head_stride + position * bias.query_stride + key,
                count, values);
    } else {
      const std::int32_t distance = key - position - tile.band.diagonal;  // of the first key
      for (int x = 0; x < count; ++x) {
        values[x] = -bias.alibi_slopes[head] * static_cast<float>(std::abs(distance + x));
      }
    }
    for (int x = 0; x < count; ++x) to[i * query_step + x * key_step] = values[x];
  }
  return to;
}

// The query heads [begin, end) of the call read its key/value head `kv_head`.
struct HeadSpan {
  int begin, end;
};
inline HeadSpan QueryHeadsOf(const KernelShape& shape, int kv_head) {
  const std::int64_t begin = std::int64_t{shape.kv_head0 + kv_head} * shape.group - shape.head0;
  return {static_cast<int>(std::clamp<std::int64_t>(begin, 0, shape.heads)),
          static_cast<int>(std::clamp<std::int64_t>(begin + shape.group, 0, shape.heads))};
}

// Row i of a result times `scale`, plus what earlier calls left; rounded to `out` when last, else kept.
inline void FinishGradient(const VectorMath& math, const HalfMath& half, const GradientPass& pass,
                           float scale, int dim, std::int64_t index, float* result, float* accumulator,
                           const TensorOut& out) {
  math.scale(result, scale, dim);
  if (!pass.first) math.blend(result, 1.0f, accumulator + index * dim, 1.0f, dim);
  if (pass.last) {
    half.store(result, dim, static_cast<std::uint16_t*>(out.data) + index * dim);
  } else {
    std::copy_n(result, dim, accumulator + index * dim);
  }
}

}  // namespace cppool::kernels::host
