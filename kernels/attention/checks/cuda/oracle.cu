// Attention in fp64 with two matrices in memory: S = Q K^T, overwritten by P, and dP = dO V^T, overwritten by dS. A call processes
// a chunk of query rows and some heads of the group at a time, so that the workspace stays bounded. The products are in
// oracle_product.cuh, the row-wise steps in oracle_rows.cu.
//
// Tiles of 64 x 64 outside the mask are skipped: a tile of rows has one range of keys, rounded outwards to whole tiles; P and dS are
// written (as 0 where masked) and read in this range only. There are no atomics, so every sum has a fixed order.
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/attention/checks/cuda/launch.h"
#include "kernels/attention/checks/cuda/oracle_chunk.cuh"
#include "kernels/attention/checks/cuda/oracle_product.cuh"
#include "kernels/attention/checks/oracle_workspace.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kSumThreads = 256;

// Computes tile (x, y) of S = scale Q K^T, or of dP = dO V^T, of head z.
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kOracleThreads, 3) PairsKernel(Chunk chunk) {
  using Product = OracleProduct<T, true, T, true>;
  __shared__ typename Product::Shared shared;
  const std::int64_t key = std::int64_t{blockIdx.x} * kOracleTile;
  const std::int64_t row = std::int64_t{blockIdx.y} * kOracleTile;
  const KeyRange keys = chunk.Keys(row);
  if (key < keys.begin || key >= keys.end) return;
  const int dim = kGradient ? chunk.args.dim_v : chunk.args.dim_qk;
  Product product;
  product.Accumulate(
      shared, chunk.OfQueries<T>(kGradient ? chunk.args.dout.data : chunk.args.q.data, blockIdx.z, dim),
      chunk.OfKeys<T>(kGradient ? chunk.args.v.data : chunk.args.k.data, dim), row, chunk.rows, key,
      chunk.args.seqlen_kv, 0, dim);
  double* to = (kGradient ? chunk.ds : chunk.p) + (blockIdx.z * chunk.rows + row) * chunk.pitch + key;
  product.ForEach([&](int i, int j, double value) {
    if (row + i < chunk.rows && key + j < chunk.args.seqlen_kv) {
      to[i * chunk.pitch + j] = chunk.Store(kGradient ? value : chunk.args.scale * value);
    }
  });
}

// Divides begin .. end into `parts` parts of whole product steps and returns part number `part`.
__device__ KeyRange PartOf(std::int64_t begin, std::int64_t end, int part, int parts) {
  const std::int64_t steps = (end - begin + kOracleStep - 1) / kOracleStep;
  const std::int64_t length = (steps + parts - 1) / parts * kOracleStep;
  return {min(begin + part * length, end), min(begin + (part + 1) * length, end)};
}

// Computes tile (x, y) of out = P V, or of dQ = scale dS K, for a head and a part of its keys (z). Writes the result, or with `sums`
// the partial sums [parts, rows, heads, dim].
template <typename T, bool kGradient>
__global__ void __launch_bounds__(kOracleThreads, 3) QueryKernel(Chunk chunk, double* sums) {
  using Product = OracleProduct<double, true, T, false>;
  __shared__ typename Product::Shared shared;
  const int dim = kGradient ? chunk.args.dim_qk : chunk.args.dim_v;
  const std::int64_t column = std::int64_t{blockIdx.x} * kOracleTile;
  const std::int64_t row = std::int64_t{blockIdx.y} * kOracleTile;
  const int head = blockIdx.z % chunk.heads;
  const int part = blockIdx.z / chunk.heads;
  const KeyRange all = chunk.Keys(row);
  const KeyRange keys = PartOf(all.begin, all.end, part, gridDim.z / chunk.heads);
  Product product;
  product.Accumulate(shared, chunk.OfPairs(kGradient ? chunk.ds : chunk.p, head),
                     chunk.OfKeys<T>(kGradient ? chunk.args.k.data : chunk.args.v.data, dim), row, chunk.rows,
                     column, dim, keys.begin, keys.end);
  double* const result = kGradient ? chunk.args.dq : chunk.args.out;
  product.ForEach([&](int i, int d, double value) {
    if (row + i >= chunk.rows || column + d >= dim) return;
    if (kGradient) value *= chunk.args.scale;
    if (sums) {
      sums[((part * chunk.rows + row + i) * chunk.heads + head) * dim + column + d] = value;
    } else {
      const std::int64_t query = (chunk.row + row + i) * chunk.args.group + chunk.head + head;
      result[query * dim + column + d] = chunk.Store(value);
    }
  });
}

