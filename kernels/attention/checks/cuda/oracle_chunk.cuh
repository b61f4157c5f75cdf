// Shared by the oracle's kernels: the chunk of query rows and heads that a launch processes, and the launch
// functions of the row-wise kernels (oracle_rows.cu, oracle_fp8.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/checks/cuda/oracle_product.cuh"
#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/error.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels::cuda {

// Casts a value to fp8 with this scale, as a plain attention does.
__device__ inline double Cast(Dtype format, double value, double scale) {
  return RoundTo(format, value * scale) / scale;
}

// How a result is stored: exact, or rounded to `dtype`, and with a scale cast to `format` and rounded again.
struct Stored {
  bool rounded = false;
  Dtype dtype = Dtype::kBf16, format = Dtype::kE4M3;
  double scale = 0;

  __device__ double operator()(double value) const {
    if (!rounded) return value;
    value = RoundTo(dtype, value);
    return scale == 0 ? value : RoundTo(dtype, Cast(format, value, scale));
  }
};

// The arguments of the kernels for one chunk.
struct Chunk {
  OracleArgs args;
  OracleFp8 fp8;  // of args
  OracleMask mask;
  bool rounded;      // plain attention in a 16-bit dtype: intermediates are rounded
  bool casts;        // plain attention in fp8: P and dS are cast
  std::int64_t row;  // first query
  std::int64_t rows;
  int head;  // first of the group
  int heads;
  std::int64_t pitch;
  double* p;           // [heads, rows, pitch]: S, then P
  double* ds;          // likewise: dP, then dS; NULL in the forward pass
  double* other;       // likewise, in fp8: casts beside P and dS, or what bounds are sums of
  double* v_norms;     // [seqlen_kv], in the backward pass in fp8
  double* largest_ds;  // likewise: of the chunk's rows
  double* ds_offset;   // [heads, rows]: the offset's probability, then its dS; NULL when it is not requested

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
  __device__ double Store(double value) const { return rounded ? RoundTo(args.stored, value) : value; }

  // The row of a tensor [rows, heads, ...] that belongs to a row and a head of the chunk, in vectors.
  __device__ std::int64_t QueryVector(std::int64_t row_in_chunk, int head_in_chunk) const {
    return (args.q_row + (row + row_in_chunk) * args.q_step) * args.heads + args.head_begin + head +
           head_in_chunk;
  }
  __device__ std::int64_t KeyVector(std::int64_t key) const {
    return (args.kv_row + key * args.kv_step) * args.kv_heads + args.kv_head;
  }
  // OfQueries: [rows of the chunk, dim] of one head. OfKeys: [seqlen_kv, dim]. OfPairs: [rows of the chunk,
  // pitch] of one head.
  template <typename T>
  __device__ Matrix<T> OfQueries(const void* data, int head_in_chunk, int dim,
                                 bool magnitudes = false) const {
    return {static_cast<const T*>(data) + QueryVector(0, head_in_chunk) * dim, args.q_step * args.heads * dim,
            magnitudes};
  }
  template <typename T>
  __device__ Matrix<T> OfKeys(const void* data, int dim, bool magnitudes = false) const {
    return {static_cast<const T*>(data) + KeyVector(0) * dim, args.kv_step * args.kv_heads * dim, magnitudes};
  }
  __device__ Matrix<double> OfPairs(const double* data, int head_in_chunk) const {
    return {data + head_in_chunk * rows * pitch, pitch};
  }
};

__device__ inline double ScaleOf(const TensorRef& tensor) { return tensor.scale ? *tensor.scale : 1.0; }

// Half a unit in the last place of a normal value, relative, and of the subnormals.
inline constexpr double kE4M3Relative = 0x1p-4, kE4M3Smallest = 0x1p-10;
inline constexpr double kE5M2Relative = 0x1p-3, kE5M2Smallest = 0x1p-17;
inline constexpr double kFp32Slack = 0x1p-18;  // sums and exp in fp32

// Reduces over the block of kRowThreads threads and returns the same value in every thread. The tree is
// fixed.
inline constexpr int kRowThreads = 256;
struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};
struct Max {
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};
template <typename Operation>
__device__ double ReduceRow(double value, const Operation& operation) {
  __shared__ double warps[kRowThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2)
    value = operation(value, __shfl_xor_sync(~0u, value, distance));
  __syncthreads();  // other warps may still read the result of an earlier call
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
  for (int w = 1; w < kRowThreads / 32; ++w) value = operation(value, warps[w]);
  return value;
}

// *to = max(*to, value). The bits of doubles, read as integers, increase with positive values and decrease
// with negative ones. Adding 0.0 turns -0.0 into 0.0.
__device__ inline void RaiseTo(double* to, double value) {
  const long long bits = __double_as_longlong(value + 0.0);
  if (bits >= 0) {
    atomicMax(reinterpret_cast<long long*>(to), bits);
  } else {
    atomicMin(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(bits));
  }
}

inline dim3 RowsOf(const Chunk& chunk, int heads) { return dim3(static_cast<unsigned>(chunk.rows), heads); }

// Overwrites S by P, which is 0 where masked. Writes lse, and raises max_logit to the largest logit. In fp8
// `other` becomes P as out gets it, or, for the exact out, what its bound sums over.
void LaunchSoftmax(const Chunk& chunk, cudaStream_t stream);
// Overwrites dP by dS. Adds to dbias and d_softmax_offset.
void LaunchSoftmaxGradient(const Chunk& chunk, cudaStream_t stream);
void LoadOracleRows();

// For plain attention in fp8: casts P and dS where they are; with casts in blocks `other` becomes dS as dk
// gets it.
void LaunchCastGradients(const Chunk& chunk, cudaStream_t stream);
// Compute what the exact gradients in fp8 need: v_norms once a call, largest_ds once a chunk.
void LaunchNorms(const Chunk& chunk, cudaStream_t stream);
void LaunchLargestDs(const Chunk& chunk, cudaStream_t stream);
// What the bound of a gradient sums over, times the magnitudes of the product's other operand, into `other`.
enum class Bounded { kDq, kDk, kDv };
void LaunchBounds(const Chunk& chunk, Bounded gradient, cudaStream_t stream);
// Adds what the rounding of a result, and its cast if it has a scale, may move it by.
void LaunchFinishBound(const double* values, std::int64_t count, double relative, double smallest,
                       double scale, double* bound, cudaStream_t stream);
void LoadOracleFp8();

}  // namespace cppool::kernels::cuda
