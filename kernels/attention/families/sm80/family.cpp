#include "kernels/attention/families/sm80/family.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

#include <cppool/version.h>

#include "kernels/attention/families/sm80/kernel.h"
#include "kernels/attention/families/sm80/parameters.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/launch.h"

namespace cppool::kernels::cuda {
namespace {

// So many thread blocks occupy all multiprocessors of current GPUs.
constexpr std::int64_t kBusyBlocks = 512;

cudaStream_t AsCuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

constexpr auto kHeadDims = [] {
  std::array<HeadDims, std::size(kHeadDimTiles)> dims{};
  for (std::size_t i = 0; i < dims.size(); ++i) dims[i] = kHeadDimTiles[i].dims;
  return dims;
}();

std::optional<std::string> RefusalOf(const KernelRequest& request) {
  if (!(request.shape.scale > 0)) return "the softmax scale must be positive";
  if (request.fp8 && request.shape.dtypes.q != Dtype::kBf16)
    return "the kernel family 'sm80' has kernels for fp8 with 16-bit tensors in bf16 alone";
  return RefuseShape("sm80", kHeadDims, kDtypes, request);
}

// The kernels that a request needs.
struct Kernels {
  explicit Kernels(const KernelRequest& request)
      : extended(request.bias != BiasType::kNone),
        forward_extended(extended || request.max_logit),
        fp8(request.fp8.has_value()),
        fp8_backward(fp8 && request.fp8->bwd) {
    const KernelShape& shape = request.shape;
    forward = fp8                ? ForwardKernelOf<Variant::kFp8>(shape)
              : forward_extended ? ForwardKernelOf<Variant::kExtended>(shape)
                                 : ForwardKernelOf<Variant::kPlain>(shape);
    if (!request.training) return;
    const auto take = [&]<Variant kVariant>() {
      query = BackwardQueryKernelOf<kVariant>(shape);
      key = BackwardKeyKernelsOf<kVariant>(shape);
    };
    fp8_backward ? take.template operator()<Variant::kFp8>()
    : extended   ? take.template operator()<Variant::kExtended>()
                 : take.template operator()<Variant::kPlain>();
    if (request.bias == BiasType::kPostScale)
      bias = fp8_backward ? BackwardBiasKernelOf<true>(shape) : BackwardBiasKernelOf<false>(shape);
  }

  bool extended;          // the kernels support a bias
  bool forward_extended;  // the forward kernel supports a bias and max_logit
  bool fp8;               // the forward kernel casts P
  bool fp8_backward;      // the backward kernels cast P and dS
  Kernel<ForwardParameters> forward;
  Kernel<BackwardParameters> query;
  std::array<Kernel<BackwardParameters>, 2> key;
  Kernel<BiasGradientParameters> bias;
};

// A plan holds its work list in device memory.
struct DeviceList {
  WorkView view{};
  std::size_t tiles_at = 0;  // offsets in the plan's memory
  std::size_t ranges_at = 0;
  int tiles = 0;
  int busy_tiles = 0;  // tiles with ranges; these come first

  // The tiles to launch: a first or last call writes every row, any other call only rows that have work.
  int count(bool first, bool last) const { return first || last ? tiles : busy_tiles; }
};

class Plan : public BlockPlan {
 public:
  // `dq` and `key`: NULL unless for training. `dq` is also NULL if the tiles of `query` serve for dq.
  Plan(cppool_runtime* rt, const Kernels& kernels, const WorkList& query, const WorkList* dq,
       const WorkList* key, cppool_stream stream)
      : kernels_(kernels), pairs_(query.pairs), training_(key != nullptr) {
    Stage(query, query_);
    if (dq) Stage(*dq, dq_);
    if (key) Stage(*key, key_);
    if (key) StageSequences(*key);
    if (staging_.empty()) return;
    device_ = Buffer(rt, staging_.size(), stream);
    Check(rt, rt->copy(rt, device_.get(), staging_.data(), staging_.size(), stream));
    for (DeviceList* list : {&query_, &dq_, &key_, &key_by_sequence_}) {
      list->view.tiles = reinterpret_cast<const Tile*>(device_.at(list->tiles_at));
      list->view.ranges = reinterpret_cast<const Range*>(device_.at(list->ranges_at));
    }
    if (!dq) dq_ = query_;
  }

