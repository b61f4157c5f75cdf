#include "kernels/attention/checks/oracle_workspace.h"

#include <algorithm>

#include "kernels/numerics/fp8.h"

namespace cppool::kernels {
namespace {

constexpr std::size_t kMatrixBytes = std::size_t{1} << 30;     // for P and dP, unless one row is larger
constexpr std::size_t kPartialBytes = std::size_t{256} << 20;  // for parts of sums
constexpr std::int64_t kMaxRows = std::int64_t{1} << 20;  // per chunk: keeps the grids within their limits

// If a launch has fewer blocks than this, sums over keys or queries are divided into parts, which are added
// afterwards.
constexpr std::int64_t kWantedBlocks = 512;
constexpr std::int64_t kMaxParts = 8;
constexpr std::int64_t kPartLength = 256;  // minimum length of a part

std::int64_t CountTiles(std::int64_t count) { return (count + kOracleTile - 1) / kOracleTile; }

int PartsFor(std::int64_t blocks, std::int64_t length) {
  const std::int64_t most = std::clamp<std::int64_t>(length / kPartLength, 1, kMaxParts);
  return static_cast<int>(
      std::clamp<std::int64_t>(kWantedBlocks / std::max<std::int64_t>(blocks, 1), 1, most));
}

std::size_t QueryPartDoubles(const OracleShape& shape, const OracleChunking& chunking) {
  if (chunking.query_parts == 1) return 0;
  return static_cast<std::size_t>(chunking.query_parts) * chunking.heads * chunking.rows *
         std::max(shape.dim_qk, shape.dim_v);
}

std::size_t KeyPartDoubles(const OracleShape& shape, const OracleChunking& chunking) {
  return static_cast<std::size_t>(chunking.key_parts) * chunking.heads * shape.seqlen_kv *
         std::max(shape.dim_qk, shape.dim_v);
}

std::size_t Matrices(const OracleShape& shape) { return (shape.backward ? 2 : 1) + (shape.fp8 ? 1 : 0); }

}  // namespace

OracleShape ShapeOf(const OracleArgs& args) {
  return {args.seqlen_q,
          args.seqlen_kv,
          args.group,
          args.dim_qk,
          args.dim_v,
          args.dout.data != nullptr,
          args.dout.data && args.d_softmax_offset,
          args.fp8.has_value()};
}

OracleChunking ChunkingOf(const OracleShape& shape) {
  OracleChunking chunking{};
  chunking.pitch = (std::max<std::int64_t>(shape.seqlen_kv, 1) + 3) / 4 * 4;
  const std::int64_t row_bytes = chunking.pitch * static_cast<std::int64_t>(sizeof(double) * Matrices(shape));
  const std::int64_t rows_at_once =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(kMatrixBytes) / row_bytes);  // times heads
  const std::int64_t wanted = std::clamp<std::int64_t>(shape.seqlen_q, 1, 1024);
  chunking.heads = static_cast<int>(std::clamp<std::int64_t>(rows_at_once / wanted, 1, shape.group));
  chunking.rows = std::min({std::max<std::int64_t>(1, rows_at_once / chunking.heads),
                            std::max<std::int64_t>(1, shape.seqlen_q), kMaxRows});
  if (chunking.rows < shape.seqlen_q && chunking.rows > kOracleTile)
    chunking.rows -= chunking.rows % kOracleTile;
  if (chunking.rows < shape.seqlen_q && shape.fp8)  // no block of queries lies in two chunks
    chunking.rows = std::max<std::int64_t>(kMxBlock, chunking.rows - chunking.rows % kMxBlock);

  const std::int64_t columns = CountTiles(std::min(shape.dim_qk, shape.dim_v)) * chunking.heads;
  chunking.query_parts = PartsFor(CountTiles(chunking.rows) * columns, shape.seqlen_kv);
  if (QueryPartDoubles(shape, chunking) * sizeof(double) > kPartialBytes) chunking.query_parts = 1;
  chunking.key_parts = PartsFor(CountTiles(shape.seqlen_kv) * columns, chunking.rows);
  if (KeyPartDoubles(shape, chunking) * sizeof(double) > kPartialBytes) chunking.key_parts = 1;
  if (KeyPartDoubles(shape, chunking) * sizeof(double) > kPartialBytes ||
      chunking.key_parts * chunking.heads == 1)
    chunking.key_parts = 0;

  const std::size_t rows = static_cast<std::size_t>(chunking.heads) * chunking.rows;
  chunking.matrix = rows * chunking.pitch;
  chunking.parts =
      std::max(QueryPartDoubles(shape, chunking), shape.backward ? KeyPartDoubles(shape, chunking) : 0);
  chunking.offsets = shape.offset_gradient ? rows : 0;
  chunking.of_keys = shape.fp8 && shape.backward ? 2 * static_cast<std::size_t>(shape.seqlen_kv) : 0;
  return chunking;
}

std::size_t OracleWorkspace(const OracleShape& shape) {
  const OracleChunking chunking = ChunkingOf(shape);
  return (chunking.matrix * Matrices(shape) + chunking.parts + chunking.offsets + chunking.of_keys) *
         sizeof(double);
}

std::size_t HostOracleWorkspace(const OracleShape& shape) {
  const std::int64_t of_fp8 = shape.fp8 ? 2 * shape.dim_qk + kMxBlock + 3 : 0;
  const std::int64_t columns = 2 * (shape.dim_qk + shape.dim_v) + 3 + of_fp8;
  return static_cast<std::size_t>(shape.seqlen_kv * columns + 2 * (shape.dim_qk + shape.dim_v)) *
         sizeof(double);
}

}  // namespace cppool::kernels