// Computes tile (x, y) of dK = scale dS^T Q, or of dV = P^T dO, over the rows of the chunk. parts > 0: for one head and one part of
// the rows (z), written to partial sums [parts, heads, seqlen_kv, dim]. parts == 0: for all heads, added to `to`, or written
// there if `first`.
template <typename T, bool kValue>
__global__ void __launch_bounds__(kOracleThreads, 3)
    KeyKernel(Chunk chunk, int parts, double* to, bool first) {
  using Product = OracleProduct<double, false, T, false>;
  __shared__ typename Product::Shared shared;
  const int dim = kValue ? chunk.args.dim_v : chunk.args.dim_qk;
  const std::int64_t key = std::int64_t{blockIdx.x} * kOracleTile;
  const std::int64_t column = std::int64_t{blockIdx.y} * kOracleTile;
  // Both ends of the range of keys increase monotonically with the row, so the tiles of rows that use these keys are consecutive.
  const auto touches = [&](std::int64_t row) {
    const KeyRange keys = chunk.Keys(row);
    return key >= keys.begin && key < keys.end;
  };
  std::int64_t begin = 0;
  while (begin < chunk.rows && !touches(begin)) begin += kOracleTile;
  std::int64_t end = begin;
  while (end < chunk.rows && touches(end)) end += kOracleTile;
  begin = min(begin, chunk.rows);
  end = min(end, chunk.rows);
  const KeyRange rows = parts ? PartOf(begin, end, blockIdx.z / chunk.heads, parts) : KeyRange{begin, end};
  Product product;
  const int first_head = parts ? blockIdx.z % chunk.heads : 0;
  const int last_head = parts ? first_head : chunk.heads - 1;
  for (int head = first_head; head <= last_head; ++head) {
    product.Accumulate(shared, chunk.OfPairs(kValue ? chunk.p : chunk.ds, head),
                       chunk.OfQueries<T>(kValue ? chunk.args.dout.data : chunk.args.q.data, head, dim), key,
                       chunk.args.seqlen_kv, column, dim, rows.begin, rows.end);
  }
  to += (blockIdx.z * chunk.args.seqlen_kv + key) * dim + column;
  const double scale = kValue ? 1.0 : chunk.args.scale;
  product.ForEach([&](int j, int d, double value) {
    if (key + j >= chunk.args.seqlen_kv || column + d >= dim) return;
    double& element = to[std::int64_t{j} * dim + d];
    element = scale * value + (parts || first ? 0.0 : element);
  });
}

// to[row * pitch + 0 .. width) = the sum of parts [count, rows, width] in order, plus the old value of `to` if `add`. With count 0
// it only rounds.
struct Sum {
  const double* parts;
  int count;
  double* to;
  std::int64_t rows;
  std::int64_t width;
  std::int64_t pitch;
  bool add;
  bool round;
  Dtype dtype;
};

__global__ void __launch_bounds__(kSumThreads) SumKernel(Sum sum) {
  const std::int64_t elements = sum.rows * sum.width;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < elements;
       i += std::int64_t{gridDim.x} * kSumThreads) {
    double& to = sum.to[i / sum.width * sum.pitch + i % sum.width];
    double value = sum.add ? to : 0.0;
    for (int part = 0; part < sum.count; ++part) value += sum.parts[part * elements + i];
    to = sum.round ? RoundTo(sum.dtype, value) : value;
  }
}

void LaunchSum(const Sum& sum, cudaStream_t stream) {
  const std::int64_t blocks =
      std::min<std::int64_t>((sum.rows * sum.width + kSumThreads - 1) / kSumThreads, 4096);
  if (blocks) SumKernel<<<static_cast<unsigned>(blocks), kSumThreads, 0, stream>>>(sum);
  CheckCuda(cudaGetLastError(), "launching the oracle's sums");
}

unsigned Tiles(std::int64_t count) { return static_cast<unsigned>((count + kOracleTile - 1) / kOracleTile); }

// Computes out or dQ of one chunk.
template <typename T, bool kGradient>
void RunQueries(const Chunk& chunk, const OracleChunking& chunking, double* parts, cudaStream_t stream) {
  const OracleArgs& args = chunk.args;
  const int dim = kGradient ? args.dim_qk : args.dim_v;
  const bool whole = chunking.query_parts == 1;
  const dim3 grid(Tiles(dim), Tiles(chunk.rows), chunk.heads * chunking.query_parts);
  QueryKernel<T, kGradient><<<grid, kOracleThreads, 0, stream>>>(chunk, whole ? nullptr : parts);
  CheckCuda(cudaGetLastError(), "launching the oracle's products with keys");
  if (whole) return;
  LaunchSum({.parts = parts,
             .count = chunking.query_parts,
             .to = (kGradient ? args.dq : args.out) + (chunk.row * args.group + chunk.head) * dim,
             .rows = chunk.rows,
             .width = std::int64_t{chunk.heads} * dim,
             .pitch = std::int64_t{args.group} * dim,
             .add = false,
             .round = args.rounded,
             .dtype = args.stored},
            stream);
}

