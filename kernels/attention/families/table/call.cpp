#include "kernels/attention/families/table/call.h"

#include "kernels/error.h"

namespace cppool::kernels::table {
namespace {

void SetDtype(Dtype dtype, cppool_tensor& to) {
  to.lanes = 1;
  to.bits = static_cast<std::uint8_t>(8 * SizeOf(dtype));
  switch (dtype) {
    case Dtype::kBf16:
      to.code = CPPOOL_DL_BFLOAT;
      return;
    case Dtype::kFp16:
    case Dtype::kFp32:
    case Dtype::kFp64:
      to.code = CPPOOL_DL_FLOAT;
      return;
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;  // the table's calls have no scales
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such dtype");
}

}  // namespace

CallView::CallView(const CallForm& form, int device, const CallData& data) : form_(form) {
  const cppool_tensor** const members[kCallTensors] = {
      &tensors_.q,    &tensors_.k,     &tensors_.v,  &tensors_.out, &tensors_.lse,
      &tensors_.dout, &tensors_.delta, &tensors_.dq, &tensors_.dk,  &tensors_.dv};
  for (std::size_t i = 0; i < kCallTensors; ++i) {
    TensorForm& from = form_.tensors[i];
    if (from.ndim == 0) continue;
    cppool_tensor& to = each_[i];
    to.data = data[i];
    to.device_type = device >= 0 ? CPPOOL_DL_CUDA : CPPOOL_DL_CPU;
    to.device_id = device >= 0 ? device : 0;
    to.ndim = from.ndim;
    SetDtype(from.dtype, to);
    to.shape = from.shape.data();
    to.strides = from.strides.data();
    *members[i] = &to;
  }
  tensors_.struct_size = sizeof(tensors_);
  call_.struct_size = sizeof(call_);
  call_.backward = form.backward;
  call_.deterministic = form.deterministic;
  call_.anchor = form.anchor;
  call_.window_left = form.window_left;
  call_.window_right = form.window_right;
  call_.batch = form.batch;
  call_.seqlen_q = form.queries;
  call_.seqlen_kv = form.keys;
  call_.heads = form.heads;
  call_.kv_heads = form.kv_heads;
  call_.dim_qk = form.dim_qk;
  call_.dim_v = form.dim_v;
  call_.scale = form.scale;
  call_.tensors = &tensors_;
}

std::vector<HeadGroup> HeadGroupsOf(const KernelShape& shape) {
  std::vector<HeadGroup> groups;  // of one key/value head each, joined where they have as many query heads
  const auto kv_head_of = [&](int head) { return (shape.head0 + head) / shape.group - shape.kv_head0; };
  for (int head = 0; head < shape.heads;) {
    const int kv_head = kv_head_of(head);
    int end = head + 1;
    while (end < shape.heads && kv_head_of(end) == kv_head) ++end;
    const int count = end - head;
    HeadGroup* last = groups.empty() ? nullptr : &groups.back();
    if (last && last->kv_head + last->kv_heads == kv_head && last->heads == last->kv_heads * count) {
      last->heads += count;
      ++last->kv_heads;
    } else {
      groups.push_back({head, count, kv_head, 1});
    }
    head = end;
  }
  return groups;
}

CallForm Strided(const CallForm& form) {
  constexpr std::int64_t kGap = 64;  // bytes
  CallForm strided = form;
  for (TensorForm& tensor : strided.tensors) {
    const std::int64_t gap = kGap / static_cast<std::int64_t>(SizeOf(tensor.dtype));
    if (tensor.ndim == 4) {
      const std::int64_t row = tensor.shape[2] * tensor.shape[3] + gap;
      tensor.strides = {tensor.shape[1] * row + 3 * gap, row, tensor.shape[3], 1};
    } else if (tensor.ndim == 3 && tensor.strides[1] == 1) {  // else packed, as the kernel wants it
      const std::int64_t row = tensor.shape[1] + gap;
      tensor.strides = {tensor.shape[2] * row + 3 * gap, 1, row, 0};
    }
  }
  return strided;
}

CallForm FormOf(bool backward, const KernelRequest& request, const Rectangle& where, const HeadGroup& group,
                std::int32_t q_step, std::int32_t k_step, cppool_attention_anchor anchor,
                const ResultForm& results) {
  const KernelShape& shape = request.shape;
  CallForm form;
  form.backward = backward;
  form.deterministic = request.deterministic;
  form.anchor = anchor;
  const std::int64_t diagonal = anchor == CPPOOL_TOP_LEFT ? 0 : where.keys - where.queries;
  form.window_left = where.low == -kOpen ? -1 : diagonal - where.low;
  form.window_right = where.high == kOpen ? -1 : where.high - diagonal;
  form.batch = where.batch;
  form.queries = where.queries;
  form.keys = where.keys;
  form.heads = group.heads;
  form.kv_heads = group.kv_heads;
  form.dim_qk = shape.dim_qk;
  form.dim_v = shape.dim_v;
  form.scale = shape.scale;

  // Of a batch of one the stride is the one that the next entry would have.
  const std::int64_t q_rows = where.batch > 1 ? where.q_stride : where.queries * q_step;
  const std::int64_t k_rows = where.batch > 1 ? where.k_stride : where.keys * k_step;
  const auto tensor = [&](CallTensor which, bool of_queries, std::int64_t dim, Dtype dtype) {
    const std::int64_t row = (of_queries ? shape.heads : shape.kv_heads) * dim;
    form.tensors[which] = {
        4,
        {where.batch, of_queries ? where.queries : where.keys, of_queries ? group.heads : group.kv_heads,
         dim},
        {(of_queries ? q_rows : k_rows) * row, (of_queries ? q_step : k_step) * row, dim, 1},
        dtype};
  };
  const auto per_query = [&](CallTensor which) {
    form.tensors[which] = {3, {where.batch, group.heads, where.queries, 0}, {}, Dtype::kFp32};
    if (results.packed_lse) {
      form.tensors[which].strides = {group.heads * where.queries, where.queries, 1, 0};
    } else {
      form.tensors[which].strides = {q_rows * shape.heads, 1, std::int64_t{q_step} * shape.heads, 0};
    }
  };
  const TensorDtypes& dtypes = shape.dtypes;
  const auto result = [&](Dtype dtype) { return results.fp32 ? Dtype::kFp32 : dtype; };
  tensor(kQ, true, shape.dim_qk, dtypes.q);
  tensor(kK, false, shape.dim_qk, dtypes.k);
  tensor(kV, false, shape.dim_v, dtypes.v);
  tensor(kOut, true, shape.dim_v, backward ? dtypes.out : result(dtypes.out));
  per_query(kLse);
  if (!backward) return form;
  tensor(kDout, true, shape.dim_v, dtypes.dout);
  per_query(kDelta);
  tensor(kDq, true, shape.dim_qk, result(dtypes.dq));
  tensor(kDk, false, shape.dim_qk, result(dtypes.dk));
  tensor(kDv, false, shape.dim_v, result(dtypes.dv));
  return form;
}

}  // namespace cppool::kernels::table
