#include <algorithm>
#include <cmath>

#include "kernels/attention/families/host/attention_tiles.h"
#include "kernels/attention/families/host/tile_scratch.h"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels::host {
namespace {

// What both backward passes have. tile_a and tile_b hold what the tile's logits and dP are made of,
// transposed.
class BackwardTile {
 public:
  BackwardTile(const KernelShape& shape, const BackwardArgs& args, const WorkList& list)
      : shape_(shape),
        args_(args),
        list_(list),
        math_(BestVectorMath()),
        half_(args.casts.p_scale != 0 ? math_.fp8 : HalfMathOf(math_, shape.dtypes.q)) {}

 protected:
  bool ds_blocks() const { return args_.casts.ds_blocks; }

  // Rounds dS in blocks: rows of one head whose positions lie in the same 32. `tokens`: rows of a head.
  void RoundBlocks(int rows, int tokens, int lanes) {
    for (int begin = 0, end = 0; begin < rows; begin = end) {
      do {
        ++end;
      } while (end < rows && end % tokens != 0 && s_.row_position[end] % kMxBlock != 0);
      math_.round_block(s_.dp + begin * kLogitStride, end - begin, lanes);
    }
  }

  // Loads lse and delta of a block's or a tile's queries.
  void LoadStatistics(const TokenBlock& queries) {
    for (int i = 0; i < queries.rows(); ++i) {
      s_.lse[i] = args_.lse[queries.Index(i)];
      s_.delta[i] = args_.delta[queries.Index(i)];
    }
  }

  // logits and dP of a block whose tokens are loaded in block_a and block_b.
  void Products(int rows, int lanes) {
    math_.multiply({rows, lanes, shape_.dim_qk, s_.block_a, stride_qk_, 1, s_.tile_a, kLogitStride, s_.logits,
                    kLogitStride, false});
    math_.multiply({rows, lanes, shape_.dim_v, s_.block_b, stride_v_, 1, s_.tile_b, kLogitStride, s_.dp,
                    kLogitStride, false});
  }

  // Positions and bias of a tile of queries or keys (`self`) against a block of the other side.
  Block LogitBlock(Side self, const Tile& tile, const Range& range, const TokenBlock& queries, int rows,
                   int lanes) {
    const bool by_query = self == Side::kQuery;
    const Band seen = SeenFrom(self, tile.band);
    const Fp8Casts& casts = args_.casts;
    return {
        s_.logits,
        rows,
        lanes,
        shape_.scale,
        IsMasked(seen, tile.position, tile.length, range.position, range.length),
        seen.low,
        seen.high,
        s_.row_position,
        s_.lane_position,
        LoadBias(half_, args_.bias, self, tile, queries, by_query ? tile.position : range.position,
                 by_query ? range.position : tile.position, by_query ? range.length : tile.length, s_.added),
        casts.p_scale,
        casts.ds_scale ? casts.ds_scale[0] : 0,
        casts.ds_scale ? casts.ds_scale[1] : 0};
  }

  // result[lane] += sum over rows of factor[row][lane] * block[row].
  void AddProduct(int lanes, int dim, int rows, const float* factor, const float* block, float* result) {
    math_.multiply({lanes, dim, rows, factor, 1, kLogitStride, block, dim + kPad, result, dim + kPad, true});
  }

  const KernelShape& shape_;
  const BackwardArgs& args_;
  const WorkList& list_;
  const VectorMath& math_;
  const HalfMath& half_;
  Scratch& s_ = ThreadScratch();
  const int stride_qk_ = shape_.dim_qk + kPad;
  const int stride_v_ = shape_.dim_v + kPad;
};

// Computes dq of one tile of queries, with as many heads of one key/value head as fit.
class QueryTile : public BackwardTile {
 public:
  using BackwardTile::BackwardTile;