  std::int64_t pairs() const override { return pairs_; }
  const Kernels& kernels() const { return kernels_; }
  bool training() const { return training_; }
  const DeviceList& query() const { return query_; }
  const DeviceList& dq() const { return dq_; }
  const DeviceList& key() const { return key_; }
  // The busy tiles of key(), sorted by sequence. sequence_ends(): for each sequence with busy tiles, the
  // index behind its last one.
  const DeviceList& key_by_sequence() const { return key_by_sequence_; }
  const std::vector<int>& sequence_ends() const { return sequence_ends_; }

 private:
  void Stage(const WorkList& from, DeviceList& to) {
    to.tiles_at = StageItems(from.tiles);
    to.ranges_at = StageItems(from.ranges);
    to.view.self_step = from.self_step;
    to.view.other_step = from.other_step;
    to.tiles = to.busy_tiles = static_cast<int>(from.tiles.size());
    while (to.busy_tiles > 0) {
      const Tile& last = from.tiles[static_cast<std::size_t>(to.busy_tiles - 1)];
      if (last.range_begin < last.range_end) break;
      --to.busy_tiles;
    }
  }

  void StageSequences(const WorkList& key) {
    std::vector<Tile> tiles(key.tiles.begin(), key.tiles.begin() + key_.busy_tiles);
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const Tile& a, const Tile& b) { return a.sequence < b.sequence; });
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      if (i + 1 == tiles.size() || tiles[i].sequence != tiles[i + 1].sequence)
        sequence_ends_.push_back(static_cast<int>(i) + 1);
    }
    key_by_sequence_ = key_;
    key_by_sequence_.tiles = key_.busy_tiles;
    key_by_sequence_.tiles_at = StageItems(tiles);
  }

  template <typename Item>
  std::size_t StageItems(const std::vector<Item>& items) {
    const std::size_t at = (staging_.size() + alignof(Item) - 1) / alignof(Item) * alignof(Item);
    staging_.resize(at + items.size() * sizeof(Item));
    if (!items.empty()) std::memcpy(staging_.data() + at, items.data(), items.size() * sizeof(Item));
    return at;
  }

  Kernels kernels_;
  std::int64_t pairs_;
  bool training_;
  std::vector<std::byte> staging_;  // the copy may still read it when the constructor returns
  Buffer device_;
  DeviceList query_;
  DeviceList dq_;
  DeviceList key_;
  DeviceList key_by_sequence_;
  std::vector<int> sequence_ends_;
};

float ScaleLog2(const KernelShape& shape) { return shape.scale * kLog2e; }

Bias BiasOf(const KernelShape& shape, const BiasArgs& args) {
  return {args.tensor.data,  args.batch_stride, args.head_stride,
          args.query_stride, args.alibi_slopes, 1 / shape.scale};
}

// Returns whether a call needs the extended kernels for its bias.
bool HasBias(const BiasArgs& args) { return args.tensor.data || args.alibi_slopes; }

[[noreturn]] void Misused(const std::string& detail) {
  throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'sm80': " + detail);
}

// Launches `blocks` units of work, each shared by `slices` thread blocks.
template <typename Parameters>
void Launch(const Kernel<Parameters>& kernel, std::int64_t blocks, const Parameters& parameters,
            cppool_stream stream, const char* what, unsigned slices = 1) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, std::string(what) + ": more tiles than one kernel takes");
  void* arguments[] = {const_cast<Parameters*>(&parameters)};
  CheckCuda(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(blocks), slices),
                             dim3(static_cast<unsigned>(kernel.threads)), arguments,
                             static_cast<std::size_t>(kernel.shared_bytes), AsCuda(stream)),
            what);
}

class Sm80Kernel : public AttentionKernel {
 public:
  explicit Sm80Kernel(cppool_runtime* rt) : rt_(rt) {
    CheckCuda(cudaDeviceGetAttribute(&max_shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, rt->device),
              "cudaDeviceGetAttribute");
  }

