// Attention in fp64 with two matrices in memory: S = Q K^T, overwritten by P, and dP = dO V^T, overwritten by
// dS; in fp8 with a third. A call processes a chunk of query rows and some heads of the group at a time, so
// that the workspace stays bounded. The products are in oracle_product.cuh, the row-wise steps in
// oracle_rows.cu.
//
// Tiles of 64 x 64 outside the mask are skipped: a tile of rows has one range of keys, rounded outwards to
// whole tiles; P and dS are written (as 0 where masked) and read in this range only. There are no atomics, so
// every sum has a fixed order.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/attention/checks/cuda/check_kernels.h"
#include "kernels/attention/checks/cuda/oracle_chunk.cuh"
#include "kernels/attention/checks/cuda/oracle_product.cuh"
#include "kernels/attention/checks/oracle_workspace.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kSumThreads = 256;

// Computes tile (x, y) of S = scale Q K^T, or of dP = dO V^T, of head z. TQuery: of q or dout, TKey: of k or
// v.
template <typename TQuery, typename TKey, bool kGradient>
__global__ void __launch_bounds__(kOracleThreads, 3) PairsKernel(Chunk chunk) {
  using Product = OracleProduct<TQuery, true, TKey, true>;
  __shared__ typename Product::Shared shared;
  const std::int64_t key = std::int64_t{blockIdx.x} * kOracleTile;
  const std::int64_t row = std::int64_t{blockIdx.y} * kOracleTile;
  const KeyRange tiles = chunk.Keys(row);
  if (key < tiles.begin || key >= tiles.end) return;
  const int dim = kGradient ? chunk.args.dim_v : chunk.args.dim_qk;
  const TensorRef& queries = kGradient ? chunk.args.dout : chunk.args.q;
  const TensorRef& keys = kGradient ? chunk.args.v : chunk.args.k;
  Product product;
  product.Accumulate(shared, chunk.OfQueries<TQuery>(queries.data, blockIdx.z, dim),
                     chunk.OfKeys<TKey>(keys.data, dim), row, chunk.rows, key, chunk.args.seqlen_kv, 0, dim);
  const double scale = (kGradient ? 1.0 : chunk.args.scale) * ScaleOf(queries) * ScaleOf(keys);
  double* to = (kGradient ? chunk.ds : chunk.p) + (blockIdx.z * chunk.rows + row) * chunk.pitch + key;
  product.ForEach([&](int i, int j, double value) {
    if (row + i < chunk.rows && key + j < chunk.args.seqlen_kv) {
      to[i * chunk.pitch + j] = chunk.Store(scale * value);
    }
  });
}

// A product of pairs [heads, rows, pitch] with a tensor of keys or of queries: out, a gradient, or a bound.
struct Product {
  const double* pairs;
  TensorRef operand;
  int dim;
  double scale;     // times that of the operand
  bool magnitudes;  // of the operand
  double* to;       // [seqlen_q, group, dim] or [seqlen_kv, dim]
  Stored stored;
};

// Divides begin .. end into `parts` parts of whole product steps and returns part number `part`.
__device__ KeyRange PartOf(std::int64_t begin, std::int64_t end, int part, int parts) {
  const std::int64_t steps = (end - begin + kOracleStep - 1) / kOracleStep;
  const std::int64_t length = (steps + parts - 1) / parts * kOracleStep;
  return {min(begin + part * length, end), min(begin + (part + 1) * length, end)};
}

