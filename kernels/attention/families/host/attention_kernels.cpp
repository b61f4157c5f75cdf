#include "kernels/attention/families/host/attention_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "kernels/attention/families/host/attention_tiles.h"
#include "kernels/attention/families/host/vector_math.h"
#include "kernels/numerics/half.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

class HostBlockPlan : public BlockPlan {
 public:
  HostBlockPlan(cppool_runtime* runtime, cppool_stream stream, WorkList queries, WorkList keys, bool training)
      : runtime_(runtime),
        stream_(stream),
        lists_(std::make_shared<Lists>(Lists{std::move(queries), std::move(keys)})),
        training_(training) {}
  // In stream order, as a buffer: a case that fails drops its plans with work under way that reads the lists.
  ~HostBlockPlan() override {
    try {
      Enqueue(runtime_, stream_, [lists = std::move(lists_)] {});
    } catch (...) {  // no such stream any more: no work either
    }
  }
  std::int64_t pairs() const override { return lists_->queries.pairs; }
  const WorkList& queries() const { return lists_->queries; }
  const WorkList& keys() const { return lists_->keys; }
  bool training() const { return training_; }

 private:
  struct Lists {
    WorkList queries;
    WorkList keys;  // empty when not training
  };
  cppool_runtime* runtime_;
  cppool_stream stream_;
  std::shared_ptr<const Lists> lists_;
  bool training_;
};

[[noreturn]] void Misused(const std::string& detail) {
  throw RuntimeError(CPPOOL_INTERNAL, "attention kernels: " + detail);
}

const HostBlockPlan& PlanOf(const BlockPlan* plan) {
  const auto* host = dynamic_cast<const HostBlockPlan*>(plan);
  if (!host) Misused("a plan that this backend did not make");
  return *host;
}

void CheckShape(const KernelShape& shape) {
  if (shape.dtype != Dtype::kFp16 && shape.dtype != Dtype::kBf16) {
    throw RuntimeError(CPPOOL_UNSUPPORTED, "attention is there for fp16 and bf16");
  }
  if (!SupportedHeadDims(shape.dim_qk, shape.dim_v)) {
    throw RuntimeError(CPPOOL_UNSUPPORTED, "head_dim_qk " + std::to_string(shape.dim_qk) +
                                               " with head_dim_v " + std::to_string(shape.dim_v) +
                                               ": there are kernels for " + kSupportedHeadDims);
  }
  const int first = shape.head0 / shape.group - shape.kv_head0;
  const int last = (shape.head0 + shape.heads - 1) / shape.group - shape.kv_head0;
  if (shape.heads <= 0 || first < 0 || last >= shape.kv_heads)
    Misused("query heads without their key/value heads");
}

// exp(lse) + exp(offset) as a logarithm.
float AddedOffset(float lse, float offset) {
  const float top = std::max(lse, offset);
  if (top == -std::numeric_limits<float>::infinity()) return top;
  return top + std::log(std::exp(lse - top) + std::exp(offset - top));
}

// In fp64: the sum is of every query, and its terms cancel.
void SumOffsetGradient(const KernelShape& shape, const WorkList& queries, const float* total,
                       const float* delta, const float* offset, float* gradient) {
  std::vector<double> sums(static_cast<std::size_t>(shape.heads));
  for (const Tile& tile : queries.tiles) {
    for (std::int64_t i = 0; i < tile.length; ++i) {
      const std::int64_t row = (tile.row + i * queries.self_step) * shape.heads;
      for (int h = 0; h < shape.heads; ++h) {
        sums[static_cast<std::size_t>(h)] -=
            double{std::exp(offset[h] - total[row + h])} * double{delta[row + h]};
      }
    }
  }
  for (const double sum : sums) *gradient++ = static_cast<float>(sum);
}

