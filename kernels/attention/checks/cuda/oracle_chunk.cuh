// Shared by the oracle's kernels: the chunk of query rows and heads that a launch processes, and the launch functions of the
// row-wise kernels (oracle_rows.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/checks/cuda/oracle_product.cuh"
#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/error.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels::cuda {

// The arguments of the kernels for one chunk.
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
  double* ds_offset;  // [heads, rows]: the offset's probability, then its dS; NULL when it is not requested

  // The range of keys, in whole tiles, for the tile of rows that contains row `row_in_chunk` of the chunk.
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

  // OfQueries: [rows of the chunk, dim] of one head. OfKeys: [seqlen_kv, dim]. OfPairs: [rows of the chunk, pitch] of one head.
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

// Calls `visit` with a value of the type of the inputs. Throws unless all inputs are fp16 or all are bf16.
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
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "the oracle's inputs are all fp16 or all bf16");
}

// Overwrites S by P, which is 0 where masked. Writes lse, and raises max_logit to the largest logit.
void LaunchSoftmax(const Chunk& chunk, cudaStream_t stream);
// Overwrites dP by dS. Adds to dbias and d_softmax_offset.
void LaunchSoftmaxGradient(const Chunk& chunk, cudaStream_t stream);
void LoadOracleRows();

}  // namespace cppool::kernels::cuda
