#include "kernels/attention/run/stored_tensors.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "kernels/attention/fp8_table.h"
#include "kernels/attention/schedule.h"
#include "kernels/error.h"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels {
namespace {

using Kind = std::variant<InputTensor, CheckedTensor>;

TensorInfo Describe(const AttentionSpec& spec, const Kind& kind) {
  const bool input = std::holds_alternative<InputTensor>(kind);
  for (TensorInfo& info : input ? InputTensors(spec) : OutputTensors(spec)) {
    const bool same = input ? std::get<InputTensor>(info.kind) == std::get<InputTensor>(kind)
                            : std::get<CheckedTensor>(info.kind) == std::get<CheckedTensor>(kind);
    if (same) return std::move(info);
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such tensor in this case");
}

const Sequences& SequencesOf(const AttentionSpec& spec, const TensorInfo& info) {
  return info.rows_of == TensorRows::kKeys ? spec.keys : spec.queries;
}

// Where the blocks of 32 tokens lie in kColumnExponents: those of a chunk follow each other, in a dump's
// order of tokens.
class BlockPlaces {
 public:
  BlockPlaces(QkvFormat format, const Sequences& sequences, int world_size)
      : format_(format),
        batch_(static_cast<std::int64_t>(sequences.room.size())),
        chunks_(MxChunks(sequences, world_size)) {
    for (const std::int64_t chunk : chunks_) {
      first_.push_back(count_);
      count_ += 2 * std::int64_t{world_size} * BlocksOf(chunk);
    }
  }
  std::int64_t count() const { return count_; }
  std::int64_t Place(const Segment& block) const {
    const auto s = static_cast<std::size_t>(block.sequence);
    const std::int64_t chunk = chunks_[s], in_sequence = block.position / chunk * BlocksOf(chunk) +
                                                         block.position % chunk / kMxBlock;
    return format_ == QkvFormat::kSbhd ? in_sequence * batch_ + block.sequence : first_[s] + in_sequence;
  }

 private:
  static std::int64_t BlocksOf(std::int64_t chunk) { return (chunk + kMxBlock - 1) / kMxBlock; }

  QkvFormat format_;
  std::int64_t batch_, count_ = 0;
  std::vector<std::int64_t> chunks_, first_;
};

TensorInfo Part(const AttentionSpec& spec, int world_size, const Kind& of, StoredPart part, Dtype dtype) {
  TensorInfo info = Describe(spec, of);
  info.kind = StoredTensor{of, part};
  info.dtype = dtype;
  switch (part) {
    case StoredPart::kPayload:
    case StoredPart::kRowPayload:
    case StoredPart::kColumnPayload:
    case StoredPart::kF16:
      break;
    case StoredPart::kScaleInverse:
      info.rows_of = TensorRows::kWhole;
      info.rows = info.columns = 1;
      info.shape = {1};
      info.axes = {"tensor"};
      break;
    case StoredPart::kRowExponents:
      info.columns /= kMxBlock;
      info.shape.back() /= kMxBlock;
      info.axes.back() = "block";
      break;
    case StoredPart::kColumnExponents: {
      const std::size_t axis = spec.format == QkvFormat::kBshd ? 1 : 0;
      info.rows = BlockPlaces(spec.format, SequencesOf(spec, info), world_size).count();
      info.shape[axis] = spec.format == QkvFormat::kThd ? info.rows : info.rows / spec.batch;
      info.axes[axis] = "block";
      break;
    }
  }
  return info;
}

// What is stored of a tensor: its payload, then its scales.
std::vector<std::pair<StoredPart, Dtype>> PartsOf(const Fp8Row& row) {
  if (row.stored()) return {{StoredPart::kPayload, row.format}, {StoredPart::kScaleInverse, Dtype::kFp32}};
  if (row.cast != Fp8Cast::kWhereRead) return {};
  if (row.axis == MxAxis::kDim)
    return {{StoredPart::kRowPayload, row.format}, {StoredPart::kRowExponents, row.format}};
  return {{StoredPart::kColumnPayload, row.format}, {StoredPart::kColumnExponents, row.format}};
}

Kind KindOf(Fp8Tensor tensor) {
  constexpr Kind kKinds[] = {InputTensor::kQ,     InputTensor::kK,    InputTensor::kV,    InputTensor::kDout,
                             CheckedTensor::kOut, CheckedTensor::kDq, CheckedTensor::kDk, CheckedTensor::kDv};
  return kKinds[static_cast<std::size_t>(tensor)];
}

class Saver {
 public:
  Saver(cppool_runtime* runtime, const AttentionSpec& spec, TensorSink& sink)
      : rt_(runtime), spec_(spec), sink_(sink), tokens_(spec, runtime->world_size, runtime->rank) {}

  // Rows with a token of a tensor that has the rank's rows.
  void Save(const TensorInfo& info, const void* data) const {
    const RankRows& rows = tokens_.of(info);
    const std::size_t row_bytes = static_cast<std::size_t>(info.columns) * SizeOf(info.dtype);
    const std::vector<std::byte> bits =
        ToHost<std::byte>(rt_, data, static_cast<std::size_t>(info.rows / rt_->world_size) * row_bytes);
    for (const std::int64_t row : rows.tokens)
      sink_.WriteRow(info, false, rows.whole[static_cast<std::size_t>(row)],
                     &bits[static_cast<std::size_t>(row) * row_bytes]);
  }

  void SaveScale(const TensorInfo& info, const float* inverse) const {
    if (rt_->rank != 0) return;
    sink_.WriteRow(info, false, 0, ToHost<std::byte>(rt_, inverse, sizeof(float)).data());
  }

  void SaveInBlocks(TensorOps& ops, const TensorSet& local, const Fp8Row& row, const TensorInfo& payload,
                    const TensorInfo& exponents) const {
    const InputTensor tensor = std::get<InputTensor>(KindOf(row.tensor));
    const MxAxis axis = *row.axis;
    const Layout& layout = tokens_.of(payload).layout;
    const Sequences& sequences = SequencesOf(spec_, payload);
    const std::vector<std::int64_t> chunks = MxChunks(sequences, rt_->world_size);
    const std::vector<Segment> blocks = MxBlocks(layout, chunks);
    const int heads = static_cast<int>(payload.shape[payload.shape.size() - 2]),
              dim = static_cast<int>(payload.shape.back());
    const auto count = static_cast<std::int64_t>(blocks.size());
    const Buffer stored(rt_, static_cast<std::size_t>(layout.rows * payload.columns), rt_->stream),
        powers(rt_, static_cast<std::size_t>(MxExponents(axis, layout.rows, count, heads, dim)), rt_->stream);
    const auto rows = ops.fp8().Blocks(layout, chunks, rt_->stream);
    ops.fp8().CastBlocks(*rows, axis, heads, dim, {local.get(tensor), spec_.dtypes.q},
                         {stored.get<std::uint8_t>(), powers.get<std::uint8_t>()}, rt_->stream);
    Save(payload, stored.get());
    if (axis == MxAxis::kDim) return Save(exponents, powers.get());
    const BlockPlaces places(spec_.format, sequences, rt_->world_size);
    const std::vector<std::byte> bits = ToHost<std::byte>(rt_, powers.get(), powers.bytes());
    for (std::size_t i = 0; i < blocks.size(); ++i)
      sink_.WriteRow(exponents, false, places.Place(blocks[i]),
                     &bits[i * static_cast<std::size_t>(exponents.columns)]);
  }

 private:
  cppool_runtime* rt_;
  const AttentionSpec& spec_;
  TensorSink& sink_;
  RankTokens tokens_;
};

}  // namespace

std::vector<TensorInfo> StoredTensors(const AttentionSpec& spec, int world_size) {
  std::vector<TensorInfo> stored;
  if (!spec.fp8) return stored;
  const Fp8Table table = Fp8TableOf(*spec.fp8, spec.training);
  for (const Fp8Row& row : table) {
    for (const auto& [part, dtype] : PartsOf(row))
      stored.push_back(Part(spec, world_size, KindOf(row.tensor), part, dtype));
  }
  if (KeepsOut16(table, spec.training))
    stored.push_back(Part(spec, world_size, CheckedTensor::kOut, StoredPart::kF16, spec.dtypes.out));
  return stored;
}

void SaveStored(cppool_runtime* runtime, TensorOps& ops, const AttentionSpec& spec, const TensorSet& local,
                const Fp8Step& step, TensorSink& sink) {
  const Saver saver(runtime, spec, sink);
  const auto stored = StoredTensors(spec, runtime->world_size);
  auto next = stored.begin();
  for (const Fp8Row& row : Fp8TableOf(*spec.fp8, spec.training)) {
    if (PartsOf(row).empty()) continue;
    const TensorInfo &values = *next++, &scales = *next++;
    if (row.cast == Fp8Cast::kWhereRead) {
      saver.SaveInBlocks(ops, local, row, values, scales);
    } else {
      const TensorRef& payload = step.stored[static_cast<std::size_t>(row.tensor)];
      saver.Save(values, payload.data);
      saver.SaveScale(scales, payload.scale);
    }
  }
  if (next != stored.end()) saver.Save(*next, step.out_16.data);
}

}  // namespace cppool::kernels
