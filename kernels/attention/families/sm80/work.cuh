// The loop of a thread block over its work: the ranges of the other side, divided into blocks, and the
// visibility of a block.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm80/parameters.h"
#include "kernels/attention/families/sm80/tile.cuh"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels::cuda {

// Reads a tile into shared memory, to save registers. All threads of the block must call it, once per kernel.
__device__ __forceinline__ const Tile& SharedTile(const WorkView& work, int index) {
  alignas(Tile) __shared__ unsigned char
      bytes[sizeof(Tile)];  // not a Tile, which has initializers; shared variables may not
  Tile& tile = *reinterpret_cast<Tile*>(bytes);
  if (threadIdx.x == 0) tile = work.tiles[index];
  __syncthreads();
  return tile;
}

// Iterates `passes` times over the blocks of at most kBlock tokens of a tile's ranges. `tile` is in shared
// memory and `work` in constant memory, so that rarely used values take no registers. With kMayAlign and
// `aligned`, a block that does not begin at a multiple of kMxBlock positions ends at the next one, so that
// kMxBlock positions lie in the same columns of a block.
template <int kBlock, bool kMayAlign = false>
class BlockCursor {
 public:
  __device__ __forceinline__ BlockCursor(const WorkView& work, const Tile& tile, int passes = 1,
                                         bool aligned = false)
      : work_(work),
        tile_(tile),
        index_(tile.range_begin),
        passes_left_(tile.range_begin < tile.range_end ? passes : 0),
        aligned_(aligned) {
    if (passes_left_ > 0) Enter();
  }

  __device__ __forceinline__ bool valid() const { return passes_left_ > 0; }
  __device__ __forceinline__ int passes_left() const { return passes_left_; }  // including the current one
  __device__ __forceinline__ std::int64_t row() const { return row_; }   // row of the block's first token
  __device__ __forceinline__ int position() const { return position_; }  // position of that token
  __device__ __forceinline__ int length() const {
    if constexpr (kMayAlign) {
      if (aligned_ && position_ % kMxBlock != 0) return min(left_, kMxBlock - position_ % kMxBlock);
    }
    return min(left_, kBlock);
  }

  __device__ __forceinline__ void Advance() {
    const int count = kMayAlign ? length() : kBlock;
    left_ -= count;
    if (left_ > 0) {
      row_ += static_cast<std::int64_t>(count) * work_.other_step;
      position_ += count;
      return;
    }
    if (++index_ == tile_.range_end) {
      index_ = tile_.range_begin;
      --passes_left_;
      if (!valid()) return;
    }
    Enter();
  }

 private:
  __device__ __forceinline__ void Enter() {
    const Range range = work_.ranges[index_];
    row_ = range.row;
    position_ = range.position;
    left_ = range.length;
  }

  const WorkView& work_;
  const Tile& tile_;
  int index_;
  int passes_left_;
  [[maybe_unused]] bool aligned_;
  std::int64_t row_ = 0;
  int position_ = 0;
  int left_ = 0;
};

enum class Visibility { kNone, kSome, kAll };

// Which of the pairs of `keys` keys from position `key` on and `queries` queries from position `query` on are
// visible in a band.
__device__ __forceinline__ Visibility Classify(const Band& band, int query, int queries, int key, int keys) {
  const int least = key - (query + queries - 1), most = key + keys - 1 - query;
  if (queries <= 0 || keys <= 0 || most < band.low || least > band.high) return Visibility::kNone;
  return least >= band.low && most <= band.high ? Visibility::kAll : Visibility::kSome;
}

// Sets a warp's elements (queries by keys) of pairs that are not visible to `hidden`.
template <int kM, int kN>
__device__ __forceinline__ void MaskByQuery(Accumulator<kM, kN>& pairs, float hidden, const Band& band,
                                            int query, int key, int keys) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The visible columns of the row, relative to the first column of this thread.
      const int shift = query + m * 16 + half * 8 + lane / 4 - key, column = (lane % 4) * 2;
      const int low = max(band.low + shift, 0) - column, high = min(band.high + shift, keys - 1) - column;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = n * 8 + i;
          if (at < low || at > high) pairs.at[m][n][half * 2 + i] = hidden;
        }
    }
}

}  // namespace cppool::kernels::cuda