void Split(std::size_t element, std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
           const void* from, void* to) {
  const std::size_t head = element * static_cast<std::size_t>(dim);
  auto* out = static_cast<std::byte*>(to);
  for (const HeadRange& range : ranges) {
    const auto* in = static_cast<const std::byte*>(from) + static_cast<std::size_t>(range.begin) * head;
    const std::size_t bytes = static_cast<std::size_t>(range.count) * head;
    for (std::int64_t row = 0; row < rows;
         ++row, in += static_cast<std::size_t>(heads) * head, out += bytes) {
      std::memcpy(out, in, bytes);
    }
  }
}

template <typename From, typename To>
void Merge(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, const void* from,
           void* to) {
  std::vector<float> sums(static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim));
  std::vector<bool> held(static_cast<std::size_t>(heads));
  auto* out = static_cast<typename To::Bits*>(to);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::fill(held.begin(), held.end(), false);
    const auto* part = static_cast<const typename From::Bits*>(from);
    for (const HeadRange& range : ranges) {
      const auto* in = part + row * range.count * dim;
      for (int h = 0; h < range.count; ++h, in += dim) {
        const auto head = static_cast<std::size_t>(range.begin) + static_cast<std::size_t>(h);
        float* sum = sums.data() + head * static_cast<std::size_t>(dim);
        if (held[head]) {
          for (int d = 0; d < dim; ++d) sum[d] += From::ToFloat(in[d]);
        } else {
          for (int d = 0; d < dim; ++d) sum[d] = From::ToFloat(in[d]);
        }
        held[head] = true;
      }
      part += rows * range.count * dim;
    }
    for (const float sum : sums) *out++ = To::FromFloat(sum);
  }
}

void CheckRanges(int heads, const std::vector<HeadRange>& ranges, bool all) {
  std::vector<bool> held(static_cast<std::size_t>(heads));
  for (const HeadRange& range : ranges) {
    if (range.begin < 0 || range.count < 0 || range.begin + range.count > heads)
      Misused("heads out of range");
    std::fill_n(held.begin() + range.begin, range.count, true);
  }
  for (const bool one : held) {
    if (all && !one) Misused("a head is in no part");
  }
}

class HostAttentionKernels : public AttentionKernels {
 public:
  explicit HostAttentionKernels(cppool_runtime* runtime) : runtime_(runtime) {}

  void Load(const KernelShape& shape, bool) override { CheckShape(shape); }

  std::unique_ptr<BlockPlan> Plan(const KernelShape& shape, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, bool training,
                                  cppool_stream stream) override {
    CheckShape(shape);
    // Empty tiles are kept: whether a call is a first or a last one, which writes every row, is not known
    // yet.
    return std::make_unique<HostBlockPlan>(
        runtime_, stream, BuildWorkList(Side::kQuery, query, key, bands, host::kTile, true),
        training ? BuildWorkList(Side::kKey, query, key, bands, host::kTile, true) : WorkList{}, training);
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const HostBlockPlan& plan = PlanOf(args.plan);
    if (plan.pairs() == 0 && !args.first && !args.last) return;
    Enqueue(runtime_, stream,
            [shape, args, &queries = plan.queries()] { host::AttendForward(shape, args, queries); });
  }

  void Delta(const KernelShape& shape, std::int64_t rows, const void* out, const void* dout, float* delta,
             cppool_stream stream) override {
    Enqueue(runtime_, stream, [shape, rows, out, dout, delta] {
      const host::VectorMath& math = host::BestVectorMath();
      const auto load = (shape.dtype == Dtype::kBf16 ? math.bf16 : math.fp16).load;
      const auto dim = static_cast<std::size_t>(shape.dim_v);
      std::vector<float> scratch(2 * dim);
      const auto* a = static_cast<const std::uint16_t*>(out);
      const auto* b = static_cast<const std::uint16_t*>(dout);
      for (std::int64_t i = 0; i < rows * shape.heads; ++i, a += dim, b += dim) {
        load(a, shape.dim_v, scratch.data());
        load(b, shape.dim_v, scratch.data() + dim);
        delta[i] = math.dot(scratch.data(), scratch.data() + dim, shape.dim_v);
      }
    });
  }

