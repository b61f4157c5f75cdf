#include "tests/kernels/attention/schedules/limited_family.h"

#include <algorithm>
#include <string>

#include "kernels/attention/families/host/family.h"
#include "kernels/runtime.h"

namespace cppool::test {
namespace {

using namespace cppool::kernels;

[[noreturn]] void Beyond(const std::string& what) {
  throw RuntimeError(CPPOOL_INTERNAL, "a call beyond the family's capabilities: " + what);
}

bool Whole(bool first, bool last) { return first && last; }

class LimitedPlan : public BlockPlan {
 public:
  LimitedPlan(std::unique_ptr<BlockPlan> host, std::size_t workspace, Capabilities can)
      : host_(std::move(host)), workspace_(workspace), can_(can) {}
  std::int64_t pairs() const override { return host_->pairs(); }
  const BlockPlan* host() const { return host_.get(); }
  std::size_t workspace() const { return workspace_; }
  const Capabilities& can() const { return can_; }

 private:
  std::unique_ptr<BlockPlan> host_;
  std::size_t workspace_;
  Capabilities can_;
};

class LimitedKernel : public AttentionKernel {
 public:
  LimitedKernel(const AttentionFamily& family, cppool_runtime* runtime)
      : family_(family), rt_(runtime), host_(host::HostFamily().Open(runtime)) {}

  void Load(const KernelRequest& request) override { host_->Load(request); }

  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override {
    return std::make_unique<LimitedPlan>(host_->Plan(request, query, key, bands, stream),
                                         family_.WorkspaceBytes(request, query.rows, key.rows),
                                         family_.capabilities(request));
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const Capabilities can = CanOf(args.plan);
    if (!can.continues_softmax && (!Whole(args.first, args.last) || args.softmax_offset))
      Beyond("continues a softmax");
    ForwardArgs call = args;
    call.plan = Use(args.plan, args.workspace, stream);
    if (!can.continues_softmax) call.accumulator = nullptr;
    host_->Forward(shape, call, stream);
  }

  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const Capabilities can = CanOf(args.plan);
    if (!can.gradients_apart && !(args.query.wanted && args.key.wanted))
      Beyond("requests dq without dk and dv, or the reverse");
    if (!can.accumulates_gradients &&
        !(Whole(args.query.first, args.query.last) && Whole(args.key.first, args.key.last)))
      Beyond("adds to gradients");
    if (args.beside && can.overlapping_keys == 0) Beyond("has calls beside it");
    if (args.beside && args.workspace) Beyond("shares its workspace");
    BackwardArgs call = args;
    call.plan = args.beside ? dynamic_cast<const LimitedPlan&>(*args.plan).host()
                            : Use(args.plan, args.workspace, stream);
    host_->Backward(shape, call, stream);
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    BackwardArgs call = args;
    call.plan = Use(args.plan, args.workspace, stream);
    host_->BackwardBias(shape, call, gradient, stream);
  }

 private:
  static Capabilities CanOf(const BlockPlan* plan) { return dynamic_cast<const LimitedPlan&>(*plan).can(); }
  // Returns the host's plan, and fills the whole workspace with NaN.
  const BlockPlan* Use(const BlockPlan* plan, void* workspace, cppool_stream stream) {
    const auto& limited = dynamic_cast<const LimitedPlan&>(*plan);
    if (!workspace) Beyond("no workspace");
    Check(rt_, rt_->fill(rt_, workspace, 0xff, limited.workspace(), stream));
    return limited.host();
  }

  const AttentionFamily& family_;
  cppool_runtime* rt_;
  std::unique_ptr<AttentionKernel> host_;
};

}  // namespace

std::optional<std::string> LimitedFamily::Refusal(const KernelRequest& request) const {
  return host::HostFamily().Refusal(request);
}

std::size_t LimitedFamily::WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                                          std::int64_t rows_kv) const {
  return static_cast<std::size_t>(rows_q * request.shape.heads + rows_kv * request.shape.kv_heads + 1);
}

std::size_t LimitedFamily::PlanBytes(const KernelRequest& request, const Layout& query,
                                     const Layout& key) const {
  return host::HostFamily().PlanBytes(request, query, key);
}

std::unique_ptr<AttentionKernel> LimitedFamily::Open(cppool_runtime* runtime) const {
  return std::make_unique<LimitedKernel>(*this, runtime);
}

}  // namespace cppool::test
