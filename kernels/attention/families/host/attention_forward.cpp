#include <cmath>
#include <limits>

#include "kernels/attention/families/host/attention_tiles.h"
#include "kernels/attention/families/host/tile_scratch.h"

namespace cppool::kernels::host {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Computes one tile of queries, with as many heads of one key/value head as fit.
class ForwardTile {
 public:
  ForwardTile(const KernelShape& shape, const ForwardArgs& args, const WorkList& list)
      : shape_(shape),
        args_(args),
        list_(list),
        math_(BestVectorMath()),
        half_(args.p_scale != 0 ? math_.fp8 : HalfMathOf(math_, shape.dtypes.q)) {}

  void Run(const Tile& tile, int kv_head, int head, int count) {
    const TokenBlock queries{tile.row, list_.self_step, tile.length, shape_.heads, head, count};
    const int rows = queries.rows();
    LoadTransposed(half_, queries, shape_.dim_qk, args_.q, s_.block_a, s_.tile_a);
    FillPositions(tile.position, queries, s_.lane_position);
    std::fill_n(s_.maximum, kTile, kMinusInfinity);
    std::fill_n(s_.sum, kTile, 0.0f);
    std::fill_n(s_.result_a, rows * (shape_.dim_v + kPad), 0.0f);
    ForEachBlock(list_, tile, false, [&](const Range& range) { Attend(tile, queries, kv_head, range); });
    for (int i = 0; i < rows; ++i) Finish(i, head + i / tile.length, queries.Index(i));
  }

 private:
  void Attend(const Tile& tile, const TokenBlock& queries, int kv_head, const Range& range) {
    const ArrivingKeys& arriving = args_.arriving;
    const std::int64_t block = arriving.block_rows > 0 ? range.row / arriving.block_rows : 0;
    if (block > 0) arriving.arrivals.await(arriving.Piece(block, kv_head));
    const TensorRef &k = block > 0 ? arriving.k : args_.k, &v = block > 0 ? arriving.v : args_.v;
    const std::int64_t row = range.row - (block > 0 ? arriving.block_rows : 0);
    const TokenBlock keys{row, list_.other_step, range.length, shape_.kv_heads, kv_head, 1};
    const int rows = queries.rows();
    const int lanes = RoundUp(rows, kLanes);
    const int stride_qk = shape_.dim_qk + kPad, stride_v = shape_.dim_v + kPad;
    LoadBlock(half_, keys, shape_.dim_qk, k, s_.block_a);
    math_.multiply({range.length, lanes, shape_.dim_qk, s_.block_a, stride_qk, 1, s_.tile_a, kLogitStride,
                    s_.logits, kLogitStride, false});
    FillPositions(range.position, keys, s_.row_position);
    half_.softmax({s_.logits, range.length, lanes, shape_.scale,
                   IsMasked(tile.band, tile.position, tile.length, range.position, range.length),
                   tile.band.low, tile.band.high, s_.row_position, s_.lane_position,
                   LoadBias(half_, args_.bias, Side::kQuery, tile, queries, tile.position, range.position,
                            range.length, s_.added),
                   args_.p_scale},
                  s_.maximum, s_.sum, s_.correction);
    for (int i = 0; i < rows; ++i) {
      if (s_.correction[i] != 1.0f) math_.scale(s_.result_a + i * stride_v, s_.correction[i], shape_.dim_v);
    }
    LoadBlock(half_, keys, shape_.dim_v, v, s_.block_b);
    math_.multiply({rows, shape_.dim_v, range.length, s_.logits, 1, kLogitStride, s_.block_b, stride_v,
                    s_.result_a, stride_v, true});
  }

  // Normalises row i, merges it with what earlier calls left, and writes it. `index` is its place in [rows,
  // heads].
  void Finish(int i, int head, std::int64_t index) {
    if (args_.max_logit) args_.max_logit[head] = std::max(args_.max_logit[head], s_.maximum[i]);
    const int dim = shape_.dim_v;
    float* out = s_.result_a + i * (dim + kPad);
    const bool seen = s_.sum[i] != 0;
    const float lse = seen ? s_.maximum[i] + std::log(s_.sum[i]) : kMinusInfinity;
    float weight = seen ? 1 / s_.sum[i] : 0;
    if (args_.first) {
      math_.scale(out, weight, dim);
      args_.lse[index] = lse;
    } else {
      const float old_lse = args_.lse[index];
      const float* old = args_.accumulator + index * dim;
      const float top = lse > old_lse ? lse : old_lse;
      float merged = kMinusInfinity;
      float old_weight = 0;
      if (top != kMinusInfinity) {
        merged = top + std::log(std::exp(old_lse - top) + std::exp(lse - top));
        old_weight = std::exp(old_lse - merged);
        weight *= std::exp(lse - merged);
      }
      math_.blend(out, weight, old, old_weight, dim);
      args_.lse[index] = merged;
    }
    if (args_.last) {
      const float row_lse = args_.lse[index];
      // A row that sees no key is zero already.
      if (args_.softmax_offset && row_lse != kMinusInfinity) {
        math_.scale(out, 1 / (1 + std::exp(args_.softmax_offset[head] - row_lse)), dim);
      }
    }
    if (args_.last) {
      half_.store(out, dim, static_cast<std::uint16_t*>(args_.out.data) + index * dim);
    } else {
      std::copy_n(out, dim, args_.accumulator + index * dim);
    }
  }

  const KernelShape& shape_;
  const ForwardArgs& args_;
  const WorkList& list_;
  const VectorMath& math_;
  const HalfMath& half_;
  Scratch& s_ = ThreadScratch();  // tile_a: q; result_a: the output so far, not normalised
};

}  // namespace

void AttendForward(const KernelShape& shape, const ForwardArgs& args, const WorkList& list) {
  ForwardTile pass(shape, args, list);
  const int step = args.arriving.block_rows > 0 ? args.arriving.heads_per_piece : shape.kv_heads;
  for (int first = 0; first < shape.kv_heads; first += step) {
    for (const Tile& tile : list.tiles) {
      if (tile.range_begin == tile.range_end && !args.first && !args.last) continue;
      const int at_once = std::max(1, kTile / tile.length);
      for (int kv_head = first; kv_head < std::min(first + step, shape.kv_heads); ++kv_head) {
        const HeadSpan span = QueryHeadsOf(shape, kv_head);
        for (int head = span.begin; head < span.end; head += at_once) {
          pass.Run(tile, kv_head, head, std::min(at_once, span.end - head));
        }
      }
    }
  }
}

}  // namespace cppool::kernels::host
