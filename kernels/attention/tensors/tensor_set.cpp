#include "kernels/attention/tensors/tensor_set.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "kernels/error.h"
#include "kernels/numerics/half.h"

namespace cppool::kernels {
namespace {

constexpr int kPoisonByte = 0xFF;  // NaN in every floating-point type

const char* NameOf(InputTensor tensor) {
  static constexpr auto kNames = std::to_array({"", "q", "k", "v", "dout", "bias", "softmax_offset"});
  static_assert(kNames.size() == static_cast<std::size_t>(InputTensor::kSoftmaxOffset) + 1);
  return kNames.at(static_cast<std::size_t>(tensor));
}

const char* SuffixOf(StoredPart part) {
  static constexpr auto kSuffixes =
      std::to_array({"_payload", "_scale_inv", "_payload_rows", "_scale_e8m0_rows", "_payload_columns",
                     "_scale_e8m0_columns", "_f16"});
  static_assert(kSuffixes.size() == static_cast<std::size_t>(StoredPart::kF16) + 1);
  return kSuffixes.at(static_cast<std::size_t>(part));
}

std::string NameOf(const StoredTensor& tensor) {
  return std::visit([](auto of) -> std::string { return NameOf(of); }, tensor.of) + SuffixOf(tensor.part);
}

// Describes the tensors of one spec.
class Describer {
 public:
  explicit Describer(const AttentionSpec& spec) : spec_(spec) {}

  template <typename Kind>
  TensorInfo Tokens(Kind kind, TensorRows rows_of, std::optional<int> dim, Dtype dtype) const {
    const bool queries = rows_of == TensorRows::kQueries;
    const std::int64_t seqlen = queries ? spec_.seqlen_q : spec_.seqlen_kv;
    const std::int64_t heads = queries ? spec_.heads : spec_.kv_heads;
    TensorInfo info{kind, rows_of, spec_.batch * seqlen, heads * dim.value_or(1), dtype, {}, {}};
    const char* side = queries ? "query" : "key";
    switch (spec_.format) {
      case QkvFormat::kBshd:
        info.shape = {spec_.batch, seqlen};
        info.axes = {"batch", side};
        break;
      case QkvFormat::kSbhd:
        info.shape = {seqlen, spec_.batch};
        info.axes = {side, "batch"};
        break;
      case QkvFormat::kThd:
        info.shape = {info.rows};
        info.axes = {"token"};
        break;
    }
    info.shape.push_back(heads);
    info.axes.push_back(queries ? "head" : "kv_head");
    if (dim) {
      info.shape.push_back(*dim);
      info.axes.push_back("dim");
    }
    return info;
  }

  template <typename Kind>
  TensorInfo Bias(Kind kind, Dtype dtype) const {
    const BiasShape& shape = spec_.bias_shape;
    const std::int64_t batch = shape.batch ? spec_.batch : 1, heads = shape.heads ? spec_.heads : 1,
                       queries = shape.queries ? spec_.seqlen_q : 1;
    return {kind,
            TensorRows::kWhole,
            batch * heads * queries,
            spec_.seqlen_kv,
            dtype,
            {batch, heads, queries, spec_.seqlen_kv},
            {"batch", "head", "query", "key"}};
  }

  template <typename Kind>
  TensorInfo PerHead(Kind kind) const {
    return {kind, TensorRows::kWhole, 1, spec_.heads, Dtype::kFp32, {spec_.heads}, {"head"}};
  }

