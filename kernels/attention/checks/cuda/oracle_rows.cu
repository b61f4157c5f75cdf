// The row-wise steps of the oracle, one block for each row: softmax with bias, offset and max_logit, and the
// gradients of bias and offset. Every sum has a fixed order; only max_logit uses an atomic, because the order
// does not change a maximum.
#include <cstdint>

#include "kernels/attention/checks/cuda/oracle_chunk.cuh"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kColumns = 32;                    // columns per block of BiasGradientSumKernel
constexpr int kLanes = kRowThreads / kColumns;  // threads per column, which divide the rows

// Overwrites row x of head y of S by P, which is 0 where masked. T: of the bias.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) SoftmaxKernel(Chunk chunk) {
  const OracleArgs& args = chunk.args;
  const std::int64_t row = blockIdx.x;
  const std::int64_t query = chunk.row + row;
  const int head = chunk.head + static_cast<int>(blockIdx.y);
  const KeyRange tiles = chunk.Keys(row);
  const KeyRange keys = chunk.mask.Keys(query);
  double* p = chunk.p + (blockIdx.y * chunk.rows + row) * chunk.pitch;
  if (args.bias.data || args.alibi_slopes) {
    const T* bias = args.bias.data ? static_cast<const T*>(args.bias.data) + head * args.bias_head_step +
                                         query * args.bias_query_step
                                   : nullptr;
    const double slope = args.alibi_slopes ? args.alibi_slopes[head] : 0;
    for (std::int64_t j = keys.begin + threadIdx.x; j < keys.end; j += kRowThreads) {
      const double biased = p[j] + (bias ? ToDouble(bias[j]) : 0);  // the same thread reads p[j] below
      p[j] = chunk.Store(biased - slope * chunk.mask.Distance(query, j));
    }
  }
  double largest = -INFINITY;
  for (std::int64_t j = keys.begin + threadIdx.x; j < keys.end; j += kRowThreads)
    largest = fmax(largest, p[j]);
  largest = ReduceRow(largest, Max{});
  // A bias of -inf masks a key; if all keys are masked, `largest` is -inf and the sum is 0.
  const double shift = largest == -INFINITY ? 0 : largest;
  double sum = 0;
  for (std::int64_t j = keys.begin + threadIdx.x; j < keys.end; j += kRowThreads) {
    p[j] = exp(p[j] - shift);
    sum += p[j];
  }
  sum = ReduceRow(sum, Add{});
  double lse = largest + log(sum);  // -inf if the row sees no key
  if (chunk.fp8.lse && sum > 0) {
    const std::int64_t vector = query * args.group + head;
    const double apart = args.rounded ? chunk.fp8.lse_shift[vector] : chunk.fp8.lse[vector] - lse;
    if (!args.rounded && threadIdx.x == 0) chunk.fp8.lse_shift[vector] = apart;
    lse += apart;
    sum = exp(lse - shift);
  }
  // With a softmax offset the probabilities of the keys sum to exp(lse) / (exp(lse) + exp(offset)).
  const double keys_share = args.softmax_offset ? 1 / (1 + exp(args.softmax_offset[head] - lse)) : 1;
  // In fp8 it is out's.
  double* const other = args.out && (chunk.casts || chunk.fp8.out_bound)
                            ? chunk.other + (blockIdx.y * chunk.rows + row) * chunk.pitch
                            : nullptr;
  for (std::int64_t j = keys.begin + threadIdx.x; j < keys.end; j += kRowThreads) {
    const double exponential = p[j];
    p[j] = sum > 0 ? chunk.Store(exponential / sum * keys_share) : 0;
    if (!other) continue;
    if (sum == 0) {
      other[j] = 0;
    } else if (chunk.casts) {
      other[j] = Cast(Dtype::kE4M3, exponential, chunk.fp8.p_scale) / sum * keys_share;
    } else {
      other[j] = (kE4M3Relative + kFp32Slack) * p[j] + kE4M3Smallest / chunk.fp8.p_scale / sum * keys_share;
    }
  }
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin + threadIdx.x; j < end; j += kRowThreads) {
      p[j] = 0;
      if (other) other[j] = 0;
    }
  };
  clear(tiles.begin, min(keys.begin, tiles.end));
  clear(max(keys.end, tiles.begin), tiles.end);
  if (threadIdx.x != 0) return;
  if (args.lse) args.lse[query * args.group + head] = lse;
  if (args.max_logit) RaiseTo(&args.max_logit[head], largest);
  if (chunk.ds_offset) {
    chunk.ds_offset[blockIdx.y * chunk.rows + row] =
        args.softmax_offset ? chunk.Store(1 / (1 + exp(lse - args.softmax_offset[head]))) : 0;
  }
}

