#include "kernels/attention/families/sm90/family.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include <cppool/version.h>

#include "kernels/attention/families/sm90/choice.h"
#include "kernels/attention/families/sm90/config.h"
#include "kernels/attention/problem/transposed.h"
#include "kernels/numerics/fp8.h"
#include "kernels/runtime.h"
#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace sm90 {
namespace {

// Smaller copies do not reach the link's rate (tests/measure/README.md, "Transfers between two GPUs").
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

// Four tiles of keys for each multiprocessor of an H200. Heads of smaller calls go in step, so that what they
// touch stays in the L2 cache, and a second call beside them is out of step: with 32/4 heads and 8192 keys
// the backward pass took 6.52 ms beside 5.96 (tests/measure/README.md).
constexpr std::size_t kOverlappingKeys = std::size_t{4} * 132 * 128;

// What a kernel leaves to those that move keys beside it: thread blocks here stay to the end of the launch,
// and their shared memory leaves no room for another. A long call would lose more than the transfer takes
// when it comes after it (tests/measure/README.md, "Copies beside NCCL").
constexpr int kTransferMultiprocessors = 24;
constexpr std::int64_t kLongCall = 16384;  // rows of queries by query heads per key/value head

// Memory that starts every launch as 0: an item counter, padded, and a fixed order's turns.
constexpr std::size_t kScheduleBytes = 64;
std::size_t TurnBytes(const KernelRequest& request, std::int64_t blocks) {
  return request.deterministic ? static_cast<std::size_t>(blocks * request.shape.heads) * kTurns * sizeof(int)
                               : 0;
}

// The layout whose tiles a request's backward kernel takes.
Layout ForTiles(const KernelRequest& request, const Layout& layout) {
  return CastsInBlocks(request) ? CutAtMultiples(layout, kMxBlock) : layout;
}

// The work lists in device memory, with the launches' counters, and the general family's plan where it takes
// part.
class Plan : public BlockPlan {
 public:
  // `forward`, `backward`, `bias_gradient`: NULL when the general family does that.
  Plan(cppool_runtime* rt, const KernelRequest& request, const Layout& query, const Layout& key,
       std::size_t sequences, const WorkList* forward, const BackwardList* backward,
       const WorkList* bias_gradient, std::unique_ptr<BlockPlan> general, cppool_stream stream)
      : general_(std::move(general)),
        bias_(request.bias),
        bias_extent_(request.bias_extent),
        sequences_(static_cast<std::int64_t>(sequences)),
        pairs_(forward ? forward->pairs : general_->pairs()),
        rows_q_(query.rows),
        rows_kv_(key.rows),
        block_rows_(key.block_rows),
        native_(MultipliesPayloads(request)),
        key_slots_(native_ ? SlotsOf(key) : 0),
        forward_(forward != nullptr),
        backward_(backward != nullptr),
        bias_gradient_(bias_gradient != nullptr) {
    work_.query_step = query.row_step;
    work_.key_step = key.row_step;
    std::size_t state_at = 0, tiles_at = 0, ranges_at = 0, key_tiles_at = 0, key_biases_at = 0, blocks_at = 0;
    std::size_t bias_tiles_at = 0, bias_ranges_at = 0;
    if (forward) {
      Reserve(kScheduleBytes);  // zeros
      tiles_at = Stage(forward->tiles);
      ranges_at = Stage(forward->ranges);
      work_.tiles_count = work_.busy_tiles = static_cast<int>(forward->tiles.size());
      while (work_.busy_tiles > 0) {
        const Tile& last = forward->tiles[static_cast<std::size_t>(work_.busy_tiles - 1)];
        if (last.range_begin < last.range_end) break;
        --work_.busy_tiles;
      }
    }
    if (backward) {
      turn_bytes_ = TurnBytes(request, static_cast<std::int64_t>(backward->blocks.size()));
      state_at = Reserve(kScheduleBytes + turn_bytes_);
      key_tiles_at = Stage(backward->tiles);
      if (bias_ != BiasType::kNone) key_biases_at = Stage(backward->tile_biases);
      blocks_at = Stage(backward->blocks);
      backward_work_.tiles_count = static_cast<int>(backward->tiles.size());
      backward_work_.busy_tiles = backward->busy_tiles;
      backward_work_.blocks_count = static_cast<int>(backward->blocks.size());
      std::int64_t steps = 0;
      for (const KeyTile& tile : backward->tiles) {
        const int blocks = tile.block_end - tile.block_begin;
        steps += blocks;
        backward_work_.most_blocks = std::max(backward_work_.most_blocks, blocks);
      }
      backward_work_.mean_blocks = static_cast<int>(steps / std::max(backward->busy_tiles, 1));
      backward_work_.query_step = query.row_step;
      backward_work_.key_step = key.row_step;
    }
    if (bias_gradient) {
      bias_tiles_at = Stage(BySequence(bias_gradient->tiles));
      bias_ranges_at = Stage(bias_gradient->ranges);
    }
    if (staging_.empty()) return;
    device_ = Buffer(rt, staging_.size(), stream);
    Check(rt, rt->copy(rt, device_.get(), staging_.data(), staging_.size(), stream));
    work_.tiles = reinterpret_cast<const Tile*>(device_.at(tiles_at));
    work_.ranges = reinterpret_cast<const Range*>(device_.at(ranges_at));
    backward_work_.tiles = reinterpret_cast<const KeyTile*>(device_.at(key_tiles_at));
    backward_work_.blocks = reinterpret_cast<const QueryBlock*>(device_.at(blocks_at));
    key_tile_biases_ = reinterpret_cast<const KeyTileBias*>(device_.at(key_biases_at));
    backward_schedule_ = reinterpret_cast<int*>(device_.at(state_at));
    bias_tiles_ = reinterpret_cast<const Tile*>(device_.at(bias_tiles_at));
    bias_ranges_ = reinterpret_cast<const Range*>(device_.at(bias_ranges_at));
  }