// Computes dK or dV of one chunk and adds it to `to`.
template <typename T, bool kValue>
void RunKeys(const Chunk& chunk, const OracleChunking& chunking, double* parts, bool first, bool last,
             double* to, cudaStream_t stream) {
  const int dim = kValue ? chunk.args.dim_v : chunk.args.dim_qk;
  const bool in_place = chunking.key_parts == 0;
  const int count = chunk.heads * chunking.key_parts;
  const dim3 grid(Tiles(chunk.args.seqlen_kv), Tiles(dim), in_place ? 1 : count);
  KeyKernel<T, kValue>
      <<<grid, kOracleThreads, 0, stream>>>(chunk, chunking.key_parts, in_place ? to : parts, first);
  CheckCuda(cudaGetLastError(), "launching the oracle's products with queries");
  const bool round = last && chunk.args.rounded;
  if (in_place && !round) return;
  LaunchSum({.parts = parts,
             .count = count,
             .to = to,
             .rows = chunk.args.seqlen_kv,
             .width = dim,
             .pitch = dim,
             .add = in_place || !first,
             .round = round,
             .dtype = chunk.args.stored},
            stream);
}

template <typename T>
void RunChunk(const Chunk& chunk, const OracleChunking& chunking, double* parts, bool first, bool last,
              cudaStream_t stream) {
  const OracleArgs& args = chunk.args;
  const dim3 pairs(Tiles(args.seqlen_kv), Tiles(chunk.rows), chunk.heads);
  const bool any_keys = args.seqlen_kv > 0;
  if (any_keys) PairsKernel<T, false><<<pairs, kOracleThreads, 0, stream>>>(chunk);
  CheckCuda(cudaGetLastError(), "launching the oracle's products of queries and keys");
  LaunchSoftmax(chunk, stream);
  if (args.out) RunQueries<T, false>(chunk, chunking, parts, stream);
  if (!args.dout.data) return;
  if (any_keys) PairsKernel<T, true><<<pairs, kOracleThreads, 0, stream>>>(chunk);
  CheckCuda(cudaGetLastError(), "launching the oracle's products of gradients and values");
  LaunchSoftmaxGradient(chunk, stream);
  if (args.dq) RunQueries<T, true>(chunk, chunking, parts, stream);
  if (args.dk && any_keys) RunKeys<T, false>(chunk, chunking, parts, first, last, args.dk, stream);
  if (args.dv && any_keys) RunKeys<T, true>(chunk, chunking, parts, first, last, args.dv, stream);
}

template <typename T>
void Load() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(PairsKernel<T, false>),
        reinterpret_cast<const void*>(PairsKernel<T, true>),
        reinterpret_cast<const void*>(QueryKernel<T, false>),
        reinterpret_cast<const void*>(QueryKernel<T, true>),
        reinterpret_cast<const void*>(KeyKernel<T, false>), reinterpret_cast<const void*>(KeyKernel<T, true>),
        reinterpret_cast<const void*>(SumKernel)}) {
    CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "loading the oracle");
  }
}

}  // namespace

void LoadOracle() {
  Load<__half>();
  Load<__nv_bfloat16>();
  LoadOracleRows();
}

void LaunchOracle(const OracleArgs& args, std::byte* workspace, cudaStream_t stream) {
  if (args.seqlen_q == 0) {  // without queries, dk and dv are 0
    const auto clear = [&](double* to, int dim) {
      if (to)
        CheckCuda(cudaMemsetAsync(to, 0, args.seqlen_kv * dim * sizeof(double), stream),
                  "clearing the oracle's gradients");
    };
    clear(args.dk, args.dim_qk);
    clear(args.dv, args.dim_v);
    return;
  }
  const OracleChunking chunking = ChunkingOf(ShapeOf(args));
  double* const matrices = reinterpret_cast<double*>(workspace);
  double* const parts = matrices + chunking.matrix * (args.dout.data ? 2 : 1);
  Chunk chunk{.args = args,
              .mask = {args.mask, args.window_left, args.window_right, args.seqlen_q, args.seqlen_kv},
              .row = 0,
              .rows = 0,
              .head = 0,
              .heads = 0,
              .pitch = chunking.pitch,
              .p = matrices,
              .ds = args.dout.data ? matrices + chunking.matrix : nullptr,
              .ds_offset = chunking.offsets ? parts + chunking.parts : nullptr};
  for (; chunk.head < args.group; chunk.head += chunking.heads) {
    chunk.heads = std::min(chunking.heads, args.group - chunk.head);
    for (chunk.row = 0; chunk.row < args.seqlen_q; chunk.row += chunking.rows) {
      chunk.rows = std::min(chunking.rows, args.seqlen_q - chunk.row);
      const bool first = chunk.head == 0 && chunk.row == 0;
      const bool last = chunk.head + chunk.heads == args.group && chunk.row + chunk.rows == args.seqlen_q;
      WithInputType(args, [&]<typename T>(T) { RunChunk<T>(chunk, chunking, parts, first, last, stream); });
    }
  }
}

}  // namespace cppool::kernels::cuda