// Computes tile (x, y) of a product with keys, such as out = P V, for a head and a part of its keys (z).
// Writes the result, or with `sums` the partial sums [parts, rows, heads, dim].
template <typename T>
__global__ void __launch_bounds__(kOracleThreads, 3) QueryKernel(Chunk chunk, Product what, double* sums) {
  using Tiles = OracleProduct<double, true, T, false>;
  __shared__ typename Tiles::Shared shared;
  const int dim = what.dim;
  const std::int64_t column = std::int64_t{blockIdx.x} * kOracleTile;
  const std::int64_t row = std::int64_t{blockIdx.y} * kOracleTile;
  const int head = blockIdx.z % chunk.heads;
  const int part = blockIdx.z / chunk.heads;
  const KeyRange all = chunk.Keys(row);
  const KeyRange keys = PartOf(all.begin, all.end, part, gridDim.z / chunk.heads);
  Tiles product;
  product.Accumulate(shared, chunk.OfPairs(what.pairs, head),
                     chunk.OfKeys<T>(what.operand.data, dim, what.magnitudes), row, chunk.rows, column, dim,
                     keys.begin, keys.end);
  const double scale = what.scale * ScaleOf(what.operand);
  product.ForEach([&](int i, int d, double value) {
    if (row + i >= chunk.rows || column + d >= dim) return;
    value *= scale;
    if (sums) {
      sums[((part * chunk.rows + row + i) * chunk.heads + head) * dim + column + d] = value;
    } else {
      const std::int64_t query = (chunk.row + row + i) * chunk.args.group + chunk.head + head;
      what.to[query * dim + column + d] = what.stored(value);
    }
  });
}

// Computes tile (x, y) of a product with queries, such as dV = P^T dO, over the rows of the chunk. parts > 0:
// for one head and one part of the rows (z), written to partial sums [parts, heads, seqlen_kv, dim]. parts ==
// 0: for all heads, added to `to`, or written there if `first`.
template <typename T>
__global__ void __launch_bounds__(kOracleThreads, 3)
    KeyKernel(Chunk chunk, Product what, int parts, double* to, bool first) {
  using Tiles = OracleProduct<double, false, T, false>;
  __shared__ typename Tiles::Shared shared;
  const int dim = what.dim;
  const std::int64_t key = std::int64_t{blockIdx.x} * kOracleTile;
  const std::int64_t column = std::int64_t{blockIdx.y} * kOracleTile;
  // Both ends of the range of keys increase monotonically with the row, so the tiles of rows that use these
  // keys are consecutive.
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
  Tiles product;
  const int first_head = parts ? blockIdx.z % chunk.heads : 0;
  const int last_head = parts ? first_head : chunk.heads - 1;
  for (int head = first_head; head <= last_head; ++head) {
    product.Accumulate(shared, chunk.OfPairs(what.pairs, head),
                       chunk.OfQueries<T>(what.operand.data, head, dim, what.magnitudes), key,
                       chunk.args.seqlen_kv, column, dim, rows.begin, rows.end);
  }
  to += (blockIdx.z * chunk.args.seqlen_kv + key) * dim + column;
  const double scale = what.scale * ScaleOf(what.operand);
  product.ForEach([&](int j, int d, double value) {
    if (key + j >= chunk.args.seqlen_kv || column + d >= dim) return;
    double& element = to[std::int64_t{j} * dim + d];
    element = scale * value + (parts || first ? 0.0 : element);
  });
}

// to[row * pitch + 0 .. width) = the sum of parts [count, rows, width] in order, plus the old value of `to`
// if `add`. With count 0 it only rounds.
struct Sum {
  const double* parts;
  int count;
  double* to;
  std::int64_t rows;
  std::int64_t width;
  std::int64_t pitch;
  bool add;
  Stored stored;
};

__global__ void __launch_bounds__(kSumThreads) SumKernel(Sum sum) {
  const std::int64_t elements = sum.rows * sum.width;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < elements;
       i += std::int64_t{gridDim.x} * kSumThreads) {
    double& to = sum.to[i / sum.width * sum.pitch + i % sum.width];
    double value = sum.add ? to : 0.0;
    for (int part = 0; part < sum.count; ++part) value += sum.parts[part * elements + i];
    to = sum.stored(value);
  }
}

void LaunchSum(const Sum& sum, cudaStream_t stream) {
  const std::int64_t blocks =
      std::min<std::int64_t>((sum.rows * sum.width + kSumThreads - 1) / kSumThreads, 4096);
  if (blocks)
    LaunchKernel(SumKernel, static_cast<unsigned>(blocks), kSumThreads, 0, stream,
                 "launching the oracle's sums", sum);
}

