#include "kernels/attention/checks/fp8_verify.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels/error.h"
#include "kernels/half.h"
#include "kernels/numerics/half.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels {
namespace {

const QuantisedOperand* Find(const Fp8Step& step, Operand operand) {
  for (const QuantisedOperand& each : step.operands) {
    if (each.operand == operand) return &each;
  }
  return nullptr;
}

double PayloadValue(Dtype dtype, std::uint8_t bits) {
  return dtype == Dtype::kE4M3 ? E4M3ToFloat(bits) : E5M2ToFloat(bits);
}

// The definition: the smallest e with amax <= 448 * 2^(e - 127).
int ExpectedExponent(double amax) {
  if (std::isinf(amax)) return 0xfe;
  if (amax == 0) return 0;
  int e = std::max(0, std::ilogb(amax) + 127 - 12);  // certainly too small
  while (std::ldexp(448.0, e - 127) < amax) ++e;
  return e;
}

// The axis that the operand's product sums over.
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

CheckedTensor CheckedOf(InputTensor tensor) {
  switch (tensor) {
    case InputTensor::kQ:
      return CheckedTensor::kQ;
    case InputTensor::kK:
      return CheckedTensor::kK;
    case InputTensor::kV:
      return CheckedTensor::kV;
    case InputTensor::kDout:
      return CheckedTensor::kDout;
    case InputTensor::kBias:
    case InputTensor::kSoftmaxOffset:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "checks: not a quantised input");
}

template <typename T>
std::vector<T> ToHost(cppool_runtime* rt, const void* data, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  Check(rt, rt->copy(rt, values.data(), data, values.size() * sizeof(T), rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));
  return values;
}

}  // namespace

Buffer GatherDelta(cppool_runtime* rt, const AttentionSpec& spec, const Fp8Step& step) {
  const Group world = GetGroup(rt, CPPOOL_WORLD);
  const std::int64_t count = RankTokens(spec, world.size, world.rank).queries.layout.rows * spec.heads;
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
  const Buffer gathered(rt, bytes * world.size, rt->stream);
  Buffer delta(rt, bytes * world.size, rt->stream);
  if (world.size > 1) {
    Check(rt, rt->all_gather(rt, step.delta, gathered.get(), bytes, world.comm, rt->stream));
  } else {
    Check(rt, rt->copy(rt, gathered.get(), step.delta, bytes, rt->stream));
  }
  const auto by_rank = ToHost<float>(rt, gathered.get(), count * world.size);
  std::vector<float> whole(by_rank.size());
  for (int rank = 0; rank < world.size; ++rank) {
    const RankRows rows = RowsOfRank(spec.format, spec.queries, world.size, rank);
    for (const std::int64_t row : rows.tokens) {
      std::copy_n(by_rank.data() + rank * count + row * spec.heads, spec.heads,
                  whole.data() + rows.whole[static_cast<std::size_t>(row)] * spec.heads);
    }
  }
  Check(rt, rt->copy(rt, delta.get(), whole.data(), whole.size() * sizeof(float), rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));  // `whole` goes
  return delta;
}

void Fp8Verifier::Tally::Compare(double expected, double stored) {
  ++count;
  const bool same = expected == stored ? std::signbit(expected) == std::signbit(stored)
                                       : std::isnan(expected) && std::isnan(stored);
  if (same) return;
  ++wrong;
  if (std::isfinite(expected - stored)) largest = std::max(largest, std::abs(expected - stored));
}