  std::int64_t pairs() const override { return pairs_; }
  bool forward() const { return forward_; }
  bool backward() const { return backward_; }
  const BlockPlan* general() const { return general_.get(); }
  std::int64_t rows_q() const { return rows_q_; }
  std::int64_t rows_kv() const { return rows_kv_; }
  std::int64_t block_rows() const { return block_rows_; }  // of keys that arrive; 0: none do
  bool native() const { return native_; }                  // payloads are multiplied
  std::int64_t key_slots() const { return key_slots_; }
  const WorkView& work() const { return work_; }
  int* schedule() const { return device_.get<int>(); }
  const BackwardWork& backward_work() const { return backward_work_; }
  int* backward_schedule() const { return backward_schedule_; }
  std::size_t turn_bytes() const { return turn_bytes_; }
  BiasType bias() const { return bias_; }
  const KeyTileBias* key_tile_biases() const { return key_tile_biases_; }
  // Tiles of queries for the gradient of the bias, sorted by sequence; the index behind the last one of each
  // sequence that has any; none: nothing is seen.
  const Tile* bias_tiles() const { return bias_tiles_; }
  const Range* bias_ranges() const { return bias_ranges_; }
  const std::vector<int>& bias_sequence_ends() const { return bias_sequence_ends_; }
  bool bias_gradient() const { return bias_gradient_; }

  // Describes the plan's bias or its gradient, for `heads` heads from the one at `data` on.
  BiasTensor BiasTensorOf(const void* data, int heads, std::int64_t sequence_step, std::int64_t head_step,
                          std::int64_t query_step) const {
    return {data,
            sequence_step == 0 ? 1 : sequences_,
            head_step == 0 ? 1 : heads,
            query_step == 0 ? 1 : bias_extent_.queries,
            bias_extent_.keys,
            sequence_step,
            head_step,
            query_step};
  }

  static constexpr std::size_t kAlignment = 16;

