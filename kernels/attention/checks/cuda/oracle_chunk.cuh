// What the oracle's kernels share: the chunk of query rows and heads that they work on, and the launches of those
// that go row by row (oracle_rows.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/checks/cuda/oracle_product.cuh"
#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/error.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels::cuda {

// What the kernels of one chunk share.
struct Chunk {
  OracleArgs args;
  OracleMask mask;
  std::int64_t row;  // first query
  std::int64_t rows;
  int head;  // first of the group
  int heads;
  std::int64_t pitch;
  double* p;          // [heads, rows, pitch]: S, then P
  double* ds;         // likewise: dP, then dS; NULL in the forward pass
  double* ds_offset;  // [heads, rows]: the offset's probability, then its dS; NULL when nobody wants it

  // The keys that the tile of rows around `row` (within the chunk) works on.
  __device__ KeyRange Keys(std::int64_t row_in_chunk) const {
    const std::int64_t first = row + row_in_chunk / kOracleTile * kOracleTile;
    const std::int64_t last = min(first + kOracleTile, row + rows) - 1;
    const std::int64_t begin = mask.Keys(first).begin;
    const std::int64_t end = mask.Keys(last).end;
    if (end <= begin) return {0, 0};
    return {begin / kOracleTile * kOracleTile,
            min((end + kOracleTile - 1) / kOracleTile * kOracleTile, args.seqlen_kv)};
  }
  __device__ double Store(double value) const { return args.rounded ? RoundTo(args.stored, value) : value; }

  // [rows of the chunk, dim] of one head, and [seqlen_kv, dim].
  template <typename T>
  __device__ Matrix<T> OfQueries(const void* data, int head_in_chunk, int dim) const {
    const std::int64_t first =
        (args.q_row + row * args.q_step) * args.heads + args.head_begin + head + head_in_chunk;
    return {static_cast<const T*>(data) + first * dim, args.q_step * args.heads * dim};
  }
  template <typename T>
  __device__ Matrix<T> OfKeys(const void* data, int dim) const {
    return {static_cast<const T*>(data) + (args.kv_row * args.kv_heads + args.kv_head) * dim,
            args.kv_step * args.kv_heads * dim};
  }
  __device__ Matrix<double> OfPairs(const double* data, int head_in_chunk) const {
    return {data + head_in_chunk * rows * pitch, pitch};
  }
};

// Calls visit with a value of the inputs' type, which they all have.
template <typename Visit>
void WithInputType(const OracleArgs& args, Visit visit) {
  const Dtype dtype = args.q.dtype;
  const bool same = args.k.dtype == dtype && args.v.dtype == dtype &&
                    (!args.dout.data || args.dout.dtype == dtype) &&
                    (!args.bias.data || args.bias.dtype == dtype);
  switch (dtype) {
    case Dtype::kFp16:
      if (same) return visit(__half{});
      break;
    case Dtype::kBf16:
      if (same) return visit(__nv_bfloat16{});
      break;
    case Dtype::kFp32:
    case Dtype::kFp64:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "the oracle's inputs are all fp16 or all bf16");
}

// S becomes P, 0 where masked. Writes lse, raises max_logit.
void LaunchSoftmax(const Chunk& chunk, cudaStream_t stream);
// dP becomes dS. Adds to dbias and d_softmax_offset.
void LaunchSoftmaxGradient(const Chunk& chunk, cudaStream_t stream);
void LoadOracleRows();

}  // namespace cppool::kernels::cuda
