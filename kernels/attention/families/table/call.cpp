#include "kernels/attention/families/table/call.h"

#include <algorithm>
#include <utility>

#include "kernels/attention/fp8_table.h"
#include "kernels/error.h"

namespace cppool::kernels::table {
namespace {

void SetDtype(const TensorForm& form, cppool_tensor& to) {
  to.lanes = 1;
  to.bits = static_cast<std::uint8_t>(8 * form.element_bytes());
  if (form.integers) {
    to.code = CPPOOL_DL_INT;
    return;
  }
  switch (form.dtype) {
    case Dtype::kBf16:
      to.code = CPPOOL_DL_BFLOAT;
      return;
    case Dtype::kFp16:
    case Dtype::kFp32:
    case Dtype::kFp64:
      to.code = CPPOOL_DL_FLOAT;
      return;
    case Dtype::kE4M3:
      to.code = CPPOOL_DL_FLOAT8_E4M3;
      return;
    case Dtype::kE5M2:
      to.code = CPPOOL_DL_FLOAT8_E5M2;
      return;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such dtype");
}

enum class WrittenBy { kNobody, kForward, kBackward };  // which pass writes a tensor
using C = cppool_attention_tensors;
// Where a tensor of CallTensor is in the C struct. Scales are `of` a tensor, and not in it.
struct Member {
  const char* name;
  const cppool_tensor* C::*in;
  WrittenBy pass = WrittenBy::kNobody;
  CallTensor of = kCallTensors;
};
constexpr Member kMembers[kCallTensors] = {{"q", &C::q},
                                           {"k", &C::k},
                                           {"v", &C::v},
                                           {"out", &C::out, WrittenBy::kForward},
                                           {"lse", &C::lse, WrittenBy::kForward},
                                           {"dout", &C::dout},
                                           {"delta", &C::delta},
                                           {"dq", &C::dq, WrittenBy::kBackward},
                                           {"dk", &C::dk, WrittenBy::kBackward},
                                           {"dv", &C::dv, WrittenBy::kBackward},
                                           {"bias", &C::bias},
                                           {"dbias", &C::dbias, WrittenBy::kBackward},
                                           {"alibi_slopes", &C::alibi_slopes},
                                           {"max_logit", &C::max_logit, WrittenBy::kForward},
                                           {"cu_seqlens_q", &C::cu_seqlens_q},
                                           {"cu_seqlens_kv", &C::cu_seqlens_kv},
                                           {"seqlens_q", &C::seqlens_q},
                                           {"seqlens_kv", &C::seqlens_kv},
                                           {"the scale of q", nullptr, WrittenBy::kNobody, kQ},
                                           {"the scale of k", nullptr, WrittenBy::kNobody, kK},
                                           {"the scale of v", nullptr, WrittenBy::kNobody, kV},
                                           {"the scale of dout", nullptr, WrittenBy::kNobody, kDout},
                                           {"ds_scale", &C::ds_scale},
                                           {"amax_ds", &C::amax_ds, WrittenBy::kBackward}};

// Returns one stretch that holds the rows of all packed sequences, of which none is shared.
Rectangle Whole(const std::vector<Rectangle>& sequences) {
  Rectangle whole;
  whole.q_row = sequences.front().q_row;
  whole.k_row = sequences.front().k_row;
  whole.queries = sequences.back().q_row + sequences.back().queries - whole.q_row;
  whole.keys = sequences.back().k_row + sequences.back().keys - whole.k_row;
  return whole;
}

}  // namespace

const char* NameOf(CallTensor tensor) { return kMembers[tensor].name; }

bool Writes(bool backward, CallTensor tensor) {
  return kMembers[tensor].pass == (backward ? WrittenBy::kBackward : WrittenBy::kForward);
}

CallView::CallView(const CallForm& form, int device, const CallData& data) : form_(form) {
  for (std::size_t i = 0; i < kCallTensors; ++i) {
    TensorForm& from = form_.tensors[i];
    if (from.ndim == 0) continue;
    cppool_tensor& to = each_[i];
    to.data = data[i];
    to.device_type = device >= 0 ? CPPOOL_DL_CUDA : CPPOOL_DL_CPU;
    to.device_id = device >= 0 ? device : 0;
    to.ndim = from.ndim;
    SetDtype(from, to);
    to.shape = from.shape.data();
    to.strides = from.strides.data();
    if (kMembers[i].in) {
      tensors_.*kMembers[i].in = &to;
    } else {
      each_[kMembers[i].of].scale = &to;
    }
  }
  if (IsFp8(form_.tensors[kOut].dtype)) each_[kOut].scale = &each_[kVScale];
  tensors_.struct_size = sizeof(tensors_);
  call_.struct_size = sizeof(call_);
  call_.backward = form.backward;
  call_.deterministic = form.deterministic;
  call_.anchor = form.anchor;
  call_.window_left = form.window_left;
  call_.window_right = form.window_right;
  call_.alibi_diagonal = form.alibi_diagonal;
  call_.batch = form.batch;
  call_.seqlen_q = form.queries;
  call_.seqlen_kv = form.keys;
  call_.heads = form.heads;
  call_.kv_heads = form.kv_heads;
  call_.dim_qk = form.dim_qk;
  call_.dim_v = form.dim_v;
  call_.scale = form.scale;
  call_.p_scale = form.p_scale;
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
  for (std::size_t i = 0; i < kCallTensors; ++i) {
    TensorForm& tensor = strided.tensors[i];
    const std::int64_t gap = kGap / tensor.element_bytes();
    if (i == kBias || i == kDbias) {  // rows of keys
      std::int64_t size = tensor.shape[3];
      for (const std::size_t axis : {2, 1, 0}) {
        if (tensor.shape[axis] == 1) continue;  // the stride is 0
        tensor.strides[axis] = size + gap;
        size = tensor.shape[axis] * tensor.strides[axis];
      }
    } else if (tensor.ndim == 4) {
      const std::int64_t row = tensor.shape[2] * tensor.shape[3] + gap;
      tensor.strides = {tensor.shape[1] * row + 3 * gap, row, tensor.shape[3], 1};
    } else if (tensor.ndim == 3 && tensor.strides[1] == 1) {  // else packed, as the kernel wants it
      const std::int64_t row = tensor.shape[1] + gap;
      tensor.strides = {tensor.shape[2] * row + 3 * gap, 1, row, 0};
    }
  }
  return strided;
}

CallArea::CallArea(const Rectangle& rectangle, cppool_attention_anchor from)
    : where(rectangle),
      anchor(from),
      window_left(WindowsOf(rectangle, from).left),
      window_right(WindowsOf(rectangle, from).right) {}

CallArea::CallArea(PackedSequences packed)
    : where(Whole(packed.each)),
      anchor(packed.anchor),
      window_left(packed.window_left),
      window_right(packed.window_right),
      sequences(std::move(packed.each)) {}

namespace {

// Fills in the forms of one call's tensors.
class FormFiller {
 public:
  FormFiller(const KernelRequest& request, const CallArea& area, const HeadGroup& group, std::int32_t q_step,
             std::int32_t k_step, const ResultForm& results, CallForm& form)
      : request_(request), area_(area), group_(group), results_(results), form_(form) {
    const Rectangle& where = area.where;
    // A batch of one has the stride that a next entry would have.
    queries_ = {where.queries, q_step, where.batch > 1 ? where.q_stride : where.queries * q_step,
                request.shape.heads, group.heads};
    keys_ = {where.keys, k_step, where.batch > 1 ? where.k_stride : where.keys * k_step,
             request.shape.kv_heads, group.kv_heads};
  }

