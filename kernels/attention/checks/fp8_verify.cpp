#include "kernels/attention/checks/fp8_verify.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "kernels/attention/checks/host_array.h"
#include "kernels/error.h"

namespace cppool::kernels {
namespace {

const QuantizedOperand* Find(const Fp8Step& step, Operand operand) {
  for (const QuantizedOperand& each : step.operands) {
    if (each.operand == operand) return &each;
  }
  return nullptr;
}

// Returns the axis that the operand's product sums over.
MxAxis ExpectedAxis(Operand operand) {
  switch (operand) {
    case Operand::kQ:
    case Operand::kK:
    case Operand::kDout:
    case Operand::kVOfDp:
      return MxAxis::kDim;
    case Operand::kV:
    case Operand::kQOfDk:
    case Operand::kKOfDq:
    case Operand::kDoutOfDv:
      return MxAxis::kTokens;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "checks: no such operand");
}

// Returns the rows of the layout that hold tokens.
std::vector<std::int64_t> TokensOf(const Layout& layout) {
  std::vector<std::int64_t> rows;
  for (const Segment& segment : layout.segments) {
    for (std::int64_t t = 0; t < segment.length; ++t) rows.push_back(segment.row + t * layout.row_step);
  }
  return rows;
}

bool IsOfKeys(InputTensor tensor) { return tensor == InputTensor::kK || tensor == InputTensor::kV; }

// Gathers the ranks' parts, of `bytes` bytes each.
void Gather(cppool_runtime* rt, const Group& world, const void* part, std::size_t bytes, const Buffer& to) {
  Check(rt, world.size > 1 ? rt->all_gather(rt, part, to.get(), bytes, world.comm, rt->stream)
                           : rt->copy(rt, to.get(), part, bytes, rt->stream));
}

}  // namespace

Buffer GatherDelta(cppool_runtime* rt, const AttentionSpec& spec, CheckKernels& kernels,
                   const Fp8Step& step) {
  const Group world = GetGroup(rt, CPPOOL_WORLD);
  const std::int64_t vector = std::int64_t{spec.heads} * sizeof(float);
  const std::int64_t bytes = RankLayout(spec.format, spec.queries, world.size, world.rank).rows * vector;
  const Buffer gathered(rt, static_cast<std::size_t>(bytes * world.size), rt->stream);
  Buffer delta(rt, gathered.bytes(), rt->stream);
  Gather(rt, world, step.delta, static_cast<std::size_t>(bytes), gathered);
  Check(rt, rt->fill(rt, delta.get(), 0, delta.bytes(), rt->stream));  // of rows without a token
  const Layout whole = GlobalLayout(spec.format, spec.queries);
  std::vector<RowsCopy> copies;
  for (int rank = 0; rank < world.size; ++rank) {
    const Layout part = RankLayout(spec.format, spec.queries, world.size, rank);
    auto target = whole.segments.begin();  // one for each sequence, which the part's segments lie in
    for (const Segment& segment : part.segments) {
      while (target->sequence < segment.sequence) ++target;
      RowsCopy& copy = copies.emplace_back();
      copy.from = gathered.at(static_cast<std::size_t>(rank * bytes + segment.row * vector));
      copy.to = delta.at(
          static_cast<std::size_t>((target->row + std::int64_t{segment.position} * whole.row_step) * vector));
      copy.rows = segment.length;
      copy.bytes = vector;
      copy.from_row = part.row_step * vector;
      copy.to_row = whole.row_step * vector;
      if (copies.size() < CheckKernels::kMostCopies) continue;
      kernels.CopyRows(copies, {}, rt->stream);
      copies.clear();
    }
  }
  if (!copies.empty()) kernels.CopyRows(copies, {}, rt->stream);
  return delta;
}

Fp8Verifier::Fp8Verifier(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
                         const TensorSet& local, const TensorSet& global, const Fp8Step& step,
                         const Fp8Step& reference, const float* delta, AttentionReport& report)
    : rt_(runtime),
      spec_(spec),
      kernels_(kernels),
      local_(local),
      global_(global),
      step_(step),
      reference_(reference),
      report_(report),
      world_(GetGroup(runtime, CPPOOL_WORLD)),
      all_(spec, 1, 0),
      mine_(spec, runtime->world_size, runtime->rank) {
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
  const bool in_blocks = InBlocks(*spec.fp8);
  const auto operand = [&](Operand which, bool values) -> TensorRef {
    const QuantizedOperand* found = Find(reference_, which);
    return !found ? TensorRef{} : values ? found->values : found->payload;
  };
  const auto input = [&](InputTensor tensor, Dtype dtype) -> TensorRef {
    return {global_.get(tensor), dtype};
  };
  problem_.backward = spec.training && spec.fp8->bwd;
  problem_.q = operand(Operand::kQ, in_blocks);
  problem_.k = operand(Operand::kK, in_blocks);
  problem_.v = operand(Operand::kV, in_blocks);
  problem_.p_scale = PScale(*spec.fp8);
  const auto scale_of = [&](const Fp8Scale* scale) {
    return scale ? ToHost<Fp8Scale>(rt_, scale, 1).front().scale : 0.0;
  };
  problem_.out_scale = scale_of(step_.out);
  if (!spec.training) return;
  problem_.delta = delta;
  problem_.gradient_scale = scale_of(step_.gradients);
  problem_.ds_scale = scale_of(step_.ds);
  problem_.ds_blocks = in_blocks && problem_.backward;
  problem_.dout = input(InputTensor::kDout, spec.dtypes.dout);
  const bool values = in_blocks || !problem_.backward;
  problem_.q_of_p = operand(Operand::kQ, values);
  problem_.k_of_p = operand(Operand::kK, values);
  problem_.v_of_dp = operand(in_blocks && problem_.backward ? Operand::kVOfDp : Operand::kV, values);
  if (!problem_.backward) return;
  problem_.dout = operand(Operand::kDout, values);
  problem_.q_of_dk = operand(Operand::kQOfDk, values);
  problem_.k_of_dq = operand(Operand::kKOfDq, values);
  problem_.dout_of_dv = operand(Operand::kDoutOfDv, values);
}

double Fp8Verifier::Bytes(const AttentionSpec& spec, int world_size) {
  const double scales = 3 * sizeof(float) * (1.0 + world_size);
  return scales +
         (spec.training ? 2 * sizeof(float) * static_cast<double>(spec.queries.rows) * spec.heads : 0);
}

double Fp8Verifier::HostBytes(const AttentionSpec& spec, int world_size) {
  const auto rows_q = static_cast<double>(spec.queries.rows), rows_kv = static_cast<double>(spec.keys.rows);
  constexpr double kOfRow = 2 * sizeof(std::int64_t);  // its number, and that in the whole tensor
  const double of_tokens = kOfRow * (rows_q + rows_kv) * (1 + 1.0 / world_size);  // all_ and mine_
  // A rank may have an operand of all keys; its blocks have 32 tokens, but for the last of a chunk.
  const double most = std::max(rows_q, rows_kv);
  const double blocks = InBlocks(*spec.fp8) ? most / kMxBlock + 2.0 * world_size * spec.batch : 0;
  return of_tokens + kOfRow * most + (sizeof(Segment) + sizeof(RowTile)) * blocks;
}

template <typename T>
Buffer Fp8Verifier::ToDevice(const std::vector<T>& values) const {
  Buffer buffer(rt_, values.size() * sizeof(T), rt_->stream);
  if (!values.empty()) Check(rt_, rt_->copy(rt_, buffer.get(), values.data(), buffer.bytes(), rt_->stream));
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));  // `values` may go
  return buffer;
}