Fp8Verifier::Fp8Verifier(cppool_runtime* runtime, const AttentionSpec& spec, const TensorSet& local,
                         const TensorSet& global, const Fp8Step& step, const Fp8Step& reference,
                         const float* delta, AttentionReport& report)
    : rt_(runtime),
      spec_(spec),
      local_(local),
      global_(global),
      step_(step),
      reference_(reference),
      report_(report),
      world_(GetGroup(runtime, CPPOOL_WORLD)),
      all_(spec, 1, 0),
      mine_(spec, runtime->world_size, runtime->rank),
      inputs_(static_cast<std::size_t>(InputTensor::kDout) + 1) {
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
  const bool in_blocks = InBlocks(*spec.fp8);
  const auto operand = [&](Operand which, bool values) -> TensorRef {
    const QuantisedOperand* found = Find(reference_, which);
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
  const double q = rows_q * spec.heads * spec.dim_qk, k = rows_kv * spec.kv_heads * spec.dim_qk,
               v = rows_kv * spec.kv_heads * spec.dim_v, out = rows_q * spec.heads * spec.dim_v;
  const bool backward = spec.training && spec.fp8->bwd;
  const double inputs = sizeof(std::uint16_t) * (q + k + v + (backward ? out : 0));
  // Payload, 16-bit values and at most as many exponents, and the rows' numbers; a rank may have the keys of all.
  const double operand = 4 * std::max({q / world_size, k, v, backward ? out / world_size : 0}) +
                         sizeof(std::int64_t) * std::max(rows_q, rows_kv);
  // Two tensors in fp64 and one as stored.
  const double delta = spec.training ? (2 * sizeof(double) + 2) * out / world_size : 0;
  return inputs + std::max(operand, delta);
}

const std::vector<std::uint16_t>& Fp8Verifier::Input(InputTensor tensor) {
  std::vector<std::uint16_t>& values = inputs_[static_cast<std::size_t>(tensor)];
  for (const TensorSet::Tensor& each : global_.inputs()) {
    if (values.empty() && std::get<InputTensor>(each.info.kind) == tensor)
      values = ToHost<std::uint16_t>(rt_, each.data.get(), each.rows * each.info.columns);
  }
  return values;
}

float Fp8Verifier::ExpectedScale(Dtype format, std::initializer_list<InputTensor> tensors) {
  double most = 0;
  for (const InputTensor tensor : tensors) {
    const std::vector<std::uint16_t>& values = Input(tensor);
    const bool keys = tensor == InputTensor::kK || tensor == InputTensor::kV;
    const RankRows& rows = keys ? all_.keys : all_.queries;
    const std::size_t columns = values.size() / std::max<std::size_t>(rows.whole.size(), 1);
    for (const std::int64_t row : rows.tokens) {
      for (std::size_t i = static_cast<std::size_t>(row) * columns;
           i < (static_cast<std::size_t>(row) + 1) * columns; ++i) {
        const double size = std::abs(double{BF16ToFloat(values[i])});
        if (size > most) most = size;
      }
    }
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

Fp8Verifier::Tally Fp8Verifier::CheckOperand(const QuantisedOperand& operand, float scale) {
  Tally tally;
  tally.Compare(static_cast<float>(1.0 / scale), ToHost<float>(rt_, operand.payload.scale, 1).front());
  const std::vector<std::uint16_t>& input = Input(operand.tensor);
  const bool keys = operand.tensor == InputTensor::kK || operand.tensor == InputTensor::kV;
  const int all_heads = keys ? spec_.kv_heads : spec_.heads;
  const auto payload =
      ToHost<std::uint8_t>(rt_, operand.payload.data, operand.layout.rows * operand.heads * operand.dim);
  const auto values =
      ToHost<std::uint16_t>(rt_, operand.values.data, operand.layout.rows * operand.heads * operand.dim);
  const std::vector<std::int64_t> whole =
      RowMap(operand.layout, keys ? all_.keys.layout : all_.queries.layout);
  for (const Segment& segment : operand.layout.segments) {
    for (std::int32_t t = 0; t < segment.length; ++t) {
      const std::int64_t row = segment.row + std::int64_t{t} * operand.layout.row_step;
      for (int h = 0; h < operand.heads; ++h) {
        const std::size_t from =
            static_cast<std::size_t>(((whole[row] * all_heads) + operand.head0 + h) * operand.dim);
        const std::size_t at = static_cast<std::size_t>((row * operand.heads + h) * operand.dim);
        for (int d = 0; d < operand.dim; ++d) {
          const float scaled = BF16ToFloat(input[from + d]) * scale;
          const double stored = PayloadValue(operand.payload.dtype, payload[at + d]);
          // Without a backward pass in fp8 the last values are those for 16 bits.
          const float inverse = spec_.training && !spec_.fp8->bwd ? static_cast<float>(1.0 / scale) : 1.0f;
          tally.Compare(BF16ToFloat(FloatToBF16(static_cast<float>(stored) * inverse)),
                        BF16ToFloat(values[at + d]));
          tally.Compare(RoundTo(operand.payload.dtype, scaled),
                        PayloadValue(operand.payload.dtype, payload[at + d]));
        }
      }
    }
  }
  return tally;
}

Fp8Verifier::Tally Fp8Verifier::CheckBlocks(const QuantisedOperand& operand) {
  const std::vector<std::uint16_t>& input = Input(operand.tensor);
  const bool keys = operand.tensor == InputTensor::kK || operand.tensor == InputTensor::kV;
  const Sequences& sequences = keys ? spec_.keys : spec_.queries;
  const RankRows& all = keys ? all_.keys : all_.queries;
  const int all_heads = keys ? spec_.kv_heads : spec_.heads, dim = operand.dim;
  const auto value = [&](std::int64_t whole_row, int head, int d) -> double {
    return BF16ToFloat(
        input[static_cast<std::size_t>((whole_row * all_heads + operand.head0 + head) * dim + d)]);
  };
  const std::vector<std::int64_t> whole = RowMap(operand.layout, all.layout);
  const std::vector<Segment> blocks = MxBlocks(operand.layout, MxChunks(sequences, rt_->world_size));
  const auto payload =
      ToHost<std::uint8_t>(rt_, operand.payload.data, operand.layout.rows * operand.heads * dim);
  const auto exponents =
      ToHost<std::uint8_t>(rt_, operand.exponents,
                           MxExponents(*operand.axis, operand.layout.rows,
                                       static_cast<std::int64_t>(blocks.size()), operand.heads, dim));
  const auto values =
      ToHost<std::uint16_t>(rt_, operand.values.data, operand.layout.rows * operand.heads * dim);
  Tally tally;
  tally.Compare(static_cast<double>(ExpectedAxis(operand.operand)), static_cast<double>(*operand.axis));
  // Elements (t, d), ... of the block, whose exponent is there.
  const auto check = [&](const Segment& block, int h, std::int32_t t, std::int32_t t_end, int d, int d_end,
                         std::size_t exponent) {
    const auto row_of = [&](std::int32_t i) { return block.row + std::int64_t{i} * operand.layout.row_step; };
    double most = 0;
    for (std::int32_t i = t; i < t_end; ++i) {
      for (int e = d; e < d_end; ++e) most = std::max(most, std::abs(value(whole[row_of(i)], h, e)));
    }
    const int expected = ExpectedExponent(most);
    tally.Compare(expected, exponents[exponent]);
    const double factor = std::ldexp(1.0, 127 - expected);
    for (std::int32_t i = t; i < t_end; ++i) {
      for (int e = d; e < d_end; ++e) {
        const std::size_t at = static_cast<std::size_t>((row_of(i) * operand.heads + h) * dim + e);
        tally.Compare(BF16ToFloat(FloatToBF16(static_cast<float>(E4M3ToFloat(payload[at]) / factor))),
                      BF16ToFloat(values[at]));
        tally.Compare(RoundTo(Dtype::kE4M3, static_cast<float>(value(whole[row_of(i)], h, e) * factor)),
                      E4M3ToFloat(payload[at]));
      }
    }
  };
  std::uint64_t tokens = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const Segment& block = blocks[b];
    // By the definition: 32 tokens of a chunk, as far as the sequence has them.
    const std::int64_t chunk =
        sequences.room[static_cast<std::size_t>(block.sequence)] / (2 * std::int64_t{rt_->world_size});
    const std::int64_t chunk_begin = block.position / chunk * chunk;
    const std::int64_t expected_end = std::min({block.position + std::int64_t{32}, chunk_begin + chunk,
                                                sequences.length[static_cast<std::size_t>(block.sequence)]});
    tally.Compare(static_cast<double>((block.position - chunk_begin) % 32), 0);
    tally.Compare(static_cast<double>(expected_end - block.position), block.length);
    tokens += static_cast<std::uint64_t>(block.length);
    for (int h = 0; h < operand.heads; ++h) {
      if (operand.axis == MxAxis::kTokens) {
        for (int d = 0; d < dim; ++d)
          check(block, h, 0, block.length, d, d + 1, (b * operand.heads + h) * dim + d);
        continue;
      }
      for (std::int32_t t = 0; t < block.length; ++t) {
        const std::int64_t row = block.row + std::int64_t{t} * operand.layout.row_step;
        for (int d = 0; d < dim; d += 32)
          check(block, h, t, t + 1, d, d + 32,
                static_cast<std::size_t>((row * operand.heads + h) * (dim / 32) + d / 32));
      }
    }
  }
  std::uint64_t all_tokens = 0;
  for (const Segment& segment : operand.layout.segments)
    all_tokens += static_cast<std::uint64_t>(segment.length);
  tally.Compare(static_cast<double>(all_tokens), static_cast<double>(tokens));
  return tally;
}

// Of results and of dS, which the inputs do not give.
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
  if (world_.size > 1) {
    Check(rt_, rt_->all_gather(rt_, mine.get(), all.get(), mine.bytes(), world_.comm, rt_->stream));
  } else {
    Check(rt_, rt_->copy(rt_, all.get(), mine.get(), mine.bytes(), rt_->stream));
  }
  const auto of_all = ToHost<float>(rt_, all.get(), kScales * world_.size);
  Tally tally;
  for (int i = 0; i < kScales * world_.size; ++i) tally.Compare(of_all[i % kScales], of_all[i]);
  return tally;
}

// Where O is both kept in 16 bits and cast for D; or where what leaves was a payload.
Fp8Verifier::Tally Fp8Verifier::CheckOut() const {
  Tally tally;
  if (!spec_.training || !IsFp8(step_.out_of_delta.dtype)) return tally;
  const std::int64_t columns = std::int64_t{spec_.heads} * spec_.dim_v,
                     count = mine_.queries.layout.rows * columns;
  const auto payload = ToHost<std::uint8_t>(rt_, step_.out_of_delta.data, count);
  const auto out = ToHost<std::uint16_t>(rt_, local_.get(CheckedTensor::kOut), count);
  const float inverse = ToHost<float>(rt_, step_.out_of_delta.scale, 1).front();
  for (const std::int64_t row : mine_.queries.tokens) {
    for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const float value = E4M3ToFloat(payload[at]) * inverse, stored = BF16ToFloat(out[at]);
      if (step_.out) {
        tally.Compare(BF16ToFloat(FloatToBF16(value)), stored);
      } else {  // within half a unit of the cast
        const bool near =
            std::abs(value - stored) <= 0x1.0001p-4f * std::abs(stored) + 0x1.0001p-10f * inverse;
        tally.Compare(near, true);
      }
    }
  }
  return tally;
}