// Overwrites row x of head y of dP by dS = P (dP - sum(P dP)), where fp8 gives the sum. The offset acts like
// one more key whose value is 0, so its dP is 0.
__global__ void __launch_bounds__(kRowThreads) SoftmaxGradientKernel(Chunk chunk) {
  const std::int64_t row = blockIdx.x;
  const KeyRange tiles = chunk.Keys(row);
  const std::int64_t at = (blockIdx.y * chunk.rows + row) * chunk.pitch;
  const double* p = chunk.p + at;
  double* ds = chunk.ds + at;
  double sum = 0;
  for (std::int64_t j = tiles.begin + threadIdx.x; j < tiles.end; j += kRowThreads) sum += p[j] * ds[j];
  sum = ReduceRow(sum, Add{});
  if (chunk.fp8.delta) sum = chunk.fp8.delta[chunk.QueryVector(row, static_cast<int>(blockIdx.y))];
  for (std::int64_t j = tiles.begin + threadIdx.x; j < tiles.end; j += kRowThreads)
    ds[j] = chunk.Store(p[j] * (ds[j] - sum));
  if (threadIdx.x == 0 && chunk.ds_offset) {
    double& offset = chunk.ds_offset[blockIdx.y * chunk.rows + row];
    offset = chunk.Store(offset * (0 - sum));
  }
}

// Adds d_softmax_offset of head x.
__global__ void __launch_bounds__(kRowThreads) OffsetGradientKernel(Chunk chunk) {
  double sum = 0;
  for (std::int64_t row = threadIdx.x; row < chunk.rows; row += kRowThreads)
    sum += chunk.ds_offset[blockIdx.x * chunk.rows + row];
  sum = ReduceRow(sum, Add{});
  if (threadIdx.x == 0) chunk.args.d_softmax_offset[chunk.head + blockIdx.x] += sum;
}

// Adds row x of dbias if the bias differs by query: of head y, or the sum over all heads if they share the
// bias.
__global__ void __launch_bounds__(kRowThreads) BiasGradientKernel(Chunk chunk) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t query = chunk.row + row;
  const KeyRange keys = chunk.mask.Keys(query);
  const int heads = chunk.args.dbias_head_step ? 1 : chunk.heads;
  double* to = chunk.args.dbias + (chunk.head + blockIdx.y) * chunk.args.dbias_head_step +
               query * chunk.args.dbias_query_step;
  const double* ds = chunk.ds + (blockIdx.y * chunk.rows + row) * chunk.pitch;
  for (std::int64_t j = keys.begin + threadIdx.x; j < keys.end; j += kRowThreads) {
    double sum = 0;
    for (int head = 0; head < heads; ++head) sum += ds[head * chunk.rows * chunk.pitch + j];
    to[j] += sum;
  }
}

// Adds dbias if all queries share the bias: kColumns keys from x * kColumns on, of head y or of all heads.
// Each lane sums every kLanes-th row, then the sums of the lanes are added in order.
__global__ void __launch_bounds__(kRowThreads) BiasGradientSumKernel(Chunk chunk) {
  __shared__ double lanes[kLanes][kColumns];
  const int lane = threadIdx.x / kColumns;
  const int column = threadIdx.x % kColumns;
  const std::int64_t key = std::int64_t{blockIdx.x} * kColumns + column;
  const int first_head = blockIdx.y;
  const int last_head = chunk.args.dbias_head_step ? first_head : chunk.heads - 1;
  double sum = 0;
  for (int head = first_head; head <= last_head; ++head) {
    const double* ds = chunk.ds + head * chunk.rows * chunk.pitch + key;
    for (std::int64_t row = lane; row < chunk.rows; row += kLanes) {
      const KeyRange keys = chunk.mask.Keys(chunk.row + row);
      if (key >= keys.begin && key < keys.end) sum += ds[row * chunk.pitch];
    }
  }
  lanes[lane][column] = sum;
  __syncthreads();
  if (lane != 0 || key >= chunk.args.seqlen_kv) return;
  for (int other = 1; other < kLanes; ++other) sum += lanes[other][column];
  chunk.args.dbias[(chunk.head + first_head) * chunk.args.dbias_head_step + key] += sum;
}

}  // namespace

void LaunchSoftmax(const Chunk& chunk, cudaStream_t stream) {
  const auto kernel =
      chunk.args.bias.dtype == Dtype::kFp16 ? &SoftmaxKernel<__half> : &SoftmaxKernel<__nv_bfloat16>;
  LaunchKernel(kernel, RowsOf(chunk, chunk.heads), kRowThreads, 0, stream, "launching the oracle's softmax",
               chunk);
}

void LaunchSoftmaxGradient(const Chunk& chunk, cudaStream_t stream) {
  const OracleArgs& args = chunk.args;
  LaunchKernel(SoftmaxGradientKernel, RowsOf(chunk, chunk.heads), kRowThreads, 0, stream,
               "launching the oracle's softmax gradient", chunk);
  if (chunk.ds_offset)
    LaunchKernel(OffsetGradientKernel, chunk.heads, kRowThreads, 0, stream,
                 "launching the oracle's gradient of the offset", chunk);
  if (!args.dbias || args.seqlen_kv == 0) return;
  const int heads = args.dbias_head_step ? chunk.heads : 1;
  const auto blocks = static_cast<unsigned>((args.seqlen_kv + kColumns - 1) / kColumns);
  LaunchKernel(args.dbias_query_step ? BiasGradientKernel : BiasGradientSumKernel,
               args.dbias_query_step ? RowsOf(chunk, heads) : dim3(blocks, heads), kRowThreads, 0, stream,
               "launching the oracle's gradient of the bias", chunk);
}

void LoadOracleRows() {
  LoadKernels("loading the oracle", SoftmaxKernel<__half>, SoftmaxKernel<__nv_bfloat16>,
              SoftmaxGradientKernel, OffsetGradientKernel, BiasGradientKernel, BiasGradientSumKernel);
}

}  // namespace cppool::kernels::cuda