unsigned Tiles(std::int64_t count) { return static_cast<unsigned>((count + kOracleTile - 1) / kOracleTile); }

// Computes a product with keys of one chunk. T is the operand's type.
template <typename T>
void RunQueries(const Chunk& chunk, const OracleChunking& chunking, const Product& what, double* parts,
                cudaStream_t stream) {
  const bool whole = chunking.query_parts == 1;
  const dim3 grid(Tiles(what.dim), Tiles(chunk.rows), chunk.heads * chunking.query_parts);
  LaunchKernel(QueryKernel<T>, grid, kOracleThreads, 0, stream, "launching the oracle's products with keys",
               chunk, what, whole ? nullptr : parts);
  if (whole) return;
  const std::int64_t group = chunk.args.group;
  LaunchSum({.parts = parts,
             .count = chunking.query_parts,
             .to = what.to + (chunk.row * group + chunk.head) * what.dim,
             .rows = chunk.rows,
             .width = std::int64_t{chunk.heads} * what.dim,
             .pitch = group * what.dim,
             .add = false,
             .stored = what.stored},
            stream);
}

// Computes a product with queries of one chunk and adds it to what.to.
template <typename T>
void RunKeys(const Chunk& chunk, const OracleChunking& chunking, const Product& what, double* parts,
             bool first, bool last, cudaStream_t stream) {
  const bool in_place = chunking.key_parts == 0;
  const int count = chunk.heads * chunking.key_parts;
  const dim3 grid(Tiles(chunk.args.seqlen_kv), Tiles(what.dim), in_place ? 1 : count);
  LaunchKernel(KeyKernel<T>, grid, kOracleThreads, 0, stream, "launching the oracle's products with queries",
               chunk, what, chunking.key_parts, in_place ? what.to : parts, first);
  const Stored stored = last ? what.stored : Stored{};
  if (in_place && !stored.rounded) return;
  LaunchSum({.parts = parts,
             .count = count,
             .to = what.to,
             .rows = chunk.args.seqlen_kv,
             .width = what.dim,
             .pitch = what.dim,
             .add = in_place || !first,
             .stored = stored},
            stream);
}