  void Load(const KernelRequest& request) override {
    if (const auto refusal = RefusalOf(request)) throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
    const Kernels kernels(request);
    LoadKernel(kernels.forward, request.shape);
    LoadKernel(kernels.query, request.shape);
    for (const auto& kernel : kernels.key) LoadKernel(kernel, request.shape);
    LoadKernel(kernels.bias, request.shape);
  }

  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override {
    if (const auto refusal = RefusalOf(request)) throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
    const Kernels kernels(request);
    const auto list = [&](Side side, int tile_rows) {
      return BuildWorkList(side, query, key, bands, tile_rows, true);
    };
    const WorkList queries = list(Side::kQuery, kernels.forward.tile_rows);
    if (!request.training)
      return std::make_unique<cuda::Plan>(rt_, kernels, queries, nullptr, nullptr, stream);
    const WorkList keys = list(Side::kKey, kernels.key[0].tile_rows);
    if (kernels.query.tile_rows == kernels.forward.tile_rows)
      return std::make_unique<cuda::Plan>(rt_, kernels, queries, nullptr, &keys, stream);
    const WorkList dq = list(Side::kQuery, kernels.query.tile_rows);
    return std::make_unique<cuda::Plan>(rt_, kernels, queries, &dq, &keys, stream);
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const cuda::Plan& plan = PlanOf(args.plan, args.bias);
    if (args.max_logit && !plan.kernels().forward_extended)
      Misused("max_logit requested with a plan without max_logit");
    if ((args.p_scale != 0) != plan.kernels().fp8) Misused("p_scale and a plan that differ in fp8");
    const DeviceList& list = plan.query();
    const ForwardParameters parameters{list.view,
                                       HeadMapOf(shape),
                                       args.q.data,
                                       args.k.data,
                                       args.v.data,
                                       args.accumulator,
                                       args.out.data,
                                       args.lse,
                                       BiasOf(shape, args.bias),
                                       args.softmax_offset,
                                       args.max_logit,
                                       shape.scale,
                                       ScaleLog2(shape),
                                       args.first,
                                       args.last,
                                       {args.q.scale, args.k.scale, args.v.scale, nullptr},
                                       args.p_scale};
    Launch(plan.kernels().forward, std::int64_t{list.count(args.first, args.last)} * shape.heads, parameters,
           stream, "launching forward attention");
  }

  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const cuda::Plan& plan = TrainingPlanOf(args.plan, args.bias, args.casts);
    if (args.query.wanted) {
      const DeviceList& list = plan.dq();
      Launch(plan.kernels().query, std::int64_t{list.count(args.query.first, args.query.last)} * shape.heads,
             ParametersOf(shape, args, args.query, list.view), stream, "launching dq");
    }
    if (!args.key.wanted) return;
    const DeviceList& list = plan.key();
    for (const Kernel<BackwardParameters>& kernel : plan.kernels().key) {
      if (!kernel.function) continue;
      Launch(kernel, std::int64_t{list.count(args.key.first, args.key.last)} * shape.kv_heads,
             ParametersOf(shape, args, args.key, list.view), stream, "launching dk and dv");
    }
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    const cuda::Plan& plan = TrainingPlanOf(args.plan, args.bias, args.casts);
    const bool sum_heads = gradient.head_stride == 0, sum_queries = gradient.query_stride == 0;
    if (sum_queries && (sum_heads || gradient.batch_stride == 0))
      Misused("a bias gradient summed over queries and also over heads or sequences");
    if (!plan.kernels().bias.function) Misused("a bias gradient requested with a plan without one");
    const auto launch = [&](WorkView view, int first, int tiles) {
      view.tiles += first;
      const std::int64_t blocks = std::int64_t{tiles} * (sum_heads ? 1 : shape.heads);
      // If there are few tiles, several thread blocks share each, except for a sum over queries, which one
      // block computes.
      const unsigned slices =
          sum_queries ? 1
                      : static_cast<unsigned>(std::clamp<std::int64_t>(kBusyBlocks / (blocks + 1), 1, 16));
      Launch(plan.kernels().bias, blocks,
             BiasGradientParameters{ParametersOf(shape, args, args.key, view), gradient}, stream,
             "launching dbias", slices);
    };
    if (gradient.batch_stride != 0) {
      launch(plan.key().view, 0, plan.key().busy_tiles);
      return;
    }
    int first = 0;  // the sequences add to the same elements, so they are launched one after another
    for (const int end : plan.sequence_ends()) {
      launch(plan.key_by_sequence().view, first, end - first);
      first = end;
    }
  }

 private:
  static const cuda::Plan& PlanOf(const BlockPlan* plan, const BiasArgs& bias) {
    const auto& planned = static_cast<const cuda::Plan&>(*plan);
    if (HasBias(bias) && !planned.kernels().extended) Misused("a bias with a plan without bias");
    return planned;
  }

  static const cuda::Plan& TrainingPlanOf(const BlockPlan* plan, const BiasArgs& bias,
                                          const Fp8Casts& casts) {
    const cuda::Plan& planned = PlanOf(plan, bias);
    if (!planned.training()) Misused("a gradient from a plan that is not for training");
    if ((casts.p_scale != 0) != planned.kernels().fp8_backward)
      Misused("casts and a plan that differ in fp8");
    return planned;
  }

  static BackwardParameters ParametersOf(const KernelShape& shape, const BackwardArgs& args,
                                         const GradientPass& pass, const WorkView& work) {
    return {work,
            HeadMapOf(shape),
            args.q.data,
            args.k.data,
            args.v.data,
            args.dout.data,
            args.lse,
            BiasOf(shape, args.bias),
            args.delta,
            args.dq_accumulator,
            args.dq.data,
            args.dk_accumulator,
            args.dv_accumulator,
            args.dk.data,
            args.dv.data,
            shape.scale,
            ScaleLog2(shape),
            pass.first,
            pass.last,
            {args.q.scale, args.k.scale, args.v.scale, args.dout.scale},
            args.casts,
            args.q_of_dk.data,
            args.k_of_dq.data,
            args.dout_of_dv.data};
  }

  template <typename Parameters>
  void LoadKernel(const Kernel<Parameters>& kernel, const KernelShape& shape) {
    if (!kernel.function) return;
    if (kernel.shared_bytes > max_shared_bytes_) {
      throw RuntimeError(CPPOOL_UNSUPPORTED, "head dims " + std::to_string(shape.dim_qk) + "/" +
                                                 std::to_string(shape.dim_v) + " need " +
                                                 std::to_string(kernel.shared_bytes) +
                                                 " bytes of shared memory per block; this device has " +
                                                 std::to_string(max_shared_bytes_));
    }
    // Setting an attribute also loads the function.
    CheckCuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel.shared_bytes),
              "cudaFuncSetAttribute");
    LoadKernels("cudaFuncGetAttributes", kernel.function);
  }

  cppool_runtime* rt_;
  int max_shared_bytes_ = 0;
};