Fp8Verifier::DeviceRows Fp8Verifier::RowsToDevice(const std::vector<std::int64_t>& rows,
                                                  const std::vector<std::int64_t>& whole) const {
  DeviceRows device{{}, ToDevice(rows), ToDevice(whole)};
  device.view = {device.rows.get<std::int64_t>(), static_cast<std::int64_t>(rows.size()),
                 device.whole.get<std::int64_t>()};
  return device;
}

Fp8Verifier::DeviceRows Fp8Verifier::RowsOf(const QuantizedOperand& operand) const {
  const RankRows& all = IsOfKeys(operand.tensor) ? all_.keys : all_.queries;
  return RowsToDevice(TokensOf(operand.layout), RowMap(operand.layout, all.layout));
}

Fp8Verifier::Tally Fp8Verifier::Run(const BitsCheck& check) const {
  Results<Tally> results(rt_, 1, Tally{.wrong = 1, .count = 1});
  Tally* const result = results.Next();
  kernels_.CheckBits(check, result, rt_->stream);
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
  return *result;
}

float Fp8Verifier::ExpectedScale(Dtype format, std::initializer_list<InputTensor> tensors) const {
  double most = 0;
  for (const TensorSet::Tensor& each : global_.inputs()) {
    const InputTensor tensor = std::get<InputTensor>(each.info.kind);
    if (std::find(tensors.begin(), tensors.end(), tensor) == tensors.end()) continue;
    const DeviceRows rows = RowsToDevice(all_.of(each.info).tokens, {});
    const fp8_bits::Amax amax{rows.view, static_cast<const std::uint16_t*>(Input(tensor).data),
                              each.info.columns};
    most = std::max(most, Run({amax}).largest);
  }
  if (most == 0 || std::isinf(most)) return 1;
  const double scale =
      (format == Dtype::kE4M3 ? 448.0 : 57344.0) / most;  // rounded once more: the same, of two floats
  return scale > FLT_MAX ? FLT_MAX : static_cast<float>(scale);
}