// q, k and v have the type T, dout has TDout.
template <typename T, typename TDout>
void RunChunk(const Chunk& chunk, const OracleChunking& chunking, double* parts, bool first, bool last,
              cudaStream_t stream) {
  const OracleArgs& args = chunk.args;
  const OracleFp8& fp8 = chunk.fp8;
  const dim3 pairs(Tiles(args.seqlen_kv), Tiles(chunk.rows), chunk.heads);
  const bool any_keys = args.seqlen_kv > 0;
  const auto with_keys = [&](const double* of_pairs, const TensorRef& operand, int dim, double scale,
                             bool magnitudes, double* to, const Stored& stored) {
    RunQueries<T>(chunk, chunking, {of_pairs, operand, dim, scale, magnitudes, to, stored}, parts, stream);
  };
  const auto with_queries = [&]<typename TQuery>(TQuery, const double* of_pairs, const TensorRef& operand,
                                                 int dim, double scale, bool magnitudes, double* to,
                                                 const Stored& stored) {
    RunKeys<TQuery>(chunk, chunking, {of_pairs, operand, dim, scale, magnitudes, to, stored}, parts, first,
                    last, stream);
  };
  if (any_keys)
    LaunchKernel(PairsKernel<T, T, false>, pairs, kOracleThreads, 0, stream,
                 "launching the oracle's products of queries and keys", chunk);
  LaunchSoftmax(chunk, stream);
  if (args.out) {
    with_keys(chunk.casts ? chunk.other : chunk.p, args.v, args.dim_v, 1, false, args.out,
              {args.rounded, args.stored, Dtype::kE4M3, fp8.out_scale});
    if (fp8.out_bound) with_keys(chunk.other, args.v, args.dim_v, 1, true, fp8.out_bound, {});
  }
  if (!args.dout.data) return;
  if (any_keys)
    LaunchKernel(PairsKernel<TDout, T, true>, pairs, kOracleThreads, 0, stream,
                 "launching the oracle's products of gradients and values", chunk);
  LaunchSoftmaxGradient(chunk, stream);
  if (chunk.casts) LaunchCastGradients(chunk, stream);
  const Stored gradient{args.rounded, args.stored, Dtype::kE5M2, fp8.gradient_scale};
  const TensorRef& k = fp8.k_of_dq.data ? fp8.k_of_dq : args.k;
  const TensorRef& q = fp8.q_of_dk.data ? fp8.q_of_dk : args.q;
  const TensorRef& dout = fp8.dout_of_dv.data ? fp8.dout_of_dv : args.dout;
  if (args.dq) with_keys(chunk.ds, k, args.dim_qk, args.scale, false, args.dq, gradient);
  const double* const ds_of_dk = chunk.casts && fp8.ds_blocks ? chunk.other : chunk.ds;
  if (args.dk && any_keys) with_queries(T{}, ds_of_dk, q, args.dim_qk, args.scale, false, args.dk, gradient);
  if (args.dv && any_keys) with_queries(TDout{}, chunk.p, dout, args.dim_v, 1, false, args.dv, gradient);
  if (!fp8.dq_bound && !fp8.dk_bound && !fp8.dv_bound) return;
  if (first) LaunchNorms(chunk, stream);
  if (fp8.ds_blocks) LaunchLargestDs(chunk, stream);
  if (fp8.dq_bound) {
    LaunchBounds(chunk, Bounded::kDq, stream);
    with_keys(chunk.other, k, args.dim_qk, args.scale, true, fp8.dq_bound, {});
  }
  if (fp8.dk_bound && any_keys) {
    LaunchBounds(chunk, Bounded::kDk, stream);
    with_queries(T{}, chunk.other, q, args.dim_qk, args.scale, true, fp8.dk_bound, {});
  }
  if (fp8.dv_bound && any_keys) {
    LaunchBounds(chunk, Bounded::kDv, stream);
    with_queries(TDout{}, chunk.other, dout, args.dim_v, 1, true, fp8.dv_bound, {});
  }
}

// Adds the rounding and the cast of the results to their bounds.
void FinishBounds(const OracleArgs& args, const OracleFp8& fp8, cudaStream_t stream) {
  const std::int64_t vectors = args.seqlen_q * args.group;
  const auto gradient = [&](const double* values, std::int64_t count, double* bound) {
    if (bound)
      LaunchFinishBound(values, count, kE5M2Relative, kE5M2Smallest, fp8.gradient_scale, bound, stream);
  };
  if (fp8.out_bound)
    LaunchFinishBound(args.out, vectors * args.dim_v, kE4M3Relative, kE4M3Smallest, fp8.out_scale,
                      fp8.out_bound, stream);
  gradient(args.dq, vectors * args.dim_qk, fp8.dq_bound);
  gradient(args.dk, args.seqlen_kv * args.dim_qk, fp8.dk_bound);
  gradient(args.dv, args.seqlen_kv * args.dim_v, fp8.dv_bound);
}

// Loads the kernels for q, k and v of type T and dout of type TDout.
template <typename T, typename TDout>
void LoadFor() {
  LoadKernels("loading the oracle", PairsKernel<T, T, false>, PairsKernel<TDout, T, true>, QueryKernel<T>,
              KeyKernel<T>, KeyKernel<TDout>, SumKernel);
}

