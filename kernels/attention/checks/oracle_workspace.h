// How the oracle on a GPU cuts up a call, and with it the memory that the call takes for itself. Apart from its kernels,
// because a case's memory is estimated where there is no CUDA: the estimate and the kernels have this from one place.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels {

inline constexpr int kOracleTile = 64;  // of the products, in both directions

// What of a call decides its memory.
struct OracleShape {
  std::int64_t seqlen_q, seqlen_kv;
  int group;
  int dim_qk, dim_v;
  bool backward;
  bool offset_gradient;  // with `backward`
};
OracleShape ShapeOf(const OracleArgs& args);

struct OracleChunking {
  int heads;           // of the group, at a time
  std::int64_t rows;   // of queries, at a time
  std::int64_t pitch;  // doubles from row to row of P
  int query_parts;     // of the sums over keys, in out and dq
  int key_parts;       // of the sums over queries of each head, in dk and dv; 0: all added to where they are
  // The workspace's pieces, in doubles and in this order.
  std::size_t matrix;   // P, and dP with a backward pass: each
  std::size_t parts;    // of sums
  std::size_t offsets;  // of the gradient of the softmax offset
};
OracleChunking ChunkingOf(const OracleShape& shape);

// Bytes of device memory.
std::size_t OracleWorkspace(const OracleShape& shape);

}  // namespace cppool::kernels