  void Run(const Tile& tile, int kv_head, int head, int count) {
    const TokenBlock queries{tile.row, list_.self_step, tile.length, shape_.heads, head, count};
    const int rows = queries.rows();
    const int lanes = RoundUp(rows, kLanes);
    LoadTransposed(half_, queries, shape_.dim_qk, args_.q, s_.block_a, s_.tile_a);
    LoadTransposed(half_, queries, shape_.dim_v, args_.dout, s_.block_b, s_.tile_b);
    FillPositions(tile.position, queries, s_.lane_position);
    LoadStatistics(queries);
    std::fill_n(s_.result_a, rows * stride_qk_, 0.0f);
    ForEachBlock(list_, tile, ds_blocks(), [&](const Range& range) {
      const TokenBlock keys{range.row, list_.other_step, range.length, shape_.kv_heads, kv_head, 1};
      LoadBlock(half_, keys, shape_.dim_qk, args_.k, s_.block_a);
      LoadBlock(half_, keys, shape_.dim_v, args_.v, s_.block_b);
      FillPositions(range.position, keys, s_.row_position);
      Products(range.length, lanes);
      half_.gradient_by_lane(LogitBlock(Side::kQuery, tile, range, queries, range.length, lanes), s_.dp,
                             s_.lse, s_.delta);
      if (ds_blocks()) {
        RoundBlocks(range.length, range.length, lanes);
        LoadBlock(half_, keys, shape_.dim_qk, args_.k_of_dq, s_.block_a);
      }
      if (args_.casts.amax_ds) RaiseAmax(range.length, rows);
      AddProduct(rows, shape_.dim_qk, range.length, s_.dp, s_.block_a, s_.result_a);
    });
    for (int i = 0; i < rows; ++i) {
      FinishGradient(math_, half_, args_.query, shape_.scale, shape_.dim_qk, queries.Index(i),
                     s_.result_a + i * stride_qk_, args_.dq_accumulator, args_.dq);
    }
  }

 private:
  void RaiseAmax(int rows, int lanes) {
    float most = *args_.casts.amax_ds;
    for (int row = 0; row < rows; ++row) {
      for (int lane = 0; lane < lanes; ++lane)
        most = std::max(most, std::abs(s_.dp[row * kLogitStride + lane]));
    }
    *args_.casts.amax_ds = most;
  }
};

// A tile of keys and one key/value head, against blocks of the query heads that read it.
class KeySideTile : public BackwardTile {
 protected:
  using BackwardTile::BackwardTile;

  void LoadKeys(const Tile& tile, const TokenBlock& keys) {
    LoadTransposed(half_, keys, shape_.dim_qk, args_.k, s_.block_a, s_.tile_a);
    LoadTransposed(half_, keys, shape_.dim_v, args_.v, s_.block_b, s_.tile_b);
    FillPositions(tile.position, keys, s_.lane_position);
  }

  // Calls attend(Range, TokenBlock of queries, Block of logits) with logits and dP of each block.
  template <typename Function>
  void ForEachQueryBlock(const Tile& tile, int kv_head, Function&& attend) {
    const HeadSpan span = QueryHeadsOf(shape_, kv_head);
    ForEachBlock(list_, tile, ds_blocks(), [&](const Range& range) {
      const int at_once = std::max(1, kBlock / range.length);
      for (int head = span.begin; head < span.end; head += at_once) {
        const TokenBlock queries{range.row,    list_.other_step,
                                 range.length, shape_.heads,
                                 head,         std::min(at_once, span.end - head)};
        const int lanes = RoundUp(tile.length, kLanes);
        LoadBlock(half_, queries, shape_.dim_qk, args_.q, s_.block_a);
        LoadBlock(half_, queries, shape_.dim_v, args_.dout, s_.block_b);
        FillPositions(range.position, queries, s_.row_position);
        LoadStatistics(queries);
        Products(queries.rows(), lanes);
        attend(range, queries, LogitBlock(Side::kKey, tile, range, queries, queries.rows(), lanes));
      }
    });
  }
};

// Computes dk and dv, summed over the query heads.
class KeyTile : public KeySideTile {
 public:
  using KeySideTile::KeySideTile;