// Calls `visit` with values of the types of q, k and v and of dout. Throws unless all are fp16, all are bf16,
// or all are payloads.
template <typename Visit>
void WithInputTypes(const OracleArgs& args, const OracleFp8& fp8, Visit visit) {
  const Dtype dtype = args.q.dtype;
  const auto is = [](const TensorRef& tensor, Dtype expected) {
    return !tensor.data || tensor.dtype == expected;
  };
  const auto same = [&](Dtype dout, Dtype bias) {
    return is(args.k, dtype) && is(args.v, dtype) && is(fp8.q_of_dk, dtype) && is(fp8.k_of_dq, dtype) &&
           is(args.dout, dout) && is(fp8.dout_of_dv, dout) && is(args.bias, bias);
  };
  switch (dtype) {
    case Dtype::kFp16:
      if (same(dtype, dtype)) return visit(__half{}, __half{});
      break;
    case Dtype::kBf16:
      if (same(dtype, dtype)) return visit(__nv_bfloat16{}, __nv_bfloat16{});
      break;
    case Dtype::kE4M3:
      if (same(Dtype::kE5M2, Dtype::kBf16)) return visit(E4M3{}, E5M2{});
      break;
    case Dtype::kFp32:
    case Dtype::kFp64:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL,
                     "the oracle's inputs are all fp16, all bf16, or E4M3 with dout in E5M2");
}

}  // namespace

void CudaCheckKernels::LoadOracle() {
  LoadFor<__half, __half>();
  LoadFor<__nv_bfloat16, __nv_bfloat16>();
  LoadFor<E4M3, E5M2>();
  LoadOracleRows();
  LoadOracleFp8();
}

void CudaCheckKernels::Oracle(const OracleArgs& args, cppool_stream on) {
  const cudaStream_t stream = Cuda(on);
  const OracleShape shape = ShapeOf(args);
  const Buffer workspace(rt_, OracleWorkspace(shape), on);
  const OracleFp8 fp8 = args.fp8.value_or(OracleFp8{});
  if (args.seqlen_q == 0) {  // without queries, dk and dv are 0, and so are their bounds
    const auto clear = [&](double* to, int dim) {
      if (to)
        CheckCuda(cudaMemsetAsync(to, 0, args.seqlen_kv * dim * sizeof(double), stream),
                  "clearing the oracle's gradients");
    };
    clear(args.dk, args.dim_qk);
    clear(args.dv, args.dim_v);
    clear(fp8.dk_bound, args.dim_qk);
    clear(fp8.dv_bound, args.dim_v);
    FinishBounds(args, fp8, stream);
    return;
  }
  const OracleChunking chunking = ChunkingOf(shape);
  double* next = workspace.get<double>();
  const auto take = [&](bool wanted, std::size_t count) {
    return wanted ? std::exchange(next, next + count) : nullptr;
  };
  Chunk chunk{.args = args,
              .fp8 = fp8,
              .mask = {args.mask, args.window_left, args.window_right, args.seqlen_q, args.seqlen_kv},
              .rounded = args.rounded && fp8.p_scale == 0,
              .casts = args.rounded && fp8.p_scale != 0,
              .row = 0,
              .rows = 0,
              .head = 0,
              .heads = 0,
              .pitch = chunking.pitch,
              .p = take(true, chunking.matrix),
              .ds = take(shape.backward, chunking.matrix),
              .other = take(shape.fp8, chunking.matrix),
              .v_norms = take(chunking.of_keys > 0, chunking.of_keys / 2),
              .largest_ds = take(chunking.of_keys > 0, chunking.of_keys / 2),
              .ds_offset = take(chunking.offsets > 0, chunking.offsets)};
  double* const parts = next;
  for (; chunk.head < args.group; chunk.head += chunking.heads) {
    chunk.heads = std::min(chunking.heads, args.group - chunk.head);
    for (chunk.row = 0; chunk.row < args.seqlen_q; chunk.row += chunking.rows) {
      chunk.rows = std::min(chunking.rows, args.seqlen_q - chunk.row);
      const bool first = chunk.head == 0 && chunk.row == 0;
      const bool last = chunk.head + chunk.heads == args.group && chunk.row + chunk.rows == args.seqlen_q;
      WithInputTypes(args, fp8, [&]<typename T, typename TDout>(T, TDout) {
        RunChunk<T, TDout>(chunk, chunking, parts, first, last, stream);
      });
    }
  }
  FinishBounds(args, fp8, stream);
}

}  // namespace cppool::kernels::cuda