  void BackwardQuery(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const HostBlockPlan& plan = PlanOf(args.plan);
    if (!plan.training()) Misused("a gradient from a plan that is not for training");
    if (plan.pairs() == 0 && !args.first && !args.last) return;
    Enqueue(runtime_, stream,
            [shape, args, &queries = plan.queries()] { host::AttendBackwardQuery(shape, args, queries); });
  }

  void BackwardKey(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const HostBlockPlan& plan = PlanOf(args.plan);
    if (!plan.training()) Misused("a gradient from a plan that is not for training");
    if (plan.pairs() == 0 && !args.first && !args.last) return;
    Enqueue(runtime_, stream,
            [shape, args, &keys = plan.keys()] { host::AttendBackwardKey(shape, args, keys); });
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    const HostBlockPlan& plan = PlanOf(args.plan);
    if (!plan.training()) Misused("a gradient from a plan that is not for training");
    if (gradient.query_stride == 0 && (gradient.batch_stride == 0 || gradient.head_stride == 0)) {
      Misused("dbias summed over queries has a place for each sequence and head");
    }
    if (plan.pairs() == 0) return;
    Enqueue(runtime_, stream, [shape, args, gradient, &keys = plan.keys()] {
      host::AttendBackwardBias(shape, args, gradient, keys);
    });
  }

  void AddOffset(const KernelShape& shape, std::int64_t rows, const float* lse, const float* offset,
                 float* total, cppool_stream stream) override {
    Enqueue(runtime_, stream, [heads = shape.heads, rows, lse, offset, total] {
      for (std::int64_t i = 0; i < rows * heads; ++i) total[i] = AddedOffset(lse[i], offset[i % heads]);
    });
  }

  void OffsetGradient(const KernelShape& shape, const BlockPlan* plan, const float* total, const float* delta,
                      const float* offset, float* gradient, cppool_stream stream) override {
    const WorkList& queries = PlanOf(plan).queries();
    Enqueue(runtime_, stream, [shape, &queries, total, delta, offset, gradient] {
      SumOffsetGradient(shape, queries, total, delta, offset, gradient);
    });
  }

  void SplitHeads(Dtype dtype, std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                  const void* from, void* to, cppool_stream stream) override {
    CheckRanges(heads, ranges, false);
    Enqueue(runtime_, stream, [=] { Split(SizeOf(dtype), rows, heads, dim, ranges, from, to); });
  }

  void MergeHeads(Dtype from_dtype, Dtype to_dtype, std::int64_t rows, int heads, int dim,
                  const std::vector<HeadRange>& ranges, const void* from, void* to,
                  cppool_stream stream) override {
    CheckRanges(heads, ranges, true);
    Enqueue(runtime_, stream, [=] {
      DispatchDtype(from_dtype, [&](auto source) {
        DispatchDtype(to_dtype, [&](auto target) {
          Merge<decltype(source), decltype(target)>(rows, heads, dim, ranges, from, to);
        });
      });
    });
  }

  void Fill(float* to, float value, std::int64_t count, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] { std::fill_n(to, count, value); });
  }

  void Add(const float* from, float* to, std::int64_t count, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      for (std::int64_t i = 0; i < count; ++i) to[i] += from[i];
    });
  }

  void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      std::fill_n(to, columns, 0.0f);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < columns; ++i) to[i] += from[row * columns + i];
      }
    });
  }

  void Round(const float* from, Dtype dtype, void* to, std::int64_t count, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=] {
      DispatchDtype(dtype, [&](auto type) {
        auto* out = static_cast<typename decltype(type)::Bits*>(to);
        for (std::int64_t i = 0; i < count; ++i) out[i] = decltype(type)::FromFloat(from[i]);
      });
    });
  }

 private:
  cppool_runtime* runtime_;
};

}  // namespace

std::unique_ptr<AttentionKernels> MakeHostAttentionKernels(cppool_runtime* runtime) {
  return std::make_unique<HostAttentionKernels>(runtime);
}

}  // namespace cppool::kernels