Fp8Verifier::Tally Fp8Verifier::CheckScale(const Fp8Scale* stored, float expected) const {
  const Fp8Scale scale = ToHost<Fp8Scale>(rt_, stored, 1).front();
  Tally tally;
  tally.Compare(expected, scale.scale);
  tally.Compare(static_cast<float>(1.0 / expected), scale.inverse);
  return tally;
}

fp8_bits::Operand Fp8Verifier::OperandOf(const QuantizedOperand& operand, const fp8_bits::Rows& rows) const {
  return {rows,
          static_cast<const std::uint16_t*>(Input(operand.tensor).data),
          operand.payload.dtype,
          static_cast<const std::uint8_t*>(operand.payload.data),
          static_cast<const std::uint16_t*>(operand.values.data),
          IsOfKeys(operand.tensor) ? spec_.kv_heads : spec_.heads,
          operand.head0,
          operand.heads,
          operand.dim};
}

Fp8Verifier::Tally Fp8Verifier::CheckOperand(const QuantizedOperand& operand, float scale) const {
  const DeviceRows rows = RowsOf(operand);
  // Without a backward pass in fp8 the last values are those for 16 bits.
  const float inverse = spec_.training && !spec_.fp8->bwd ? static_cast<float>(1.0 / scale) : 1.0f;
  Tally tally = Run({fp8_bits::ScaledOperand{OperandOf(operand, rows.view), scale, inverse}});
  tally.Compare(static_cast<float>(1.0 / scale), ToHost<float>(rt_, operand.payload.scale, 1).front());
  return tally;
}

Fp8Verifier::Tally Fp8Verifier::CheckBlocks(const QuantizedOperand& operand) const {
  const Sequences& sequences = IsOfKeys(operand.tensor) ? spec_.keys : spec_.queries;
  Tally tally;
  tally.Compare(static_cast<double>(ExpectedAxis(operand.operand)), static_cast<double>(*operand.axis));
  std::vector<RowTile> blocks;
  std::uint64_t tokens = 0, all_tokens = 0;
  for (const Segment& block : MxBlocks(operand.layout, MxChunks(sequences, rt_->world_size))) {
    // By the definition: 32 tokens of a chunk, as far as the sequence has them.
    const std::int64_t chunk =
        sequences.room[static_cast<std::size_t>(block.sequence)] / (2 * std::int64_t{rt_->world_size});
    const std::int64_t chunk_begin = block.position / chunk * chunk;
    const std::int64_t expected_end = std::min({block.position + std::int64_t{32}, chunk_begin + chunk,
                                                sequences.length[static_cast<std::size_t>(block.sequence)]});
    tally.Compare(static_cast<double>((block.position - chunk_begin) % 32), 0);
    tally.Compare(static_cast<double>(expected_end - block.position), block.length);
    tokens += static_cast<std::uint64_t>(block.length);
    blocks.push_back({block.row, block.length});
  }
  for (const Segment& segment : operand.layout.segments)
    all_tokens += static_cast<std::uint64_t>(segment.length);
  tally.Compare(static_cast<double>(all_tokens), static_cast<double>(tokens));
  const DeviceRows rows = RowsOf(operand);
  const Buffer tiles = ToDevice(blocks);
  tally.Add(Run({fp8_bits::BlockOperand{OperandOf(operand, rows.view), *operand.axis, operand.exponents,
                                        tiles.get<RowTile>(), static_cast<std::int64_t>(blocks.size()),
                                        operand.layout.row_step}}));
  return tally;
}

