// How a block of threads walks through its work: the ranges of the other side, cut into blocks, and what of
// them is visible.
#pragma once

#include <cstdint>

#include "kernels/attention/families/sm80/parameters.h"

namespace cppool::kernels::cuda {

// A tile in shared memory rather than in registers. All threads of the block take part, once.
__device__ __forceinline__ const Tile& SharedTile(const WorkView& work, int index) {
  alignas(Tile) __shared__ unsigned char bytes[sizeof(Tile)];  // a Tile would be initialised
  Tile& tile = *reinterpret_cast<Tile*>(bytes);
  if (threadIdx.x == 0) tile = work.tiles[index];
  __syncthreads();
  return tile;
}

// Walks over blocks of at most kBlock tokens of a tile's ranges, `passes` times over. `tile` is in shared
// memory and `work` a parameter: what is seldom needed takes no registers.
template <int kBlock>
class BlockCursor {
 public:
  __device__ __forceinline__ BlockCursor(const WorkView& work, const Tile& tile, int passes = 1)
      : work_(work),
        tile_(tile),
        index_(tile.range_begin),
        passes_left_(tile.range_begin < tile.range_end ? passes : 0) {
    if (passes_left_ > 0) Enter();
  }

  __device__ __forceinline__ bool valid() const { return passes_left_ > 0; }
  __device__ __forceinline__ int passes_left() const { return passes_left_; }  // this one included
  __device__ __forceinline__ std::int64_t row() const { return row_; }         // of the block's first token
  __device__ __forceinline__ int position() const { return position_; }        // of that token
  __device__ __forceinline__ int length() const { return min(left_, kBlock); }

  __device__ __forceinline__ void Advance() {
    left_ -= kBlock;
    if (left_ > 0) {
      row_ += static_cast<std::int64_t>(kBlock) * work_.other_step;
      position_ += kBlock;
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
  std::int64_t row_ = 0;
  int position_ = 0;
  int left_ = 0;
};

enum class Visibility { kNone, kSome, kAll };

// What of `keys` keys from position `key` and `queries` queries from position `query` a band lets through.
__device__ __forceinline__ Visibility Classify(const Band& band, int query, int queries, int key, int keys) {
  const int least = key - (query + queries - 1), most = key + keys - 1 - query;
  if (queries <= 0 || keys <= 0 || most < band.low || least > band.high) return Visibility::kNone;
  return least >= band.low && most <= band.high ? Visibility::kAll : Visibility::kSome;
}

}  // namespace cppool::kernels::cuda