 private:
  std::size_t Reserve(std::size_t bytes) {
    const std::size_t at = (staging_.size() + kAlignment - 1) / kAlignment * kAlignment;
    staging_.resize(at + bytes);
    return at;
  }
  template <typename Item>
  std::size_t Stage(const std::vector<Item>& items) {
    const std::size_t at = Reserve(items.size() * sizeof(Item));
    if (!items.empty()) std::memcpy(staging_.data() + at, items.data(), items.size() * sizeof(Item));
    return at;
  }

  // Those that see keys.
  std::vector<Tile> BySequence(std::vector<Tile> tiles) {
    std::erase_if(tiles, [](const Tile& tile) { return tile.range_begin == tile.range_end; });
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const Tile& a, const Tile& b) { return a.sequence < b.sequence; });
    for (std::size_t i = 0; i < tiles.size(); ++i)
      if (i + 1 == tiles.size() || tiles[i].sequence != tiles[i + 1].sequence)
        bias_sequence_ends_.push_back(static_cast<int>(i) + 1);
    return tiles;
  }

  std::unique_ptr<BlockPlan> general_;
  BiasType bias_;
  BiasExtent bias_extent_;
  std::int64_t sequences_;
  std::int64_t pairs_;
  std::int64_t rows_q_;
  std::int64_t rows_kv_;
  std::int64_t block_rows_;
  bool native_;
  std::int64_t key_slots_;  // of v; native
  bool forward_;
  bool backward_;
  bool bias_gradient_;
  std::vector<std::byte> staging_;  // the copy may still read it when the constructor returns
  Buffer device_;
  WorkView work_{};
  BackwardWork backward_work_{};
  int* backward_schedule_ = nullptr;  // then the turns
  std::size_t turn_bytes_ = 0;
  const KeyTileBias* key_tile_biases_ = nullptr;  // with a bias
  const Tile* bias_tiles_ = nullptr;
  const Range* bias_ranges_ = nullptr;
  std::vector<int> bias_sequence_ends_;
};

