#include "tests/kernels/attention/families/cuda/attention_run.h"

#include <cmath>
#include <string>

#include "tests/catch.h"

namespace cppool::kernels::test {
namespace {

// Divides `layout` into `count` parts: pieces of 48 tokens are assigned to the parts round-robin.
std::vector<Layout> Parts(const Layout& layout, std::size_t count) {
  std::vector<Layout> parts(count, {{}, layout.rows, layout.row_step});
  std::size_t next = 0;
  for (const Segment& segment : layout.segments) {
    for (std::int32_t at = 0; at < segment.length; at += 48) {
      parts[next++ % count].segments.push_back({segment.sequence, segment.position + at,
                                                std::min(48, segment.length - at),
                                                segment.row + std::int64_t{at} * layout.row_step});
    }
  }
  return parts;
}

Buffer OptionalToDevice(const Device& device, const Values& values, Dtype dtype) {
  return values.empty() ? Buffer() : ToDevice(device, values, dtype);
}

// Sums dbias like a schedule: if all queries share the bias, first separately for each sequence and head.
class BiasSum {
 public:
  BiasSum(const Device& device, const Problem& problem) : dims_(problem) {
    if (problem.bias != BiasType::kPostScale) return;
    if (problem.bias_shape.queries) {
      rows_ = 1, columns_ = static_cast<std::int64_t>(dims_.count());
    } else {
      rows_ = static_cast<std::int64_t>(problem.bands.size()) * problem.shape.heads, columns_ = dims_.keys;
      dims_.batch_stride = problem.shape.heads * dims_.keys, dims_.head_stride = dims_.keys;
    }
    sum_ = Poisoned(device, static_cast<std::size_t>(rows_ * columns_), Dtype::kFp32);
    device.ops().Fill(sum_.get<float>(), 0, rows_ * columns_, device.stream());
  }

  void Add(const Device& device, const Problem& problem, const BackwardArgs& args) {
    if (rows_ == 0) return;
    device.kernel().BackwardBias(
        problem.shape, args, {sum_.get<float>(), dims_.batch_stride, dims_.head_stride, dims_.query_stride},
        device.stream());
  }

  Values Get(const Device& device) const {
    if (rows_ == 0) return {};
    const Buffer whole = Poisoned(device, static_cast<std::size_t>(columns_), Dtype::kFp32);
    device.ops().SumRows(sum_.get<float>(), rows_, columns_, whole.get<float>(), device.stream());
    return ToHost(device, whole, static_cast<std::size_t>(columns_), Dtype::kFp32);
  }

