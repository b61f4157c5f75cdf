#include "kernels/attention/families/sm80/attention_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "kernels/attention/tensor_ops/cuda/heads.h"
#include "kernels/attention/families/sm80/kernel.h"
#include "kernels/attention/families/sm80/parameters.h"
#include "kernels/attention/tensor_ops/cuda/sums.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

// As many blocks of threads keep any GPU of today busy.
constexpr std::int64_t kBusyBlocks = 512;

cudaStream_t AsCuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

std::string Describe(const KernelShape& shape) {
  return "head dims " + std::to_string(shape.dim_qk) + "/" + std::to_string(shape.dim_v);
}

// A work list in the device memory of a plan.
struct DeviceList {
  WorkView view{};
  std::size_t tiles_at = 0;  // offsets in the plan's memory
  std::size_t ranges_at = 0;
  int tiles = 0;
  int busy_tiles = 0;  // these come first; the others have no ranges

  // A first or a last call writes every row, others only continue what they have work for.
  int count(bool first, bool last) const { return first || last ? tiles : busy_tiles; }
};

class Plan : public BlockPlan {
 public:
  // `query` may serve as `dq` too.
  Plan(cppool_runtime* rt, const WorkList& query, const WorkList* dq, const WorkList* key,
       cppool_stream stream)
      : pairs_(query.pairs), training_(key != nullptr) {
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
  bool training() const { return training_; }
  const DeviceList& query() const { return query_; }
  const DeviceList& dq() const { return dq_; }
  const DeviceList& key() const { return key_; }
  // The busy tiles of key(), sequence after sequence, and where the tiles of each sequence that has any end.
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

HeadMap MapOf(const KernelShape& shape) {
  return {shape.heads, shape.kv_heads, shape.head0, shape.kv_head0, shape.group};
}

float ScaleLog2(const KernelShape& shape) { return shape.scale * kLog2e; }

Bias BiasOf(const KernelShape& shape, const BiasArgs& args) {
  return {args.tensor,       args.batch_stride, args.head_stride,
          args.query_stride, args.alibi_slopes, 1 / shape.scale};
}

// Whether a call needs the extended kernels.
bool HasBias(const BiasArgs& args) { return args.tensor || args.alibi_slopes; }

template <typename Parameters>
void Launch(const Kernel& kernel, std::int64_t blocks, Parameters parameters, cppool_stream stream,
            const char* what, unsigned slices = 1) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff)
    throw RuntimeError(CPPOOL_UNSUPPORTED, std::string(what) + ": more tiles than one kernel takes");
  void* arguments[] = {&parameters};
  CheckCuda(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(blocks), slices),
                             dim3(static_cast<unsigned>(kernel.threads)), arguments,
                             static_cast<std::size_t>(kernel.shared_bytes), AsCuda(stream)),
            what);
}

class Kernels : public AttentionKernels {
 public:
  explicit Kernels(cppool_runtime* rt) : rt_(rt) {
    CheckCuda(cudaDeviceGetAttribute(&max_shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, rt->device),
              "cudaDeviceGetAttribute");
  }

  void Load(const KernelShape& shape, bool training) override {
    if (!(shape.scale > 0)) throw RuntimeError(CPPOOL_UNSUPPORTED, "the softmax scale must be positive");
    LoadKernel(ForwardKernelOf<false>(shape), shape);
    LoadKernel(ForwardKernelOf<true>(shape), shape);
    if (training) {
      LoadKernel(BackwardQueryKernelOf<false>(shape), shape);
      LoadKernel(BackwardQueryKernelOf<true>(shape), shape);
      for (const auto& kernels : {BackwardKeyKernelsOf<false>(shape), BackwardKeyKernelsOf<true>(shape)}) {
        for (const Kernel& kernel : kernels) {
          if (kernel.function) LoadKernel(kernel, shape);
        }
      }
      LoadKernel(BackwardBiasKernelOf(shape), shape);
    }
    if (std::exchange(small_kernels_loaded_, true)) return;
    LoadHeadKernels();
    LoadSums();
  }

