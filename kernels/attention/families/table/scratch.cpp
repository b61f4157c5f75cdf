#include "kernels/attention/families/table/scratch.h"

#include <algorithm>

namespace cppool::kernels::table {
namespace {

// Returns the most elements of a bias that one rectangle covers. Its entries share no rows.
std::int64_t MostBias(const KernelRequest& request, std::int64_t rows_q, std::int64_t rows_kv) {
  const BiasExtent& bias = request.bias_extent;
  const std::int64_t heads = bias.head_stride == 0 ? 1 : request.shape.heads;
  const std::int64_t keys = std::min(bias.keys, rows_kv);
  if (bias.query_stride == 0) return heads * (bias.batch_stride == 0 ? keys : rows_kv);
  return heads * keys * (bias.batch_stride == 0 ? std::min(bias.queries, rows_q) : rows_q);
}

}  // namespace

Scratch::Scratch(const KernelRequest& request, std::int64_t rows_q, std::int64_t rows_kv, void* base) {
  const KernelShape& shape = request.shape;
  const std::int64_t vectors_q = rows_q * shape.heads, vectors_kv = rows_kv * shape.kv_heads;
  std::size_t at = 0;
  const auto take = [&](auto*& to, std::int64_t floats) {
    if (base) to = reinterpret_cast<float*>(static_cast<std::byte*>(base) + at);
    at += (static_cast<std::size_t>(floats) * sizeof(float) + 255) / 256 * 256;
  };
  take(packed_lse, vectors_q);
  const std::size_t shared = at;  // the passes use what follows at different times
  take(lse, vectors_q);
  take(out, vectors_q * shape.dim_v);
  take(out_sum, vectors_q * shape.dim_v);
  if (request.fp8) take(out_payload, vectors_q * shape.dim_v / 4);
  if (request.max_logit) {
    take(row_max, vectors_q);
    take(packed_max, vectors_q);
  }
  bytes_ = at;
  if (!request.training) return;
  at = shared;
  take(packed_delta, vectors_q);
  take(dq, vectors_q * shape.dim_qk);
  take(dq_sum, vectors_q * shape.dim_qk);
  take(dk, vectors_kv * shape.dim_qk);
  take(dk_sum, vectors_kv * shape.dim_qk);
  take(dv, vectors_kv * shape.dim_v);
  take(dv_sum, vectors_kv * shape.dim_v);
  if (request.bias == BiasType::kPostScale) take(dbias, MostBias(request, rows_q, rows_kv));
  if (request.fp8) take(amax_ds, 1);
  bytes_ = std::max(bytes_, at);
}

}  // namespace cppool::kernels::table