  Dtype Result(Dtype dtype) const { return results_.fp32 ? Dtype::kFp32 : dtype; }
  void OfQueries(CallTensor which, std::int64_t dim, Dtype dtype) { Vectors(which, queries_, dim, dtype); }
  void OfKeys(CallTensor which, std::int64_t dim, Dtype dtype) { Vectors(which, keys_, dim, dtype); }

  // [batch, heads, queries]
  void PerQuery(CallTensor which) {
    TensorForm& to = form_.tensors[which];
    to = {3, {area_.where.batch, queries_.heads, queries_.rows, 0}, {}, Dtype::kFp32};
    if (results_.packed_lse) {
      to.strides = {queries_.heads * queries_.rows, queries_.rows, 1, 0};
    } else {
      to.strides = {queries_.batch_stride * queries_.all_heads, 1, queries_.step * queries_.all_heads, 0};
    }
  }

  void Bias(bool backward) {
    const BiasExtent& bias = request_.bias_extent;
    const Rectangle& where = area_.where;
    TensorForm& to = form_.tensors[kBias];
    to.ndim = 4;
    to.dtype = request_.shape.dtypes.bias;
    const auto axis = [&](std::size_t which, std::int64_t length, std::int64_t stride) {
      to.shape[which] = stride == 0 ? 1 : length;
      to.strides[which] = to.shape[which] == 1 ? 0 : stride;
    };
    axis(0, where.batch, where.sequence_stride * bias.batch_stride);
    axis(1, group_.heads, bias.head_stride);
    axis(2, where.queries, bias.query_stride);
    axis(3, where.keys, 1);
    to.strides[3] = 1;
    if (!backward) return;
    TensorForm& gradient = form_.tensors[kDbias];  // of this call alone, packed
    gradient = to;
    gradient.dtype = Result(request_.shape.dtypes.dbias);
    std::int64_t size = to.shape[3];
    for (const std::size_t each : {2, 1, 0}) {
      gradient.strides[each] = to.shape[each] == 1 ? 0 : size;
      size *= to.shape[each];
    }
  }