  std::unique_ptr<BlockPlan> Plan(const KernelShape& shape, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, bool training,
                                  cppool_stream stream) override {
    // Plain and extended kernels have the same tiles.
    const int rows = ForwardKernelOf<false>(shape).tile_rows;
    const int dq_rows = BackwardQueryKernelOf<false>(shape).tile_rows,
              key_rows = BackwardKeyKernelsOf<false>(shape)[0].tile_rows;
    if (rows == 0 || dq_rows == 0 || key_rows == 0) throw Unsupported(shape);
    const WorkList queries = BuildWorkList(Side::kQuery, query, key, bands, rows, true);
    if (!training) return std::make_unique<cuda::Plan>(rt_, queries, nullptr, nullptr, stream);
    const WorkList keys = BuildWorkList(Side::kKey, query, key, bands, key_rows, true);
    if (dq_rows == rows) return std::make_unique<cuda::Plan>(rt_, queries, nullptr, &keys, stream);
    const WorkList dq = BuildWorkList(Side::kQuery, query, key, bands, dq_rows, true);
    return std::make_unique<cuda::Plan>(rt_, queries, &dq, &keys, stream);
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const DeviceList& list = PlanOf(args.plan).query();
    const ForwardParameters parameters{list.view,
                                       MapOf(shape),
                                       args.q,
                                       args.k,
                                       args.v,
                                       args.accumulator,
                                       args.out,
                                       args.lse,
                                       BiasOf(shape, args.bias),
                                       args.softmax_offset,
                                       args.max_logit,
                                       shape.scale,
                                       ScaleLog2(shape),
                                       args.first,
                                       args.last};
    const bool extended = HasBias(args.bias) || args.max_logit;
    Launch(extended ? ForwardKernelOf<true>(shape) : ForwardKernelOf<false>(shape),
           std::int64_t{list.count(args.first, args.last)} * shape.heads, parameters, stream,
           "launching forward attention");
  }

  void Delta(const KernelShape& shape, std::int64_t rows, const void* out, const void* dout, float* delta,
             cppool_stream stream) override {
    LaunchDelta(shape.dtype, rows * shape.heads, shape.dim_v, out, dout, delta, AsCuda(stream));
  }

  void BackwardQuery(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const DeviceList& list = TrainingPlanOf(args.plan).dq();
    Launch(HasBias(args.bias) ? BackwardQueryKernelOf<true>(shape) : BackwardQueryKernelOf<false>(shape),
           std::int64_t{list.count(args.first, args.last)} * shape.heads,
           ParametersOf(shape, args, list.view), stream, "launching dq");
  }

  void BackwardKey(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const DeviceList& list = TrainingPlanOf(args.plan).key();
    for (const Kernel& kernel :
         HasBias(args.bias) ? BackwardKeyKernelsOf<true>(shape) : BackwardKeyKernelsOf<false>(shape)) {
      if (!kernel.function) continue;
      Launch(kernel, std::int64_t{list.count(args.first, args.last)} * shape.kv_heads,
             ParametersOf(shape, args, list.view), stream, "launching dk and dv");
    }
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    const cuda::Plan& plan = TrainingPlanOf(args.plan);
    const bool sum_heads = gradient.head_stride == 0, sum_queries = gradient.query_stride == 0;
    if (sum_queries && (sum_heads || gradient.batch_stride == 0)) {
      throw RuntimeError(CPPOOL_INTERNAL, "attention kernels: a bias gradient summed over queries and more");
    }
    const auto launch = [&](WorkView view, int first, int tiles) {
      view.tiles += first;
      const std::int64_t blocks = std::int64_t{tiles} * (sum_heads ? 1 : shape.heads);
      // Few tiles are shared by several blocks of threads, but the sum over queries stays in one.
      const unsigned slices =
          sum_queries ? 1
                      : static_cast<unsigned>(std::clamp<std::int64_t>(kBusyBlocks / (blocks + 1), 1, 16));
      Launch(BackwardBiasKernelOf(shape), blocks,
             BiasGradientParameters{ParametersOf(shape, args, view), gradient}, stream, "launching dbias",
             slices);
    };
    if (gradient.batch_stride != 0) {
      launch(plan.key().view, 0, plan.key().busy_tiles);
      return;
    }
    int first = 0;  // sequences meet in the same elements: one after another
    for (const int end : plan.sequence_ends()) {
      launch(plan.key_by_sequence().view, first, end - first);
      first = end;
    }
  }