Fp8Verifier::Tally Fp8Verifier::CheckDelta() const {
  Tally tally;
  const int dim = spec_.dim_v;
  const std::int64_t vectors = mine_.queries.layout.rows * spec_.heads;
  const auto load = [&](const TensorRef& tensor) {
    std::vector<double> values(static_cast<std::size_t>(vectors * dim));
    const double scale = tensor.scale ? ToHost<float>(rt_, tensor.scale, 1).front() : 1;
    if (IsFp8(tensor.dtype)) {
      const auto bits = ToHost<std::uint8_t>(rt_, tensor.data, vectors * dim);
      for (std::size_t i = 0; i < bits.size(); ++i) values[i] = PayloadValue(tensor.dtype, bits[i]) * scale;
    } else {
      const auto bits = ToHost<std::uint16_t>(rt_, tensor.data, vectors * dim);
      for (std::size_t i = 0; i < bits.size(); ++i) values[i] = BF16ToFloat(bits[i]) * scale;
    }
    return values;
  };
  const std::vector<double> out = load(step_.out_of_delta), dout = load(step_.dout_of_delta);
  const auto delta = ToHost<float>(rt_, step_.delta, vectors);
  for (const std::int64_t row : mine_.queries.tokens) {
    for (std::int64_t vector = row * spec_.heads; vector < (row + 1) * spec_.heads; ++vector) {
      double sum = 0, size = 0;
      for (int d = 0; d < dim; ++d) {
        const double term = out[static_cast<std::size_t>(vector * dim + d)] *
                            dout[static_cast<std::size_t>(vector * dim + d)];
        sum += term;
        size += std::abs(term);
      }
      const double stored = delta[static_cast<std::size_t>(vector)];
      // Terms below fp32's normal numbers may be lost.
      const bool near = std::abs(stored - sum) <= 0x1p-16 * size + dim * double{FLT_MIN} ||
                        (std::isnan(stored) && std::isnan(sum));
      tally.Compare(near ? stored : sum, stored);
    }
  }
  return tally;
}