// Compares the scales of results and of dS between the ranks: the inputs do not give these.
Fp8Verifier::Tally Fp8Verifier::CheckSameScales() const {
  constexpr int kScales = 3;
  const Buffer mine(rt_, kScales * sizeof(float), rt_->stream),
      all(rt_, mine.bytes() * world_.size, rt_->stream);
  Check(rt_, rt_->fill(rt_, mine.get(), 0, mine.bytes(), rt_->stream));
  const Fp8Scale* const scales[kScales] = {step_.ds, step_.out, step_.gradients};
  for (int i = 0; i < kScales; ++i) {
    if (scales[i])
      Check(rt_, rt_->copy(rt_, mine.get<float>() + i, &scales[i]->scale, sizeof(float), rt_->stream));
  }
  Gather(rt_, world_, mine.get(), mine.bytes(), all);
  const auto of_all = ToHost<float>(rt_, all.get(), static_cast<std::size_t>(kScales * world_.size));
  Tally tally;
  for (int i = 0; i < kScales * world_.size; ++i) tally.Compare(of_all[i % kScales], of_all[i]);
  return tally;
}

// Where O is both kept in 16 bits and cast for D; or where what leaves was a payload.
Fp8Verifier::Tally Fp8Verifier::CheckOut() const {
  if (!spec_.training || !IsFp8(step_.out_of_delta.dtype)) return {};
  const DeviceRows rows = RowsToDevice(mine_.queries.tokens, {});
  return Run({fp8_bits::Out{rows.view, static_cast<const std::uint8_t*>(step_.out_of_delta.data),
                            static_cast<const std::uint16_t*>(local_.get(CheckedTensor::kOut)),
                            spec_.heads * spec_.dim_v,
                            ToHost<float>(rt_, step_.out_of_delta.scale, 1).front(), step_.out != nullptr}});
}

Fp8Verifier::Tally Fp8Verifier::CheckDelta() const {
  const DeviceRows rows = RowsToDevice(mine_.queries.tokens, {});
  const auto scale = [&](const TensorRef& tensor) {
    return tensor.scale ? ToHost<float>(rt_, tensor.scale, 1).front() : 1.0f;
  };
  return Run({fp8_bits::Delta{rows.view, step_.out_of_delta, step_.dout_of_delta, scale(step_.out_of_delta),
                              scale(step_.dout_of_delta), step_.delta, spec_.heads, spec_.dim_v}});
}

void Fp8Verifier::Report(CheckedTensor tensor, const char* against, const Tally& tally) {
  if (tally.count == 0) return;
  Verdict verdict = JudgeBits(tally.wrong, tally.count, tally.largest);
  if (!verdict.ok) verdict.bad = tally.wrong;
  report_.Check(tensor, against, verdict);
}

void Fp8Verifier::CheckBits() {
  float qkv = 0, dout = 0;
  if (step_.qkv) qkv = ExpectedScale(Dtype::kE4M3, {InputTensor::kQ, InputTensor::kK, InputTensor::kV});
  if (step_.dout) dout = ExpectedScale(Dtype::kE5M2, {InputTensor::kDout});
  for (const auto& [tensor, checked] :
       {std::pair{InputTensor::kQ, CheckedTensor::kQ}, std::pair{InputTensor::kK, CheckedTensor::kK},
        std::pair{InputTensor::kV, CheckedTensor::kV}, std::pair{InputTensor::kDout, CheckedTensor::kDout}}) {
    Tally tally;
    for (const QuantizedOperand& operand : step_.operands) {
      if (operand.tensor != tensor) continue;
      const bool is_dout = tensor == InputTensor::kDout;
      if (operand.axis) {
        tally.Add(CheckBlocks(operand));
      } else {
        tally.Add(CheckScale(is_dout ? step_.dout : step_.qkv, is_dout ? dout : qkv));
        tally.Add(CheckOperand(operand, is_dout ? dout : qkv));
      }
    }
    Report(checked, "bits", tally);
  }
  Tally out = CheckOut();
  out.Add(CheckSameScales());
  Report(CheckedTensor::kOut, "bits", out);
  if (spec_.training) Report(CheckedTensor::kDelta, "bits", CheckDelta());
}

}  // namespace cppool::kernels