  void AddOffset(const KernelShape& shape, std::int64_t rows, const float* lse, const float* offset,
                 float* total, cppool_stream stream) override {
    LaunchAddOffset(rows, shape.heads, lse, offset, total, AsCuda(stream));
  }

  void OffsetGradient(const KernelShape& shape, const BlockPlan* plan, const float* total, const float* delta,
                      const float* offset, float* gradient, cppool_stream stream) override {
    const DeviceList& list = PlanOf(plan).query();
    LaunchOffsetGradient(list.view, list.tiles, ForwardKernelOf<false>(shape).tile_rows, shape.heads, total,
                         delta, offset, gradient, AsCuda(stream));
  }

  void SplitHeads(Dtype dtype, std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                  const void* from, void* to, cppool_stream stream) override {
    LaunchSplitHeads(dtype, rows, heads, dim, ranges, from, to, AsCuda(stream));
  }

  void MergeHeads(Dtype from_dtype, Dtype to_dtype, std::int64_t rows, int heads, int dim,
                  const std::vector<HeadRange>& ranges, const void* from, void* to,
                  cppool_stream stream) override {
    LaunchMergeHeads(from_dtype, to_dtype, rows, heads, dim, ranges, from, to, AsCuda(stream));
  }

  void Fill(float* to, float value, std::int64_t count, cppool_stream stream) override {
    LaunchFill(to, value, count, AsCuda(stream));
  }

  void Add(const float* from, float* to, std::int64_t count, cppool_stream stream) override {
    LaunchAdd(from, to, count, AsCuda(stream));
  }

  void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override {
    LaunchSumRows(from, rows, columns, to, AsCuda(stream));
  }

  void Round(const float* from, Dtype dtype, void* to, std::int64_t count, cppool_stream stream) override {
    LaunchRound(from, dtype, to, count, AsCuda(stream));
  }

 private:
  static RuntimeError Unsupported(const KernelShape& shape) {
    return RuntimeError(CPPOOL_UNSUPPORTED, "no CUDA kernel for " + Describe(shape));
  }

  static const cuda::Plan& PlanOf(const BlockPlan* plan) { return static_cast<const cuda::Plan&>(*plan); }

  static const cuda::Plan& TrainingPlanOf(const BlockPlan* plan) {
    if (!PlanOf(plan).training())
      throw RuntimeError(CPPOOL_INTERNAL,
                         "attention kernels: a gradient from a plan that is not for training");
    return PlanOf(plan);
  }

  static BackwardParameters ParametersOf(const KernelShape& shape, const BackwardArgs& args,
                                         const WorkView& work) {
    return {work,
            MapOf(shape),
            args.q,
            args.k,
            args.v,
            args.dout,
            args.lse,
            BiasOf(shape, args.bias),
            args.delta,
            args.dq_accumulator,
            args.dq,
            args.dk_accumulator,
            args.dv_accumulator,
            args.dk,
            args.dv,
            shape.scale,
            ScaleLog2(shape),
            args.first,
            args.last};
  }

  void LoadKernel(const Kernel& kernel, const KernelShape& shape) {
    if (!kernel.function) throw Unsupported(shape);
    if (kernel.shared_bytes > max_shared_bytes_) {
      throw RuntimeError(CPPOOL_UNSUPPORTED, Describe(shape) + " need " +
                                                 std::to_string(kernel.shared_bytes) +
                                                 " bytes of shared memory per block; this device has " +
                                                 std::to_string(max_shared_bytes_));
    }
    // Setting an attribute loads the function as well.
    CheckCuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel.shared_bytes),
              "cudaFuncSetAttribute");
    cudaFuncAttributes attributes;
    CheckCuda(cudaFuncGetAttributes(&attributes, kernel.function), "cudaFuncGetAttributes");
  }

  cppool_runtime* rt_;
  int max_shared_bytes_ = 0;
  bool small_kernels_loaded_ = false;
};

}  // namespace

std::unique_ptr<AttentionKernels> MakeAttentionKernels(cppool_runtime* runtime) {
  return std::make_unique<Kernels>(runtime);
}

}  // namespace cppool::kernels::cuda