  void Run(const Tile& tile, int kv_head) {
    const TokenBlock keys{tile.row, list_.self_step, tile.length, shape_.kv_heads, kv_head, 1};
    LoadKeys(tile, keys);
    std::fill_n(s_.result_a, tile.length * stride_qk_, 0.0f);
    std::fill_n(s_.result_b, tile.length * stride_v_, 0.0f);
    ForEachQueryBlock(tile, kv_head, [&](const Range&, const TokenBlock& queries, const Block& block) {
      half_.gradient_by_row(block, s_.dp, s_.lse, s_.delta);
      if (ds_blocks()) {
        RoundBlocks(queries.rows(), queries.tokens, RoundUp(tile.length, kLanes));
        LoadBlock(half_, queries, shape_.dim_qk, args_.q_of_dk, s_.block_a);
        LoadBlock(half_, queries, shape_.dim_v, args_.dout_of_dv, s_.block_b);
      }
      AddProduct(tile.length, shape_.dim_v, queries.rows(), s_.logits, s_.block_b, s_.result_b);
      AddProduct(tile.length, shape_.dim_qk, queries.rows(), s_.dp, s_.block_a, s_.result_a);
    });
    for (int i = 0; i < tile.length; ++i) {
      FinishGradient(math_, half_, args_.key, shape_.scale, shape_.dim_qk, keys.Index(i),
                     s_.result_a + i * stride_qk_, args_.dk_accumulator, args_.dk);
      FinishGradient(math_, half_, args_.key, 1.0f, shape_.dim_v, keys.Index(i), s_.result_b + i * stride_v_,
                     args_.dv_accumulator, args_.dv);
    }
  }
};

// dbias: dS as it is, by rows of neighbouring keys.
class BiasTile : public KeySideTile {
 public:
  using KeySideTile::KeySideTile;

  void Run(const Tile& tile, int kv_head, const BiasGradient& gradient) {
    LoadKeys(tile, {tile.row, list_.self_step, tile.length, shape_.kv_heads, kv_head, 1});
    ForEachQueryBlock(tile, kv_head, [&](const Range& range, const TokenBlock& queries, const Block& block) {
      math_.exact_gradient_by_row(block, s_.dp, s_.lse, s_.delta);
      for (int i = 0; i < queries.rows(); ++i) {
        const int head = queries.head + i / queries.tokens;
        const std::int32_t position = range.position + i % queries.tokens;
        math_.blend(gradient.sum + tile.sequence * gradient.batch_stride + head * gradient.head_stride +
                        position * gradient.query_stride + tile.position,
                    1.0f, s_.dp + i * kLogitStride, 1.0f, tile.length);
      }
    });
  }
};

bool IsIdle(const Tile& tile, const GradientPass& pass) {
  return tile.range_begin == tile.range_end && !pass.first && !pass.last;
}

}  // namespace

void AttendBackwardQuery(const KernelShape& shape, const BackwardArgs& args, const WorkList& list) {
  QueryTile pass(shape, args, list);
  for (const Tile& tile : list.tiles) {
    if (IsIdle(tile, args.query)) continue;
    const int at_once = std::max(1, kTile / tile.length);
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      const HeadSpan span = QueryHeadsOf(shape, kv_head);
      for (int head = span.begin; head < span.end; head += at_once) {
        pass.Run(tile, kv_head, head, std::min(at_once, span.end - head));
      }
    }
  }
}

void AttendBackwardKey(const KernelShape& shape, const BackwardArgs& args, const WorkList& list) {
  KeyTile pass(shape, args, list);
  for (const Tile& tile : list.tiles) {
    if (IsIdle(tile, args.key)) continue;
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) pass.Run(tile, kv_head);
  }
}

void AttendBackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                        const WorkList& list) {
  BiasTile pass(shape, args, list);
  for (const Tile& tile : list.tiles) {
    if (tile.range_begin == tile.range_end) continue;
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) pass.Run(tile, kv_head, gradient);
  }
}

}  // namespace cppool::kernels::host
