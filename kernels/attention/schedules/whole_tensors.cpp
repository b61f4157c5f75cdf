#include "kernels/attention/schedules/whole_tensors.h"

#include <limits>
#include <vector>

namespace cppool::kernels {

void WholeBuffers::List(const AttentionSpec& spec, const KernelShape& shape, std::int64_t rows_q,
                        MemoryList& list) {
  const auto floats = [&](const char* name, std::int64_t count, Buffer& to) {
    list.Add(name, static_cast<std::size_t>(count) * sizeof(float), to);
  };
  if (spec.bias == BiasType::kAlibi) floats("slopes of ALiBi", shape.heads, slopes);
  if (!spec.training) return;
  if (spec.bias == BiasType::kPostScale) {
    floats("dbias in fp32", ExtentOfBias(spec).elements, dbias);
    if (!spec.bias_shape.queries)
      floats("dbias of heads", spec.batch * shape.heads * spec.seqlen_kv, dbias_parts);
  }
  if (spec.softmax != SoftmaxType::kVanilla)
    floats("lse with the softmax offset", rows_q * shape.heads, total);
}

WholeTensors::WholeTensors(cppool_runtime* runtime, TensorOps& ops, BlockAttention& attention,
                           const AttentionSpec& spec, std::int64_t rows_q, Group world,
                           cppool_stream comm_stream)
    : rt_(runtime),
      ops_(ops),
      attention_(attention),
      spec_(spec),
      shape_(attention.shape()),
      rows_q_(rows_q),
      world_(world),
      comm_(comm_stream),
      ready_(runtime),
      reduced_(runtime) {
  if (spec.bias == BiasType::kPostScale) bias_ = ExtentOfBias(spec);
}

void WholeTensors::Prepare() {
  if (spec_.bias != BiasType::kAlibi) return;
  const std::vector<float> slopes = AlibiSlopes(spec_.heads);
  const Buffer& to = buffers_.slopes;
  Check(rt_, rt_->copy(rt_, to.get(), slopes.data() + shape_.head0, to.bytes(), rt_->stream));
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));  // `slopes` goes
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
  args.alibi_slopes = buffers_.slopes.get<float>();
  if (spec_.bias == BiasType::kPostScale) {
    args.tensor = t.bias;
    args.tensor.data = static_cast<const std::byte*>(t.bias.data) +
                       static_cast<std::size_t>(shape_.head0 * bias_.head_stride) * SizeOf(t.bias.dtype);
    args.batch_stride = bias_.batch_stride;
    args.head_stride = bias_.head_stride;
    args.query_stride = bias_.query_stride;
  }
  return args;
}

void WholeTensors::BeginForward(const AttentionTensors& t, ForwardArgs& args) {
  args.bias = Bias(t);
  args.softmax_offset = offset(t);
  if (!t.max_logit) return;
  ops_.Fill(t.max_logit, -std::numeric_limits<float>::infinity(), spec_.heads, rt_->stream);
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

void WholeTensors::BeginBackward(const AttentionTensors& t, BackwardArgs& args) {
  args.bias = Bias(t);
  if (t.dbias.data) {
    const Buffer& sum = buffers_.dbias_parts ? buffers_.dbias_parts : buffers_.dbias;
    Check(rt_, rt_->fill(rt_, sum.get(), 0, sum.bytes(), rt_->stream));
    if (attention_.capabilities().bias_with_gradients) args.dbias = GradientOfBias();
  }
  if (!has_offset()) return;
  ops_.AddOffset(rows_q_, shape_.heads, args.lse, offset(t), buffers_.total.get<float>(), rt_->stream);
  args.lse = buffers_.total.get<float>();
  if (!t.d_softmax_offset) return;
  ops_.Fill(t.d_softmax_offset, 0, spec_.heads, rt_->stream);
  ops_.OffsetGradient(*attention_.rows(), shape_.heads, args.lse, args.delta, offset(t),
                      t.d_softmax_offset + shape_.head0, rt_->stream);
}

BiasGradient WholeTensors::GradientOfBias() const {
  if (buffers_.dbias_parts)
    return {buffers_.dbias_parts.get<float>(), shape_.heads * spec_.seqlen_kv, spec_.seqlen_kv, 0};
  return {buffers_.dbias.get<float>() + shape_.head0 * bias_.head_stride, bias_.batch_stride,
          bias_.head_stride, bias_.query_stride};
}

void WholeTensors::AddBlock(const AttentionTensors& t, const BackwardArgs& args) {
  if (t.dbias.data && !args.dbias.sum) attention_.BackwardBias(args, GradientOfBias());
}

void WholeTensors::StartSums(const AttentionTensors& t) {
  if (t.dbias.data && buffers_.dbias_parts) {
    ops_.SumRows(buffers_.dbias_parts.get<float>(), spec_.batch * shape_.heads, spec_.seqlen_kv,
                 buffers_.dbias.get<float>(), rt_->stream);
  }
  if (world_.size == 1 || !(t.dbias.data || t.d_softmax_offset)) return;
  CommAfterMain();
  const Stage stage(rt_, comm_, "backward/sums over all ranks");
  if (t.dbias.data) Reduce(buffers_.dbias.get<float>(), bias_.elements, CPPOOL_SUM);
  if (t.d_softmax_offset) Reduce(t.d_softmax_offset, spec_.heads, CPPOOL_SUM);
  reduced_.Record(comm_);
}

void WholeTensors::EndBackward(const AttentionTensors& t) {
  if (world_.size > 1) reduced_.Wait(rt_->stream);
  if (t.dbias.data) ops_.RoundSum({buffers_.dbias.get<float>()}, t.dbias, bias_.elements, rt_->stream);
}

}  // namespace cppool::kernels