  void Packed() {
    const PackedTables tables = TablesOf(area_.sequences);
    const auto table = [&](CallTensor which, std::size_t size) {
      if (size == 0) return;
      form_.tensors[which] = {1, {static_cast<std::int64_t>(size)}, {1}, Dtype::kFp32, true};
    };
    table(kCuSeqlensQ, tables.cu_seqlens_q.size());
    table(kCuSeqlensKv, tables.cu_seqlens_kv.size());
    table(kSeqlensQ, tables.seqlens_q.size());
    table(kSeqlensKv, tables.seqlens_kv.size());
    form_.batch = static_cast<std::int64_t>(area_.sequences.size());
    form_.queries = form_.keys = 0;
    for (const Rectangle& sequence : area_.sequences) {
      form_.queries = std::max(form_.queries, sequence.queries);
      form_.keys = std::max(form_.keys, sequence.keys);
    }
  }

 private:
  struct Side {
    std::int64_t rows, step, batch_stride, all_heads, heads;  // strides in rows
  };

  // [batch, rows, heads, dim]
  void Vectors(CallTensor which, const Side& side, std::int64_t dim, Dtype dtype) {
    const std::int64_t row = side.all_heads * dim;
    form_.tensors[which] = {4,
                            {area_.where.batch, side.rows, side.heads, dim},
                            {side.batch_stride * row, side.step * row, dim, 1},
                            dtype};
  }

  const KernelRequest& request_;
  const CallArea& area_;
  const HeadGroup& group_;
  const ResultForm& results_;
  CallForm& form_;
  Side queries_, keys_;
};

}  // namespace

CallForm FormOf(bool backward, const KernelRequest& request, const CallArea& area, const HeadGroup& group,
                std::int32_t q_step, std::int32_t k_step, const ResultForm& results) {
  const KernelShape& shape = request.shape;
  const Rectangle& where = area.where;
  CallForm form;
  form.backward = backward;
  form.deterministic = request.deterministic;
  form.anchor = area.anchor;
  form.window_left = area.window_left;
  form.window_right = area.window_right;
  form.batch = where.batch;
  form.queries = where.queries;
  form.keys = where.keys;
  form.heads = group.heads;
  form.kv_heads = group.kv_heads;
  form.dim_qk = shape.dim_qk;
  form.dim_v = shape.dim_v;
  form.scale = shape.scale;

  TensorDtypes dtypes = shape.dtypes;
  const Fp8Table table = request.fp8 ? Fp8TableOf(*request.fp8, request.training) : Fp8Table();
  const bool in_fp8 = table.Has(Fp8Tensor::kP, backward ? kBackwardPass : kForwardPass);
  if (in_fp8) {
    dtypes = PayloadDtypes(dtypes, table);
    form.p_scale = table.Find(Fp8Tensor::kP)->constant;
    for (const CallTensor scale : {kQScale, kKScale, kVScale})
      form.tensors[scale] = {1, {1}, {1}, Dtype::kFp32};
    if (backward) {
      for (const CallTensor number : {kDoutScale, kDsScale, kAmaxDs})
        form.tensors[number] = {1, {1}, {1}, Dtype::kFp32};
    }
  }
  FormFiller fill(request, area, group, q_step, k_step, results, form);
  fill.OfQueries(kQ, shape.dim_qk, dtypes.q);
  fill.OfKeys(kK, shape.dim_qk, dtypes.k);
  fill.OfKeys(kV, shape.dim_v, dtypes.v);
  fill.OfQueries(kOut, shape.dim_v,
                 backward                    ? dtypes.out
                 : in_fp8 && results.fp8_out ? Dtype::kE4M3
                                             : fill.Result(dtypes.out));
  fill.PerQuery(kLse);
  if (request.bias == BiasType::kPostScale) fill.Bias(backward);
  if (request.bias == BiasType::kAlibi) {
    form.tensors[kAlibiSlopes] = {1, {group.heads}, {1}, Dtype::kFp32};
    form.alibi_diagonal = where.diagonal + where.q_position - where.k_position;
  }
  if (!area.sequences.empty()) fill.Packed();
  if (!backward) {
    if (request.max_logit) fill.PerQuery(kMaxLogit);
    return form;
  }
  fill.OfQueries(kDout, shape.dim_v, dtypes.dout);
  fill.PerQuery(kDelta);
  fill.OfQueries(kDq, shape.dim_qk, fill.Result(dtypes.dq));
  fill.OfKeys(kDk, shape.dim_qk, fill.Result(dtypes.dk));
  fill.OfKeys(kDv, shape.dim_v, fill.Result(dtypes.dv));
  return form;
}

}  // namespace cppool::kernels::table