class Sm90Kernel : public AttentionKernel {
 public:
  Sm90Kernel(cppool_runtime* rt, const AttentionFamily& general)
      : rt_(rt), general_family_(general), general_(general.Open(rt)) {
    CheckCuda(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, rt->device),
              "cudaDeviceGetAttribute");
  }

  void Load(const KernelRequest& request) override {
    if (const auto refusal = general_family_.Refusal(ForGeneral(request)))
      throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
    if (MayNeedGeneral(request)) general_->Load(ForGeneral(request));
    if (HasForward(request)) ForwardOf(request).load();
    if (HasBackward(request)) BackwardOf(request).load();
    if (HasBackward(request) && CastsBackward(request) && !CastsInBlocks(request))
      BackwardOf(request.shape, request.bias, Casts::kP).load();
    if (HasBiasGradient(request)) BiasGradientOf(request.shape, CastsBackward(request)).load();
  }

  std::unique_ptr<BlockPlan> Plan(const KernelRequest& request, const Layout& query, const Layout& key,
                                  const std::vector<Band>& bands, cppool_stream stream) override {
    const auto queries = [&](int tile_rows) {
      return BuildWorkList(Side::kQuery, query, key, bands, tile_rows, true);
    };
    std::optional<WorkList> forward, bias_gradient;
    if (HasForward(request)) {
      forward =
          BuildWorkList(Side::kQuery, query, key, bands, ForwardOf(request).tile_rows, true, kGroupRows);
      OrderByBlock(*forward, key, true);
      if (MultipliesPayloads(request)) AlignToSlots(*forward, key);
    }
    if (HasBiasGradient(request)) bias_gradient = queries(BiasGradientOf(request.shape, false).tile_rows);
    std::optional<BackwardList> backward;
    if (HasBackward(request)) {
      const BackwardKernelEntry entry = BackwardOf(request);
      backward = BuildBackwardList(ForTiles(request, query), ForTiles(request, key), bands, entry.tile_keys,
                                   entry.block_rows);
    }
    const bool has_bias = request.bias == BiasType::kPostScale;
    if (has_bias) {
      const auto drop_unaligned = [](auto& list) {
        if (list && !KeysAligned(*list)) list.reset();
      };
      drop_unaligned(forward);
      drop_unaligned(backward);
      drop_unaligned(bias_gradient);
    }
    std::unique_ptr<BlockPlan> general;
    if (!forward || (request.training && (!backward || (has_bias && !bias_gradient))))
      general = general_->Plan(ForGeneral(request), query, key, bands, stream);
    return std::make_unique<sm90::Plan>(rt_, request, query, key, bands.size(), forward ? &*forward : nullptr,
                                        backward ? &*backward : nullptr,
                                        bias_gradient ? &*bias_gradient : nullptr, std::move(general),
                                        stream);
  }

  void Forward(const KernelShape& shape, const ForwardArgs& args, cppool_stream stream) override {
    const auto& plan = static_cast<const sm90::Plan&>(*args.plan);
    if (!plan.forward()) {
      ForwardArgs general = args;
      general.plan = General(plan);
      general_->Forward(shape, general, stream);
      return;
    }
    if (plan.bias() == BiasType::kNone) RefuseBias(args.bias);
    ForwardCall call;
    call.bias = {BiasOf(shape, plan, args.bias), args.bias.alibi_slopes};
    call.scale = shape.scale;
    call.work = plan.work();
    call.map = HeadMapOf(shape);
    call.rows_q = plan.rows_q();
    call.rows_kv = plan.rows_kv();
    if (plan.block_rows() > 0) {
      const ArrivingKeys& keys = args.arriving;
      if (keys.block_rows != plan.block_rows() || !args.first || !args.last)
        Misused("keys that arrive, in part");
      call.rows_kv = keys.block_rows;
      call.arriving = {keys.k.data,        keys.v.data,     keys.arrivals.flags, keys.arrivals.control,
                       keys.arrivals.pass, keys.block_rows, keys.blocks,         keys.heads_per_piece};
    }
    call.q = args.q.data, call.k = args.k.data, call.v = args.v.data;
    call.accumulator = args.accumulator;
    call.out = args.out.data;
    call.lse = args.lse;
    call.softmax_offset = args.softmax_offset;
    call.max_logit = args.max_logit;
    call.schedule = plan.schedule();
    call.multiprocessors = MultiprocessorsOf(args.beside_transfers, shape, plan.rows_q());
    call.first = args.first;
    call.last = args.last;
    call.fp8 = {args.q.scale, args.k.scale, args.v.scale, nullptr, nullptr, args.p_scale, nullptr};
    call.all_slots = plan.key_slots();
    const auto products = plan.native()       ? Products::kFp8Native
                          : args.p_scale != 0 ? Products::kFp8Values
                                              : Products::kPlain;
    if (plan.native() != IsFp8(args.q.dtype)) Misused("operands of another form");
    ForwardOf(shape, plan.bias(), products).launch(call, reinterpret_cast<cudaStream_t>(stream));
  }

  void Backward(const KernelShape& shape, const BackwardArgs& args, cppool_stream stream) override {
    const auto& plan = static_cast<const sm90::Plan&>(*args.plan);
    if (!plan.backward()) {
      BackwardArgs general = args;
      general.plan = General(plan);
      general_->Backward(shape, general, stream);
      return;
    }
    if (plan.bias() == BiasType::kNone) RefuseBias(args.bias);
    if (!args.query.wanted || !args.key.wanted) Misused("gradients of one side alone");
    BackwardCall call;
    call.scale = shape.scale;
    call.work = plan.backward_work();
    call.map = HeadMapOf(shape);
    call.rows_q = plan.rows_q();
    call.rows_kv = plan.rows_kv();
    call.q = args.q.data, call.k = args.k.data, call.v = args.v.data, call.dout = args.dout.data;
    call.lse = args.lse, call.delta = args.delta;
    call.bias = {BiasOf(shape, plan, args.bias), args.bias.alibi_slopes};
    call.tile_biases = plan.key_tile_biases();
    const bool whole = args.query.first && args.query.last;
    call.dq_sum = whole ? static_cast<float*>(args.workspace) : args.dq_accumulator;
    call.dk_sum = args.dk_accumulator, call.dv_sum = args.dv_accumulator;
    call.dq = args.dq.data, call.dk = args.dk.data, call.dv = args.dv.data;
    call.schedule = plan.backward_schedule();
    if (plan.turn_bytes() > 0) call.turns = call.schedule + kScheduleBytes / sizeof(int);
    call.state_bytes = kScheduleBytes + plan.turn_bytes();
    call.multiprocessors = MultiprocessorsOf(args.beside_transfers, shape, plan.rows_q());
    call.query_first = args.query.first, call.query_last = args.query.last;
    call.key_first = args.key.first, call.key_last = args.key.last;
    call.fp8 = {args.q.scale,        args.k.scale,       args.v.scale,      args.dout.scale,
                args.casts.ds_scale, args.casts.p_scale, args.casts.amax_ds};
    call.q_of_dk = args.q_of_dk.data, call.k_of_dq = args.k_of_dq.data;
    call.dout_of_dv = args.dout_of_dv.data;
    call.beside = reinterpret_cast<cudaStream_t>(args.beside);
    const Casts casts = args.casts.p_scale == 0 ? Casts::kNone
                        : args.casts.ds_blocks  ? Casts::kBlocks
                        : args.casts.ds_scale   ? Casts::kPAndDs
                                                : Casts::kP;
    BackwardOf(shape, plan.bias(), casts).launch(call, reinterpret_cast<cudaStream_t>(stream));
  }

  void BackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                    cppool_stream stream) override {
    const auto& plan = static_cast<const sm90::Plan&>(*args.plan);
    if (!plan.bias_gradient()) {
      BackwardArgs general = args;
      general.plan = General(plan);
      general_->BackwardBias(shape, general, gradient, stream);
      return;
    }
    BiasGradientCall call;
    call.scale = shape.scale;
    call.ranges = plan.bias_ranges();
    call.query_step = plan.work().query_step, call.key_step = plan.work().key_step;
    call.map = HeadMapOf(shape);
    call.rows_q = plan.rows_q();
    call.rows_kv = plan.rows_kv();
    call.q = args.q.data, call.k = args.k.data, call.v = args.v.data, call.dout = args.dout.data;
    call.lse = args.lse, call.delta = args.delta;
    call.bias = BiasOf(shape, plan, args.bias);
    call.gradient = plan.BiasTensorOf(gradient.sum, shape.heads, gradient.batch_stride, gradient.head_stride,
                                      gradient.query_stride);
    call.multiprocessors = multiprocessors_;
    call.fp8 = {args.q.scale, args.k.scale, args.v.scale, args.dout.scale, nullptr, 0, nullptr};
    // Sequences that share the bias add to the same elements, one launch after another, in a fixed order.
    int first = 0;
    const std::vector<int>& ends = plan.bias_sequence_ends();
    if (ends.empty()) return;  // nothing is seen here
    for (std::size_t i = gradient.batch_stride == 0 ? 0 : ends.size() - 1; i < ends.size(); ++i) {
      call.tiles = plan.bias_tiles() + first;
      call.tiles_count = ends[i] - first;
      BiasGradientOf(shape, args.casts.p_scale != 0).launch(call, reinterpret_cast<cudaStream_t>(stream));
      first = ends[i];
    }
  }

 private:
  [[noreturn]] static void Misused(const std::string& detail) {
    throw RuntimeError(CPPOOL_INTERNAL, "attention kernel 'sm90': " + detail);
  }
  static void RefuseBias(const BiasArgs& bias) {
    if (bias.tensor.data || bias.alibi_slopes) Misused("a bias with a plan for none");
  }
  static BiasTensor BiasOf(const KernelShape& shape, const sm90::Plan& plan, const BiasArgs& bias) {
    if (!bias.tensor.data) return {};
    return plan.BiasTensorOf(bias.tensor.data, shape.heads, bias.batch_stride, bias.head_stride,
                             bias.query_stride);
  }
  int MultiprocessorsOf(bool beside_transfers, const KernelShape& shape, std::int64_t rows_q) const {
    const bool leaves = beside_transfers && rows_q * shape.group < kLongCall;
    return leaves ? std::max(multiprocessors_ - kTransferMultiprocessors, 2) : multiprocessors_;
  }
  static const BlockPlan* General(const sm90::Plan& plan) {
    if (!plan.general()) Misused("a plan that is for less than this call");
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
  // The backward kernel here makes all gradients of a block; the general family's make them apart.
  Capabilities capabilities(const KernelRequest& request) const override {
    Capabilities can = general_.capabilities(ForGeneral(request));
    can.continues_softmax = can.accumulates_gradients = true;
    if (HasBackward(request)) can.gradients_apart = false;
    can.overlapping_keys = HasBackward(request) ? kOverlappingKeys : 0;
    // The bias tensor's alignment decides block by block who computes (KeysAligned).
    const bool whole = HasForward(request) && !request.fp8 && request.bias != BiasType::kPostScale;
    can.arriving_piece_bytes = whole ? kPieceBytes : 0;
    if (MultipliesPayloads(request)) {
      can.forward_qk = Fp8Form::kPayload;
      can.forward_v = Fp8Form::kTransposed;
      can.fp8_sum_keys = NativeForwardTiling<128, 128>::kBlock;  // as with all head dims
    }
    return can;
  }
  std::optional<std::string> Refusal(const KernelRequest& request) const override {
    if (request.fp8 && request.fp8->products == Fp8Products::kNative && !MultipliesPayloads(request)) {
      return "fp8_products is 'native': the kernel family 'sm90' multiplies payloads in the forward pass of "
             "scaling_mode 'delayed' and 'current', without a bias";
    }
    return general_.Refusal(ForGeneral(request));
  }
  // The workspace holds dq in fp32.
  std::size_t WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                             std::int64_t rows_kv) const override {
    const KernelShape& shape = request.shape;
    const std::size_t own =
        HasBackward(request) ? static_cast<std::size_t>(rows_q * shape.heads * shape.dim_qk) * sizeof(float)
                             : 0;
    return MayNeedGeneral(request)
               ? std::max(own, general_.WorkspaceBytes(ForGeneral(request), rows_q, rows_kv))
               : own;
  }
  std::size_t PlanBytes(const KernelRequest& request, const Layout& query, const Layout& key) const override {
    std::size_t bytes = 0;
    if (MayNeedGeneral(request)) bytes += general_.PlanBytes(ForGeneral(request), query, key);
    if (HasForward(request)) {
      const int tile_rows = ForwardOf(request).tile_rows;
      bytes += kScheduleBytes + WorkListBytes(Side::kQuery, query, key, tile_rows) + 2 * Plan::kAlignment;
    }
    if (HasBackward(request)) {
      const BackwardKernelEntry entry = BackwardOf(request);
      const Layout queries = ForTiles(request, query), keys = ForTiles(request, key);
      bytes += kScheduleBytes + TurnBytes(request, CountBlocks(queries, entry.block_rows)) +
               BackwardListBytes(queries, keys, entry.tile_keys, entry.block_rows) + 4 * Plan::kAlignment;
    }
    if (HasBiasGradient(request)) {
      const int tile_rows = BiasGradientOf(request.shape, false).tile_rows;
      bytes += WorkListBytes(Side::kQuery, query, key, tile_rows) + 2 * Plan::kAlignment;
    }
    return bytes;
  }
  std::unique_ptr<AttentionKernel> Open(cppool_runtime* runtime) const override {
    return std::make_unique<Sm90Kernel>(runtime, general_);
  }

 private:
  const AttentionFamily& general_;
};

}  // namespace
}  // namespace sm90

std::unique_ptr<const AttentionFamily> MakeSm90Family(const AttentionFamily& general) {
  return std::make_unique<sm90::Family>(general);
}

}  // namespace cppool::kernels::cuda
