#include "kernels/attention/schedules/whole_tensors.h"

#include <limits>
#include <vector>

namespace cppool::kernels {

BiasExtent ExtentOfBias(const AttentionSpec& spec) {
  const BiasShape& shape = spec.bias_shape;
  const std::int64_t of_head = (shape.queries ? spec.seqlen_q : 1) * spec.seqlen_kv;
  const std::int64_t of_sequence = (shape.heads ? spec.heads : 1) * of_head;
  return {shape.batch ? of_sequence : 0, shape.heads ? of_head : 0, shape.queries ? spec.seqlen_kv : 0,
          (shape.batch ? spec.batch : 1) * of_sequence};
}

WholeTensors::WholeTensors(cppool_runtime* runtime, AttentionKernels& kernels, const AttentionSpec& spec,
                           const KernelShape& shape, std::int64_t rows_q, Group world,
                           cppool_stream comm_stream)
    : rt_(runtime),
      kernels_(kernels),
      spec_(spec),
      shape_(shape),
      rows_q_(rows_q),
      world_(world),
      comm_(comm_stream),
      ready_(runtime),
      reduced_(runtime) {
  const auto floats = [&](std::int64_t count) {
    return Buffer(rt_, static_cast<std::size_t>(count) * sizeof(float), rt_->stream);
  };
  if (spec.bias == BiasType::kAlibi) {
    const std::vector<float> slopes = AlibiSlopes(spec.heads);
    slopes_ = floats(shape.heads);
    Check(rt_, rt_->copy(rt_, slopes_.get(), slopes.data() + shape.head0, slopes_.bytes(), rt_->stream));
    Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));  // `slopes` goes
  }
  if (spec.bias == BiasType::kPostScale) {
    bias_ = ExtentOfBias(spec);
    if (spec.training) {
      dbias_ = floats(bias_.elements);
      if (!spec.bias_shape.queries) dbias_parts_ = floats(spec.batch * shape.heads * spec.seqlen_kv);
    }
  }
  if (has_offset() && spec.training) total_ = floats(rows_q * shape.heads);
}

void WholeTensors::CommAfterMain() {
  ready_.Record(rt_->stream);
  ready_.Wait(comm_);
}

void WholeTensors::Reduce(float* data, std::int64_t count, cppool_reduce reduce) {
  Check(rt_, rt_->all_reduce(rt_, data, data, static_cast<std::size_t>(count), CPPOOL_FLOAT32, reduce,
                             world_.comm, comm_));
}

const float* WholeTensors::offset(const AttentionTensors& t) const {
  return has_offset() ? t.softmax_offset + shape_.head0 : nullptr;
}

BiasArgs WholeTensors::Bias(const AttentionTensors& t) const {
  BiasArgs args;
  args.alibi_slopes = slopes_.get<float>();
  if (spec_.bias == BiasType::kPostScale) {
    args.tensor = static_cast<const std::byte*>(t.bias) +
                  static_cast<std::size_t>(shape_.head0 * bias_.head_stride) * SizeOf(spec_.dtype);
    args.batch_stride = bias_.batch_stride;
    args.head_stride = bias_.head_stride;
    args.query_stride = bias_.query_stride;
  }
  return args;
}

void WholeTensors::BeginForward(const AttentionTensors& t, ForwardArgs& args) {
  args.bias = Bias(t);
  if (!t.max_logit) return;
  kernels_.Fill(t.max_logit, -std::numeric_limits<float>::infinity(), spec_.heads, rt_->stream);
  args.max_logit = t.max_logit + shape_.head0;
}

void WholeTensors::EndForward(const AttentionTensors& t) {
  if (!t.max_logit || world_.size == 1) return;
  CommAfterMain();
  const Stage stage(rt_, comm_, "forward/max_logit of all ranks");
  Reduce(t.max_logit, spec_.heads, CPPOOL_MAX);
  reduced_.Record(comm_);
  reduced_.Wait(rt_->stream);
}

void WholeTensors::BeginBackward(const AttentionTensors& t, const BlockPlan& queries, BackwardArgs& args) {
  args.bias = Bias(t);
  if (t.dbias) {
    const Buffer& sum = dbias_parts_ ? dbias_parts_ : dbias_;
    Check(rt_, rt_->fill(rt_, sum.get(), 0, sum.bytes(), rt_->stream));
  }
  if (!has_offset()) return;
  kernels_.AddOffset(shape_, rows_q_, args.lse, offset(t), total_.get<float>(), rt_->stream);
  args.lse = total_.get<float>();
  if (!t.d_softmax_offset) return;
  kernels_.Fill(t.d_softmax_offset, 0, spec_.heads, rt_->stream);
  kernels_.OffsetGradient(shape_, &queries, args.lse, args.delta, offset(t),
                          t.d_softmax_offset + shape_.head0, rt_->stream);
}

void WholeTensors::AddBlock(const AttentionTensors& t, const BackwardArgs& args) {
  if (!t.dbias) return;
  BiasGradient gradient;
  if (dbias_parts_) {
    gradient.sum = dbias_parts_.get<float>();
    gradient.head_stride = spec_.seqlen_kv;
    gradient.batch_stride = shape_.heads * spec_.seqlen_kv;
  } else {
    gradient.sum = dbias_.get<float>() + shape_.head0 * bias_.head_stride;
    gradient.head_stride = bias_.head_stride;
    gradient.batch_stride = bias_.batch_stride;
    gradient.query_stride = bias_.query_stride;
  }
  kernels_.BackwardBias(shape_, args, gradient, rt_->stream);
}

void WholeTensors::StartSums(const AttentionTensors& t) {
  if (t.dbias && dbias_parts_) {
    kernels_.SumRows(dbias_parts_.get<float>(), spec_.batch * shape_.heads, spec_.seqlen_kv,
                     dbias_.get<float>(), rt_->stream);
  }
  if (world_.size == 1 || !(t.dbias || t.d_softmax_offset)) return;
  CommAfterMain();
  const Stage stage(rt_, comm_, "backward/sums over all ranks");
  if (t.dbias) Reduce(dbias_.get<float>(), bias_.elements, CPPOOL_SUM);
  if (t.d_softmax_offset) Reduce(t.d_softmax_offset, spec_.heads, CPPOOL_SUM);
  reduced_.Record(comm_);
}

void WholeTensors::EndBackward(const AttentionTensors& t) {
  if (world_.size > 1) reduced_.Wait(rt_->stream);
  if (t.dbias) kernels_.Round(dbias_.get<float>(), spec_.dtype, t.dbias, bias_.elements, rt_->stream);
}

}  // namespace cppool::kernels