 private:
  BiasDims dims_;
  std::int64_t rows_ = 0, columns_ = 0;  // shape of sum_, whose rows are added at the end
  Buffer sum_;
};

// Names the pass, if it faults or a time limit ends the wait.
void WaitFor(const Device& device, const std::string& pass) {
  INFO("waiting for " << pass);
  device.Wait();
}

void Expect(const Outputs& got, const Outputs& want, Dtype dtype) {
  const double unit = dtype == Dtype::kBf16 ? 1.0 / 256 : 1.0 / 2048;
  CHECK(Difference(got.out, want.out, unit) == "");
  CHECK(Difference(got.lse, want.lse, 1e-5) == "");
  CHECK(Difference(got.dq, want.dq, 2 * unit) == "");
  CHECK(Difference(got.dk, want.dk, 2 * unit) == "");
  CHECK(Difference(got.dv, want.dv, 2 * unit) == "");
  CHECK(Difference(got.max_logit, want.max_logit, 1e-5) == "");
  // If a query sees few keys, the error of dbias contains the full error of delta from the rounding of `out`.
  CHECK(Difference(got.dbias, want.dbias, 2 * unit, 64) == "");
  CHECK(Difference(got.doffset, want.doffset, 8 * unit) == "");
}

}  // namespace

const AttentionFamily& EachFamily() {
  const std::vector<const AttentionFamily*> families = AttentionFamilies("cuda");
  const AttentionFamily* const family =
      families[static_cast<std::size_t>(GENERATE_COPY(range(0, static_cast<int>(families.size()))))];
  UNSCOPED_INFO("family " << family->name());
  return *family;
}

bool HaveDevice() {
  if (CountCudaDevices() > 0) return true;
  WARN("skipped: no GPU");
  return false;
}

KernelShape Shape(Dims dims, Dtype dtype, int heads, int kv_heads) {
  KernelShape shape;
  shape.dtypes = TensorDtypes(dtype);
  shape.dim_qk = dims.qk;
  shape.dim_v = dims.v;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.group = heads / kv_heads;
  shape.scale = 1 / std::sqrt(static_cast<float>(dims.qk));
  return shape;
}

Problem Global(const KernelShape& shape, QkvFormat format, std::int64_t batch, std::int64_t seqlen_q,
               std::int64_t seqlen_kv, Band band) {
  return {shape, GlobalLayout(format, UniformSequences(batch, seqlen_q)),
          GlobalLayout(format, UniformSequences(batch, seqlen_kv)),
          std::vector<Band>(static_cast<std::size_t>(batch), band)};
}

Outputs Run(const Device& device, const Problem& problem, const Inputs& inputs,
            const std::vector<Layout>& key_parts, const std::vector<Layout>& query_parts) {
  const KernelShape& shape = problem.shape;
  AttentionKernel& kernel = device.kernel();
  TensorOps& ops = device.ops();
  const KernelRequest request = RequestOf(problem);
  kernel.Load(request);
  const Dtype dtype = DtypeOf(shape);
  const std::size_t rows_q = static_cast<std::size_t>(problem.query.rows);
  const std::size_t states = rows_q * static_cast<std::size_t>(shape.heads);
  const Buffer q = ToDevice(device, inputs.q, dtype), k = ToDevice(device, inputs.k, dtype);
  const Buffer v = ToDevice(device, inputs.v, dtype), dout = ToDevice(device, inputs.dout, dtype);
  const Buffer out = Poisoned(device, inputs.dout.size(), dtype),
               lse = Poisoned(device, states, Dtype::kFp32);
  const Buffer dq = Poisoned(device, inputs.q.size(), dtype), dk = Poisoned(device, inputs.k.size(), dtype);
  const Buffer dv = Poisoned(device, inputs.v.size(), dtype), delta = Poisoned(device, states, Dtype::kFp32);
  const Buffer out_sum = Poisoned(device, inputs.dout.size(), Dtype::kFp32);
  const Buffer dq_sum = Poisoned(device, inputs.q.size(), Dtype::kFp32),
               dk_sum = Poisoned(device, inputs.k.size(), Dtype::kFp32);
  const Buffer dv_sum = Poisoned(device, inputs.v.size(), Dtype::kFp32);

  const Buffer bias = OptionalToDevice(device, inputs.bias, dtype);
  const Buffer slopes = OptionalToDevice(device, inputs.alibi_slopes, Dtype::kFp32);
  const Buffer offset = OptionalToDevice(device, inputs.softmax_offset, Dtype::kFp32);
  const BiasDims dims(problem);
  const BiasArgs bias_args{
      {bias.get(), dtype}, dims.batch_stride, dims.head_stride, dims.query_stride, slopes.get<float>()};
  const std::size_t heads = static_cast<std::size_t>(shape.heads);
  const Buffer max_logit = Poisoned(device, heads, Dtype::kFp32);
  ops.Fill(max_logit.get<float>(), -INFINITY, shape.heads, device.stream());

  std::vector<std::unique_ptr<BlockPlan>> plans;  // kept until the work is done
  for (std::size_t i = 0; i < key_parts.size(); ++i) {
    KernelRequest forward_only = request;
    forward_only.training = false;
    plans.push_back(kernel.Plan(forward_only, problem.query, key_parts[i], problem.bands, device.stream()));
    ForwardArgs args;
    args.plan = plans.back().get();
    args.q = {q.get(), dtype}, args.k = {k.get(), dtype}, args.v = {v.get(), dtype};
    args.accumulator = key_parts.size() > 1 ? out_sum.get<float>() : nullptr;
    args.out = {out.get(), dtype}, args.lse = lse.get<float>();
    args.bias = bias_args, args.softmax_offset = offset.get<float>(),
    args.max_logit = problem.max_logit ? max_logit.get<float>() : nullptr;
    args.first = i == 0, args.last = i + 1 == key_parts.size();
    kernel.Forward(shape, args, device.stream());
  }
  WaitFor(device, "the forward pass");
  ops.Delta(problem.query.rows * shape.heads, shape.dim_v, {out.get(), dtype}, {dout.get(), dtype},
            delta.get<float>(), device.stream());
  const Buffer total = Poisoned(device, states, Dtype::kFp32),
               doffset = Poisoned(device, heads, Dtype::kFp32);
  if (problem.softmax_offset) {
    const auto rows = ops.Rows(problem.query, device.stream());
    ops.AddOffset(problem.query.rows, shape.heads, lse.get<float>(), offset.get<float>(), total.get<float>(),
                  device.stream());
    ops.OffsetGradient(*rows, shape.heads, total.get<float>(), delta.get<float>(), offset.get<float>(),
                       doffset.get<float>(), device.stream());
    device.Wait();  // before `rows` is destroyed
  }
  BiasSum dbias(device, problem);
  BackwardArgs args;
  args.bias = bias_args;
  args.q = {q.get(), dtype}, args.k = {k.get(), dtype}, args.v = {v.get(), dtype},
  args.dout = {dout.get(), dtype};
  args.lse = problem.softmax_offset ? total.get<float>() : lse.get<float>();
  args.delta = delta.get<float>();
  args.dq_accumulator = dq_sum.get<float>(), args.dk_accumulator = dk_sum.get<float>(),
  args.dv_accumulator = dv_sum.get<float>();
  args.dq = {dq.get(), dtype}, args.dk = {dk.get(), dtype}, args.dv = {dv.get(), dtype};
  // A family whose kernels make all gradients of a block at once is asked for both sides: first of the blocks
  // of keys, whose dk and dv the blocks of queries then make again.
  const bool apart = device.family().capabilities(request).gradients_apart;
  const std::size_t workspace_bytes =
      device.family().WorkspaceBytes(request, problem.query.rows, problem.key.rows);
  const Buffer workspace = Poisoned(device, workspace_bytes / sizeof(float) + 1, Dtype::kFp32);
  args.workspace = workspace.get();
  const BackwardArgs whole = args;  // both sides, first and last
  for (std::size_t i = 0; i < key_parts.size(); ++i) {
    plans.push_back(kernel.Plan(request, problem.query, key_parts[i], problem.bands, device.stream()));
    args.plan = plans.back().get();
    args.query = {true, i == 0, i + 1 == key_parts.size()};
    args.key.wanted = !apart;
    kernel.Backward(shape, args, device.stream());
    WaitFor(device, "the backward pass by parts of the keys");
    dbias.Add(device, problem, args);
  }
  WaitFor(device, "the gradient of the bias");
  args = whole;
  const Buffer other_dq = Poisoned(device, inputs.q.size(), dtype);
  args.dq = {other_dq.get(), dtype};
  for (std::size_t i = 0; i < query_parts.size(); ++i) {
    plans.push_back(kernel.Plan(request, query_parts[i], problem.key, problem.bands, device.stream()));
    args.plan = plans.back().get();
    args.query.wanted = !apart;
    args.key = {true, i == 0, i + 1 == query_parts.size()};
    kernel.Backward(shape, args, device.stream());
  }
  WaitFor(device, "the backward pass by parts of the queries");
  return {ToHost(device, out, inputs.dout.size(), dtype),
          ToHost(device, lse, states, Dtype::kFp32),
          ToHost(device, dq, inputs.q.size(), dtype),
          ToHost(device, dk, inputs.k.size(), dtype),
          ToHost(device, dv, inputs.v.size(), dtype),
          problem.max_logit ? ToHost(device, max_logit, heads, Dtype::kFp32) : Values{},
          dbias.Get(device),
          problem.softmax_offset ? ToHost(device, doffset, heads, Dtype::kFp32) : Values{}};
}

void RunAndExpect(const Device& device, const Problem& problem, std::size_t parts) {
  const Inputs inputs = MakeInputs(problem, 7);
  const bool whole = parts == 1;
  const Outputs got =
      Run(device, problem, inputs, whole ? std::vector{problem.key} : Parts(problem.key, parts),
          whole ? std::vector{problem.query} : Parts(problem.query, parts));
  Expect(got, Reference(problem, inputs), DtypeOf(problem.shape));
}

}  // namespace cppool::kernels::test
