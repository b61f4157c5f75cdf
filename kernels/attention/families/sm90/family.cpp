#include "kernels/attention/families/sm90/family.h"

#include <cuda_runtime.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "kernels/attention/families/sm90/forward.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

sm90::ForwardKernelEntry EntryOf(const KernelShape& shape) {
  return sm90::ForwardKernelOf(shape.dtypes.q, shape.dim_qk, shape.dim_v);
}

bool HasForward(const KernelRequest& request) {
  return request.bias == BiasType::kNone && EntryOf(request.shape).tile_rows > 0;
}

// Whether the general family takes part in a case of this request.
bool NeedsGeneral(const KernelRequest& request) { return request.training || !HasForward(request); }

// The forward work list in device memory, with the launch's counters, and the general family's plan where it takes part.
class Plan : public BlockPlan {
 public:
  // `own`: NULL when the general family does the forward pass.
  Plan(cppool_runtime* rt, const WorkList* own, std::int64_t rows_q, std::int64_t rows_kv,
       std::unique_ptr<BlockPlan> general, cppool_stream stream)
      : general_(std::move(general)),
        pairs_(own ? own->pairs : general_->pairs()),
        rows_q_(rows_q),
        rows_kv_(rows_kv),
        own_forward_(own != nullptr) {
    if (!own) return;
    const WorkList& list = *own;
    view_.tiles_count = view_.busy_tiles = static_cast<int>(list.tiles.size());
    while (view_.busy_tiles > 0) {
      const Tile& last = list.tiles[static_cast<std::size_t>(view_.busy_tiles - 1)];
      if (last.range_begin < last.range_end) break;
      --view_.busy_tiles;
    }
    view_.query_step = list.self_step;
    view_.key_step = list.other_step;
    if (list.tiles.empty()) return;
    const std::size_t tile_bytes = list.tiles.size() * sizeof(Tile);
    const std::size_t range_bytes = list.ranges.size() * sizeof(Range);
    static_assert(sizeof(Tile) % alignof(Range) == 0 && kScheduleBytes % alignof(Tile) == 0);
    staging_.resize(kScheduleBytes + tile_bytes + range_bytes);  // zeros, for the counters
    std::memcpy(staging_.data() + kScheduleBytes, list.tiles.data(), tile_bytes);
    if (range_bytes > 0)
      std::memcpy(staging_.data() + kScheduleBytes + tile_bytes, list.ranges.data(), range_bytes);
    device_ = Buffer(rt, staging_.size(), stream);
    Check(rt, rt->copy(rt, device_.get(), staging_.data(), staging_.size(), stream));
    view_.tiles = reinterpret_cast<const Tile*>(device_.at(kScheduleBytes));
    view_.ranges = reinterpret_cast<const Range*>(device_.at(kScheduleBytes + tile_bytes));
  }

  std::int64_t pairs() const override { return pairs_; }
  bool own_forward() const { return own_forward_; }
  const BlockPlan* general() const { return general_.get(); }
  const sm90::WorkView& view() const { return view_; }
  std::int64_t rows_q() const { return rows_q_; }
  std::int64_t rows_kv() const { return rows_kv_; }
  int* schedule() const { return device_.get<int>(); }

  static constexpr std::size_t kScheduleBytes = 64;

 private:
  std::unique_ptr<BlockPlan> general_;
  std::int64_t pairs_;
  std::int64_t rows_q_;
  std::int64_t rows_kv_;
  bool own_forward_;
  std::vector<std::byte> staging_;  // the copy may still read it when the constructor returns
  Buffer device_;
  sm90::WorkView view_{};
};