void Fp8Verifier::Report(CheckedTensor tensor, const char* against, const Tally& tally) {
  if (tally.count > 0) report_.Check(tensor, against, JudgeBits(tally.wrong, tally.count, tally.largest));
}

void Fp8Verifier::CheckBits() {
  float qkv = 0, dout = 0;
  if (step_.qkv) qkv = ExpectedScale(Dtype::kE4M3, {InputTensor::kQ, InputTensor::kK, InputTensor::kV});
  if (step_.dout) dout = ExpectedScale(Dtype::kE5M2, {InputTensor::kDout});
  for (const InputTensor tensor : {InputTensor::kQ, InputTensor::kK, InputTensor::kV, InputTensor::kDout}) {
    Tally tally;
    const auto add = [&](const Tally& part) {
      tally.wrong += part.wrong;
      tally.count += part.count;
      tally.largest = std::max(tally.largest, part.largest);
    };
    for (const QuantisedOperand& operand : step_.operands) {
      if (operand.tensor != tensor) continue;
      const bool is_dout = tensor == InputTensor::kDout;
      if (operand.axis) {
        add(CheckBlocks(operand));
      } else {
        add(CheckScale(is_dout ? step_.dout : step_.qkv, is_dout ? dout : qkv));
        add(CheckOperand(operand, is_dout ? dout : qkv));
      }
    }
    Report(CheckedOf(tensor), "bits", tally);
  }
  Tally out = CheckOut();
  const Tally same = CheckSameScales();
  out.wrong += same.wrong;
  out.count += same.count;
  Report(CheckedTensor::kOut, "bits", out);
  if (spec_.training) Report(CheckedTensor::kDelta, "bits", CheckDelta());
  for (std::vector<std::uint16_t>& input : inputs_) std::vector<std::uint16_t>().swap(input);
}

}  // namespace cppool::kernels