class Family : public AttentionFamily {
 public:
  const char* kernels() const override { return "cppool"; }
  const char* version() const override { return CPPOOL_VERSION; }
  const char* name() const override { return "sm80"; }
  Capabilities capabilities(const KernelRequest&) const override {
    return {.continues_softmax = true,
            .gradients_apart = true,
            .accumulates_gradients = true,
            .splits_keys = true};
  }
  std::optional<std::string> Refusal(const KernelRequest& request) const override {
    return RefusalOf(request);
  }
  std::size_t WorkspaceBytes(const KernelRequest&, std::int64_t, std::int64_t) const override { return 0; }
  std::size_t PlanBytes(const KernelRequest& request, const Layout& query, const Layout& key) const override {
    const Kernels kernels(request);
    std::size_t bytes = WorkListBytes(Side::kQuery, query, key, kernels.forward.tile_rows);
    if (!request.training) return bytes;
    // The plan holds the tiles of keys twice, the second time sorted by sequence.
    bytes += 2 * WorkListBytes(Side::kKey, query, key, kernels.key[0].tile_rows);
    if (kernels.query.tile_rows != kernels.forward.tile_rows)
      bytes += WorkListBytes(Side::kQuery, query, key, kernels.query.tile_rows);
    return bytes + 64;  // for alignment
  }
  std::unique_ptr<AttentionKernel> Open(cppool_runtime* runtime) const override {
    return std::make_unique<Sm80Kernel>(runtime);
  }
};

}  // namespace

const AttentionFamily& Sm80Family() {
  static const Family family;
  return family;
}

}  // namespace cppool::kernels::cuda