class Sm90Kernel : public AttentionKernel {
 public:
  Sm90Kernel(cppool_runtime* rt, const AttentionFamily& general)
      : rt_(rt), general_family_(general), general_(general.Open(rt)) {
    CheckCuda(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, rt->device),
              "cudaDeviceGetAttribute");
  }

  void Load(const KernelRequest& request) override {
    if (const auto refusal = general_family_.Refusal(request))
      throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
    if (NeedsGeneral(request)) general_->Load(request);
    if (HasForward(request)) EntryOf(request.shape).load();
  }

  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override {
    std::unique_ptr<BlockPlan> general;
    if (NeedsGeneral(request)) general = general_->Plan(request, query, key, bands, stream);
    const auto make = [&](const WorkList* own) {
      return std::make_unique<cuda::Plan>(rt_, own, query.rows, key.rows, std::move(general), stream);
    };
    if (!HasForward(request)) return make(nullptr);
    const WorkList list =
        BuildWorkList(Side::kQuery, query, key, bands, EntryOf(request.shape).tile_rows, true);
    return make(&list);
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const auto& plan = static_cast<const cuda::Plan&>(*args.plan);
    if (!plan.own_forward()) {
      ForwardArgs general = args;
      general.plan = General(plan);
      general_->Forward(shape, general, stream);
      return;
    }
    if (args.bias.tensor.data || args.bias.alibi_slopes)
      throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'sm90': a bias with a plan for none");
    sm90::ForwardCall call;
    call.scale = shape.scale;
    call.work = plan.view();
    call.map = {shape.heads, shape.kv_heads, shape.head0, shape.kv_head0, shape.group};
    call.rows_q = plan.rows_q();
    call.rows_kv = plan.rows_kv();
    call.q = args.q.data, call.k = args.k.data, call.v = args.v.data;
    call.accumulator = args.accumulator;
    call.out = args.out.data;
    call.lse = args.lse;
    call.softmax_offset = args.softmax_offset;
    call.max_logit = args.max_logit;
    call.schedule = plan.schedule();
    call.multiprocessors = multiprocessors_;
    call.first = args.first;
    call.last = args.last;
    EntryOf(shape).launch(call, reinterpret_cast<cudaStream_t>(stream));
  }

  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    BackwardArgs general = args;
    general.plan = General(static_cast<const cuda::Plan&>(*args.plan));
    general_->Backward(shape, general, stream);
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    BackwardArgs general = args;
    general.plan = General(static_cast<const cuda::Plan&>(*args.plan));
    general_->BackwardBias(shape, general, gradient, stream);
  }

 private:
  static const BlockPlan* General(const cuda::Plan& plan) {
    if (!plan.general())
      throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'sm90': a plan that is for less than this call");
    return plan.general();
  }

  cppool_runtime* rt_;
  const AttentionFamily& general_family_;
  std::unique_ptr<AttentionKernel> general_;
  int multiprocessors_ = 0;
};

class Family : public AttentionFamily {
 public:
  explicit Family(const AttentionFamily& general) : general_(general) {}

  const char* kernels() const override { return "cppool"; }
  const char* version() const override { return CPPOOL_VERSION; }
  const char* name() const override { return "sm90"; }
  Capabilities capabilities() const override { return general_.capabilities(); }
  std::optional<std::string> Refusal(const KernelRequest& request) const override {
    return general_.Refusal(request);
  }
  std::size_t WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                             std::int64_t rows_kv) const override {
    return general_.WorkspaceBytes(request, rows_q, rows_kv);
  }
  std::size_t PlanBytes(const KernelRequest& request, const Layout& query, const Layout& key) const override {
    std::size_t bytes = Plan::kScheduleBytes;
    if (NeedsGeneral(request)) bytes += general_.PlanBytes(request, query, key);
    if (HasForward(request))
      bytes += WorkListBytes(Side::kQuery, query, key, EntryOf(request.shape).tile_rows);
    return bytes;
  }
  std::unique_ptr<AttentionKernel> Open(cppool_runtime* runtime) const override {
    return std::make_unique<Sm90Kernel>(runtime, general_);
  }

 private:
  const AttentionFamily& general_;
};

}  // namespace

std::unique_ptr<const AttentionFamily> MakeSm90Family(const AttentionFamily& general) {
  return std::make_unique<Family>(general);
}

}  // namespace cppool::kernels::cuda
