#include "kernels/attention/families/host/family.h"

#include <string>
#include <utility>

#include <cppool/version.h>

#include "kernels/attention/families/common/shape_table.h"
#include "kernels/attention/families/host/attention_tiles.h"
#include "kernels/attention/families/host/tile_scratch.h"
#include "kernels/runtime.h"

namespace cppool::kernels::host {
namespace {

// Any head dims up to kMaxDim that are multiples of kLanes would do; these are those that the CUDA kernels
// have.
constexpr HeadDims kHeadDims[] = {{64, 64}, {128, 128}, {256, 256}, {192, 128}, {128, 64}};
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16};
static_assert([] {
  for (const HeadDims& dims : kHeadDims) {
    if (dims.qk > kMaxDim || dims.v > kMaxDim || dims.qk % kLanes || dims.v % kLanes) return false;
  }
  return true;
}());

class HostBlockPlan : public BlockPlan {
 public:
  HostBlockPlan(WorkList queries, WorkList keys, bool training)
      : queries_(std::make_shared<WorkList>(std::move(queries))),
        keys_(std::make_shared<WorkList>(std::move(keys))),
        training_(training) {}
  std::int64_t pairs() const override { return queries_->pairs; }
  // Work holds them: a case that fails drops its plans with work under way.
  const std::shared_ptr<const WorkList>& queries() const { return queries_; }
  const std::shared_ptr<const WorkList>& keys() const { return keys_; }
  bool training() const { return training_; }

 private:
  std::shared_ptr<const WorkList> queries_, keys_;  // no keys when not training
  bool training_;
};

[[noreturn]] void Misused(const std::string& detail) {
  throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'host': " + detail);
}

const HostBlockPlan& PlanOf(const BlockPlan* plan) {
  const auto* host = dynamic_cast<const HostBlockPlan*>(plan);
  if (!host) Misused("a plan of another family");
  return *host;
}

const HostBlockPlan& TrainingPlanOf(const BlockPlan* plan) {
  if (!PlanOf(plan).training()) Misused("a gradient from a plan that is not for training");
  return PlanOf(plan);
}

std::optional<std::string> RefusalOf(const KernelRequest& request) {
  return RefuseShape("host", kHeadDims, kDtypes, request);
}

// Nothing to do: no row has work, and none must be written.
bool IsIdle(const BlockPlan& plan, bool first, bool last) { return plan.pairs() == 0 && !first && !last; }

class HostKernel : public AttentionKernel {
 public:
  explicit HostKernel(cppool_runtime* runtime) : runtime_(runtime), added_(runtime) {}

  void Load(const KernelRequest& request) override {
    if (const auto refusal = RefusalOf(request)) throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
    const KernelShape& shape = request.shape;
    const int first = shape.head0 / shape.group - shape.kv_head0;
    const int last = (shape.head0 + shape.heads - 1) / shape.group - shape.kv_head0;
    if (shape.heads <= 0 || first < 0 || last >= shape.kv_heads)
      Misused("query heads without their key/value heads");
  }

  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream) override {
    Load(request);
    // Empty tiles are kept: whether a call is a first or a last one, which writes every row, is not known
    // yet.
    WorkList queries = BuildWorkList(Side::kQuery, query, key, bands, kTile, true);
    OrderByBlock(queries, key, false);
    return std::make_unique<HostBlockPlan>(
        std::move(queries),
        request.training ? BuildWorkList(Side::kKey, query, key, bands, kTile, true) : WorkList{},
        request.training);
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const HostBlockPlan& plan = PlanOf(args.plan);
    if (IsIdle(plan, args.first, args.last)) return;
    Enqueue(runtime_, stream,
            [shape, args, queries = plan.queries()] { AttendForward(shape, args, *queries); });
  }

  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const HostBlockPlan& plan = TrainingPlanOf(args.plan);
    // Calls on two streams add to dq one after another, in their order; dk and dv are made at once.
    if (args.beside && !args.query.first) added_.Wait(stream);
    if (args.query.wanted && !IsIdle(plan, args.query.first, args.query.last)) {
      Enqueue(runtime_, stream,
              [shape, args, queries = plan.queries()] { AttendBackwardQuery(shape, args, *queries); });
    }
    if (args.beside) added_.Record(stream);
    if (args.key.wanted && !IsIdle(plan, args.key.first, args.key.last)) {
      Enqueue(runtime_, stream, [shape, args, keys = plan.keys()] { AttendBackwardKey(shape, args, *keys); });
    }
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    const HostBlockPlan& plan = TrainingPlanOf(args.plan);
    if (gradient.query_stride == 0 && (gradient.batch_stride == 0 || gradient.head_stride == 0))
      Misused("dbias summed over queries has a place for each sequence and head");
    if (plan.pairs() == 0) return;
    Enqueue(runtime_, stream, [shape, args, gradient, keys = plan.keys()] {
      AttendBackwardBias(shape, args, gradient, *keys);
    });
  }

 private:
  cppool_runtime* runtime_;
  Event added_;  // the latest call on two streams has added to dq
};

class Family : public AttentionFamily {
 public:
  const char* kernels() const override { return "cppool"; }
  const char* version() const override { return CPPOOL_VERSION; }
  const char* name() const override { return "host"; }
  Capabilities capabilities(const KernelRequest& request) const override {
    return {.continues_softmax = true,
            .arriving_piece_bytes = request.fp8 ? 0u : 1u,
            .gradients_apart = true,
            .accumulates_gradients = true,
            .splits_keys = true,
            .overlapping_keys = 1};
  }
  std::optional<std::string> Refusal(const KernelRequest& request) const override {
    return RefusalOf(request);
  }
  std::size_t WorkspaceBytes(const KernelRequest&, std::int64_t, std::int64_t) const override {
    return 0;  // scratch memory is a stream's thread's own
  }
  std::size_t PlanBytes(const KernelRequest& request, const Layout& query, const Layout& key) const override {
    return WorkListBytes(Side::kQuery, query, key, kTile) +
           (request.training ? WorkListBytes(Side::kKey, query, key, kTile) : 0);
  }
  std::unique_ptr<AttentionKernel> Open(cppool_runtime* runtime) const override {
    return std::make_unique<HostKernel>(runtime);
  }
};

}  // namespace

const AttentionFamily& HostFamily() {
  static const Family family;
  return family;
}

}  // namespace cppool::kernels::host
