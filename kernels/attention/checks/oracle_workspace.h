// How the oracle on a GPU divides a call into chunks, and the workspace of both oracles. Apart from the
// kernels, because the estimate of a case's memory uses it in processes without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels {

inline constexpr int kOracleTile = 64;  // rows and columns of a tile of the products

// The properties of a call that determine its workspace.
struct OracleShape {
  std::int64_t seqlen_q, seqlen_kv;
  int group;
  int dim_qk, dim_v;
  bool backward;
  bool offset_gradient;  // with `backward`
  bool fp8 = false;      // OracleArgs::fp8
};
OracleShape ShapeOf(const OracleArgs& args);

struct OracleChunking {
  int heads;           // heads of the group per chunk
  std::int64_t rows;   // query rows per chunk
  std::int64_t pitch;  // doubles between rows of P
  int query_parts;     // parts of the sums over keys, for out and dq
  int key_parts;       // parts of the sums over queries of each head, for dk and dv; 0: added to the result
                       // directly
  // The pieces of the workspace in this order, in doubles.
  std::size_t matrix;   // P; with a backward pass another one for dP; in fp8 one more
  std::size_t of_keys;  // two values for each key, in a backward pass in fp8
  std::size_t offsets;  // gradient of the softmax offset
  std::size_t parts;    // partial sums
};
OracleChunking ChunkingOf(const OracleShape& shape);

// Bytes of device memory.
std::size_t OracleWorkspace(const OracleShape& shape);
// Bytes that HostOracle allocates.
std::size_t HostOracleWorkspace(const OracleShape& shape);

}  // namespace cppool::kernels