 private:
  const AttentionSpec& spec_;
};

}  // namespace

std::string TensorInfo::name() const {
  return std::visit([](auto tensor) -> std::string { return NameOf(tensor); }, kind);
}

std::vector<TensorInfo> InputTensors(const AttentionSpec& spec) {
  const Describer describe(spec);
  std::vector<TensorInfo> inputs = {
      describe.Tokens(InputTensor::kQ, TensorRows::kQueries, spec.dim_qk, spec.dtypes.q),
      describe.Tokens(InputTensor::kK, TensorRows::kKeys, spec.dim_qk, spec.dtypes.k),
      describe.Tokens(InputTensor::kV, TensorRows::kKeys, spec.dim_v, spec.dtypes.v)};
  if (spec.training)
    inputs.push_back(describe.Tokens(InputTensor::kDout, TensorRows::kQueries, spec.dim_v, spec.dtypes.dout));
  if (spec.bias == BiasType::kPostScale)
    inputs.push_back(describe.Bias(InputTensor::kBias, spec.dtypes.bias));
  if (spec.softmax == SoftmaxType::kLearnable)
    inputs.push_back(describe.PerHead(InputTensor::kSoftmaxOffset));
  return inputs;
}

std::vector<TensorInfo> OutputTensors(const AttentionSpec& spec) {
  const Describer describe(spec);
  std::vector<TensorInfo> outputs = {
      describe.Tokens(CheckedTensor::kOut, TensorRows::kQueries, spec.dim_v, spec.dtypes.out),
      describe.Tokens(CheckedTensor::kLse, TensorRows::kQueries, std::nullopt, Dtype::kFp32)};
  if (spec.training) {
    outputs.push_back(describe.Tokens(CheckedTensor::kDq, TensorRows::kQueries, spec.dim_qk, spec.dtypes.dq));
    outputs.push_back(describe.Tokens(CheckedTensor::kDk, TensorRows::kKeys, spec.dim_qk, spec.dtypes.dk));
    outputs.push_back(describe.Tokens(CheckedTensor::kDv, TensorRows::kKeys, spec.dim_v, spec.dtypes.dv));
    if (spec.bias == BiasType::kPostScale)
      outputs.push_back(describe.Bias(CheckedTensor::kDbias, spec.dtypes.dbias));
    if (spec.softmax == SoftmaxType::kLearnable)
      outputs.push_back(describe.PerHead(CheckedTensor::kDsoftmaxOffset));
  }
  if (spec.max_logit) outputs.push_back(describe.PerHead(CheckedTensor::kMaxLogit));
  return outputs;
}

RankRows RowsOfRank(QkvFormat format, const Sequences& sequences, int world_size, int rank) {
  RankRows rows;
  rows.layout = RankLayout(format, sequences, world_size, rank);
  rows.padding = PaddingRows(rows.layout);
  auto padding = rows.padding.begin();
  for (std::int64_t row = 0; row < rows.layout.rows; ++row) {
    if (padding != rows.padding.end() && *padding == row) {
      ++padding;
    } else {
      rows.tokens.push_back(row);
    }
  }
  // With every place taken for a token the layouts say where padding is too, but for what is behind the last
  // room: of that each rank has its share.
  Sequences places = sequences;
  places.length = places.room;
  const Layout here = RankLayout(format, places, world_size, rank), all = GlobalLayout(format, places);
  rows.whole = RowMap(here, all);
  const std::vector<std::int64_t> rest_here = PaddingRows(here), rest = PaddingRows(all);
  for (std::size_t i = 0; i < rest_here.size(); ++i)
    rows.whole[rest_here[i]] = rest[rank * rest_here.size() + i];
  return rows;
}

RankTokens::RankTokens(const AttentionSpec& spec, int world_size, int rank)
    : queries(RowsOfRank(spec.format, spec.queries, world_size, rank)),
      keys(RowsOfRank(spec.format, spec.keys, world_size, rank)) {}

void TensorSet::List(const AttentionSpec& spec, int world_size, MemoryList& list) {
  const auto describe = [&](std::vector<TensorInfo> tensors, std::vector<Tensor>& to) {
    for (TensorInfo& info : tensors) {
      const std::int64_t rows = info.rows_of == TensorRows::kWhole ? info.rows : info.rows / world_size;
      to.push_back({std::move(info), rows, {}});
    }
    for (Tensor& tensor : to)  // when all of them are in place
      list.Add("tensor",
               static_cast<std::size_t>(tensor.rows * tensor.info.columns) * SizeOf(tensor.info.dtype),
               tensor.data);
  };
  describe(InputTensors(spec), inputs_);
  describe(OutputTensors(spec), outputs_);
  if (spec.softmax == SoftmaxType::kOffByOne)
    list.Add("softmax offset of off-by-one", sizeof(float) * static_cast<std::size_t>(spec.heads),
             no_offset_);
}

double TensorSet::Bytes(const AttentionSpec& spec, int world_size) {
  TensorSet set;
  MemoryList list;
  set.List(spec, world_size, list);
  return list.buffer_bytes();
}

TensorSet::TensorSet(cppool_runtime* runtime, const AttentionSpec& spec, int world_size) : rt_(runtime) {
  MemoryList list;
  List(spec, world_size, list);
  list.Allocate(rt_);
  if (no_offset_) Check(rt_, rt_->fill(rt_, no_offset_.get(), 0, no_offset_.bytes(), rt_->stream));
}

template <typename Kind>
const TensorSet::Tensor* TensorSet::Find(const std::vector<Tensor>& tensors, Kind kind) {
  for (const Tensor& tensor : tensors) {
    if (std::get<Kind>(tensor.info.kind) == kind) return &tensor;
  }
  return nullptr;
}

void* TensorSet::get(InputTensor kind) const {
  const Tensor* tensor = Find(inputs_, kind);
  return tensor ? tensor->data.get() : nullptr;
}

void* TensorSet::get(CheckedTensor kind) const {
  const Tensor* tensor = Find(outputs_, kind);
  return tensor ? tensor->data.get() : nullptr;
}

const float* TensorSet::softmax_offset() const {
  return no_offset_ ? no_offset_.get<float>() : static_cast<const float*>(get(InputTensor::kSoftmaxOffset));
}

AttentionTensors TensorSet::pointers() const {
  const auto in = [&](InputTensor kind) -> TensorRef {
    const Tensor* tensor = Find(inputs_, kind);
    return tensor ? TensorRef{tensor->data.get(), tensor->info.dtype} : TensorRef{};
  };
  const auto out = [&](CheckedTensor kind) -> TensorOut {
    const Tensor* tensor = Find(outputs_, kind);
    return tensor ? TensorOut{tensor->data.get(), tensor->info.dtype} : TensorOut{};
  };
  AttentionTensors t;
  t.q = in(InputTensor::kQ);
  t.k = in(InputTensor::kK);
  t.v = in(InputTensor::kV);
  t.dout = in(InputTensor::kDout);
  t.out = out(CheckedTensor::kOut);
  t.lse = static_cast<float*>(get(CheckedTensor::kLse));
  t.dq = out(CheckedTensor::kDq);
  t.dk = out(CheckedTensor::kDk);
  t.dv = out(CheckedTensor::kDv);
  t.bias = in(InputTensor::kBias);
  t.softmax_offset = softmax_offset();
  t.dbias = out(CheckedTensor::kDbias);
  t.d_softmax_offset = static_cast<float*>(get(CheckedTensor::kDsoftmaxOffset));
  t.max_logit = static_cast<float*>(get(CheckedTensor::kMaxLogit));
  return t;
}

void TensorSet::Fill(CheckKernels& kernels, const AttentionSpec& spec, const RankTokens& tokens,
                     TensorSource* source) {
  for (const Tensor& tensor : inputs_) {
    if (source) {
      Read(tensor, tokens, *source);
      continue;
    }
    const auto kind = std::get<InputTensor>(tensor.info.kind);
    void* to = tensor.data.get();
    if (kind == InputTensor::kBias) {
      kernels.GenerateBias(spec.seed, tensor.info.shape[0], static_cast<int>(tensor.info.shape[1]),
                           tensor.info.shape[2], tensor.info.shape[3], tensor.info.dtype, to, rt_->stream);
    } else if (kind == InputTensor::kSoftmaxOffset) {
      kernels.Generate(kind, spec.seed, GlobalLayout(QkvFormat::kBshd, UniformSequences(1, 1)), spec.heads, 1,
                       tensor.info.dtype, to, rt_->stream);
    } else {
      const RankRows& rows = tokens.of(tensor.info);
      if (!rows.padding.empty())
        Check(rt_, rt_->fill(rt_, to, kPoisonByte, tensor.data.bytes(), rt_->stream));
      const int heads = tensor.info.rows_of == TensorRows::kKeys ? spec.kv_heads : spec.heads;
      kernels.Generate(kind, spec.seed, rows.layout, heads, static_cast<int>(tensor.info.columns / heads),
                       tensor.info.dtype, to, rt_->stream, spec.fp8.has_value());
    }
  }
}

void TensorSet::Read(const Tensor& tensor, const RankTokens& tokens, TensorSource& source) const {
  const std::int64_t columns = tensor.info.columns;
  std::vector<std::byte> bits(tensor.data.bytes(), std::byte{kPoisonByte});
  std::vector<double> values(static_cast<std::size_t>(columns));
  const auto read = [&](std::int64_t row, std::int64_t whole_row) {
    source.ReadRow(tensor.info, whole_row, values.data());
    for (std::int64_t i = 0; i < columns; ++i)
      StoreElement(tensor.info.dtype, bits.data(), row * columns + i, values[i]);
  };
  if (tensor.info.rows_of == TensorRows::kWhole) {
    for (std::int64_t row = 0; row < tensor.rows; ++row) read(row, row);
  } else {
    const RankRows& rows = tokens.of(tensor.info);
    for (const std::int64_t row : rows.tokens) read(row, rows.whole[row]);
  }
  Check(rt_, rt_->copy(rt_, tensor.data.get(), bits.data(), bits.size(), rt_->stream));
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
}

void TensorSet::PoisonOutputs() const {
  for (const Tensor& tensor : outputs_)
    Check(rt_, rt_->fill(rt_, tensor.data.get(), kPoisonByte, tensor.data.bytes(), rt_->stream));
}

void TensorSet::Save(const RankTokens& tokens, TensorSink& sink) const {
  const auto save = [&](const Tensor& tensor, bool with_padding) {
    const bool whole = tensor.info.rows_of == TensorRows::kWhole;
    if (whole && rt_->rank != 0) return;
    const std::vector<std::byte> bits = ToHost<std::byte>(rt_, tensor.data.get(), tensor.data.bytes());
    const std::size_t row_bytes = bits.size() / static_cast<std::size_t>(tensor.rows);
    const RankRows& rows = tokens.of(tensor.info);
    const auto write = [&](std::int64_t row) {
      sink.WriteRow(tensor.info, false, whole ? row : rows.whole[row], &bits[row * row_bytes]);
    };
    if (whole || with_padding) {
      for (std::int64_t row = 0; row < tensor.rows; ++row) write(row);
    } else {
      for (const std::int64_t row : rows.tokens) write(row);
    }
  };
  for (const Tensor& tensor : inputs_) save(tensor, false);
  for (const Tensor& tensor : outputs_) save(tensor, true);
}

void TensorSet::SaveReference(TensorSink& sink) const {
  for (const Tensor& tensor : outputs_) {
    const std::vector<std::byte> bits = ToHost<std::byte>(rt_, tensor.data.get(), tensor.data.bytes());
    const std::size_t row_bytes = bits.size() / static_cast<std::size_t>(tensor.rows);
    const std::int64_t begin = tensor.rows * rt_->rank / rt_->world_size,
                       end = tensor.rows * (rt_->rank + 1) / rt_->world_size;
    for (std::int64_t row = begin; row < end; ++row)
      sink.WriteRow(tensor.info, true, row, &bits[row * row_bytes]);
  }
}

}  // namespace cppool::kernels
