#include "kernels/attention/checks/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <limits>
#include <sstream>

#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/attention/checks/oracle_results.h"
#include "kernels/attention/checks/oracle_shares.h"
#include "kernels/attention/checks/oracle_workspace.h"
#include "kernels/error.h"
#include "kernels/memory_list.h"

namespace cppool::kernels {
namespace {

constexpr double kInputVariance = 1.0 / 3;  // of philox.h's values

// The initial value of a result, with which a comparison that did not run fails.
CompareStats NotCompared() {
  CompareStats stats;
  stats.mismatches = 1;
  return stats;
}

// Adds the errors of one comparison to the sum of several.
void Add(CompareStats& sum, const CompareStats& part) {
  sum.max_abs_err = std::max(sum.max_abs_err, part.max_abs_err);
  sum.max_abs_ref = std::max(sum.max_abs_ref, part.max_abs_ref);
  sum.max_excess = std::max(sum.max_excess, part.max_excess);
  sum.sum_sq_err += part.sum_sq_err;
  sum.sum_sq_ref += part.sum_sq_ref;
  sum.sum_err_ref += part.sum_err_ref;
  sum.max_of_bound = std::max(sum.max_of_bound, part.max_of_bound);
  sum.largest_bound = std::max(sum.largest_bound, part.largest_bound);
  sum.mismatches += part.mismatches;
  sum.count += part.count;
}

// Whether the tensor has one value for each head.
bool IsOfHeads(CheckedTensor kind) {
  return kind == CheckedTensor::kDsoftmaxOffset || kind == CheckedTensor::kMaxLogit;
}
CheckedTensor KindOf(const TensorSet::Tensor& tensor) { return std::get<CheckedTensor>(tensor.info.kind); }
bool IsWhole(const TensorSet::Tensor& tensor) { return tensor.info.rows_of == TensorRows::kWhole; }

// Elements of a row for each head.
std::int64_t DimOf(const TensorSet::Tensor& tensor, const AttentionSpec& spec) {
  return tensor.info.columns / (tensor.info.rows_of == TensorRows::kKeys ? spec.kv_heads : spec.heads);
}
std::int64_t BiasMatrices(const AttentionSpec& spec) {
  return (spec.bias_shape.batch ? spec.batch : 1) * (spec.bias_shape.heads ? spec.heads : 1);
}

// A sequence's first row in the buffers without CP, from the definition of the format and independent of
// Layout, and how far its rows are apart.
std::int64_t FirstRow(const AttentionSpec& spec, const Sequences& sequences, int sequence) {
  if (spec.format == QkvFormat::kSbhd) return sequence;
  std::int64_t row = 0;
  for (int i = 0; i < sequence; ++i) row += sequences.room[i];
  return row;
}
std::int64_t RowStep(const AttentionSpec& spec) { return spec.format == QkvFormat::kSbhd ? spec.batch : 1; }

GradientTerms TermsOf(const AttentionSpec& spec, CheckedTensor kind) {
  GradientTerms terms{1, spec.scale, spec.scale * std::sqrt(spec.dim_qk)};
  terms.of_values = spec.scale * std::sqrt(spec.dim_v) * kInputVariance;
  // UnevenFactor: K is 4 times as large as other inputs, and V a quarter.
  if (spec.fp8) terms.of_values *= kind == CheckedTensor::kDk ? 0.25 : 4;
  if (kind == CheckedTensor::kDbias) terms.of_values = std::sqrt(spec.dim_v) * kInputVariance;
  if (kind == CheckedTensor::kDbias)
    terms.summed = (spec.bias_shape.batch ? 1.0 : spec.batch) * (spec.bias_shape.heads ? 1.0 : spec.heads);
  if (kind == CheckedTensor::kDsoftmaxOffset)
    terms.summed = static_cast<double>(spec.batch) * static_cast<double>(spec.seqlen_q) /
                   std::pow(static_cast<double>(spec.seqlen_kv), 3);
  return terms;
}

}  // namespace

Verifier::Verifier(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
                   const RankTokens& tokens, const TensorSet& local, const TensorSet& global,
                   AttentionReport& report, TensorSink* oracle)
    : rt_(runtime),
      spec_(spec),
      kernels_(kernels),
      tokens_(tokens),
      local_(local),
      global_(global),
      report_(report),
      sink_(oracle) {
  if (spec.bias == BiasType::kAlibi) slopes_ = Upload(OracleAlibiSlopes(spec.heads));
}

void Verifier::AgainstNoCp() {
  struct Comparison {
    CompareStats *values, *padding;  // NULL: the rank has no such rows
    BlockResults blocks;
    CompareArgs args;
  };
  std::vector<Comparison> comparisons;
  Results<CompareStats> results(rt_, 2 * local_.outputs().size(), NotCompared());
  std::size_t longest = 0;
  for (const auto& tensor : local_.outputs())
    longest = std::max(longest, static_cast<std::size_t>(tensor.info.columns) * SizeOf(tensor.info.dtype));
  const Buffer zeros(rt_, longest, rt_->stream);
  Check(rt_, rt_->fill(rt_, zeros.get(), 0, zeros.bytes(), rt_->stream));

  for (std::size_t i = 0; i < local_.outputs().size(); ++i) {
    const TensorSet::Tensor& tensor = local_.outputs()[i];
    CompareArgs args;
    args.a = {tensor.data.get(), tensor.info.dtype};
    args.b = {global_.outputs()[i].data.get(), tensor.info.dtype};
    args.a_stride = args.b_stride = args.columns = tensor.info.columns;
    args.rows = tensor.rows;
    args.relative = ToleranceNoCp(KindOf(tensor), DtypeOf(KindOf(tensor)), gqa()).relative;
    if (!IsWhole(tensor)) {
      const Rows& rows = RowsOf(tokens_.of(tensor.info), kAll);
      args.a_rows = rows.rows;
      args.b_rows = rows.positions;
      args.rows = rows.count;
    }
    Comparison comparison{args.rows ? results.Next() : nullptr, nullptr, {}, {}};
    const CheckedTensor kind = KindOf(tensor);
    if (kind == CheckedTensor::kDbias)
      comparison.blocks = Divide(BlocksOfBias(0, BiasMatrices(spec_)), kBlockRows, args);
    else if (args.rows && IsWhole(tensor))
      comparison.blocks = Divide(BlocksOfWhole(), 1, args);
    else if (args.rows)
      comparison.blocks = Divide(RowsOf(tokens_.of(tensor.info), kAll).blocks, DimOf(tensor, spec_), args);
    comparison.args = args;
    if (args.rows) kernels_.Compare(args, comparison.values, rt_->stream);
    if (!IsWhole(tensor) && !tokens_.of(tensor.info).padding.empty()) {
      args.a_rows = Upload(tokens_.of(tensor.info).padding);
      args.rows = static_cast<std::int64_t>(tokens_.of(tensor.info).padding.size());
      args.b.data = zeros.get();
      args.b_rows = nullptr;
      args.b_stride = 0;
      args.relative = 0;
      args.row_blocks = nullptr;
      args.blocks = nullptr;
      comparison.padding = results.Next();
      kernels_.Compare(args, comparison.padding, rt_->stream);
    }
    comparisons.push_back(comparison);
  }
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));

  BlocksOf blocks;
  for (std::size_t i = 0; i < comparisons.size(); ++i)
    blocks[KindOf(local_.outputs()[i])] = {comparisons[i].blocks};
  for (std::size_t i = 0; i < comparisons.size(); ++i) {
    const CheckedTensor kind = KindOf(local_.outputs()[i]);
    const auto [values, padding, of_blocks, args] = comparisons[i];
    Verdict verdict;
    if (values && IsCast(kind)) {
      const auto& [ours, plain_here] = sampled_[kind];
      verdict = JudgeFp8NoCp(*values, ours, plain_here, plain_[kind]);
    } else if (values) {
      verdict = JudgeNoCp(kind, DtypeOf(kind), gqa(), *values, plain_[kind], Terms(kind));
    } else {  // the rank holds no token
      verdict.tolerance = ToleranceNoCp(kind, DtypeOf(kind), gqa()).absolute;
      verdict.ok = true;
    }
    // The tolerance of lse is a few roundings already, and that of one value for each head, too.
    const bool whole = IsWhole(local_.outputs()[i]) && kind != CheckedTensor::kDbias;
    if (kind != CheckedTensor::kLse && !whole) JudgeBlocks(kind, "no_cp", blocks, verdict);
    if (!verdict.ok && values) {
      FindWorst(kind, {of_blocks}, verdict);
      CompareArgs again = args;
      again.tolerance = verdict.tolerance;
      kernels_.Compare(again, values, rt_->stream);
      Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
      FindBad(kind, {of_blocks}, verdict);
    }
    if (padding) {
      const Verdict zero = JudgePadding(*padding);
      verdict.ok = verdict.ok && zero.ok;
      verdict.max_abs_err = std::max(verdict.max_abs_err, zero.max_abs_err);
      verdict.mismatches += zero.mismatches;
      if (!zero.ok)
        verdict.where += std::string(verdict.where.empty() ? "" : ", and ") + "padding is not zero";
    }
    report_.Check(kind, "no_cp", verdict);
  }
}

void Verifier::AgainstOracle() {
  const OracleSample sample = SampleOracle(spec_, std::strcmp(rt_->backend, "host") == 0);
  if (sample.pairs.empty()) return;  // the case has no tokens
  Results<CompareStats> results = ResultsOf(sample);
  // What fp8 quantizes is exchanged anyway; a check of another dtype depends on no other rank.
  StatsOf stats = CompareSample(sample, fp8_ != nullptr, results);

  BlocksOf blocks;
  for (const auto& [kind, parts] : stats) {
    for (const Stats& part : parts) blocks[kind].push_back(part.blocks);
  }
  std::vector<std::pair<CheckedTensor, Verdict>> verdicts;
  for (const TensorSet::Tensor& tensor : local_.outputs()) {
    const CheckedTensor kind = KindOf(tensor);
    CompareStats ours, plain_here;
    for (const Stats& part : stats[kind]) {
      Add(ours, *part.ours);
      Add(plain_[kind], *part.plain);
      Add(plain_here, *part.plain_here);
    }
    if (IsCast(kind)) sampled_[kind] = {ours, plain_here};
    // The count is 0 if the rank holds no token of the sample, or if the sum was too much work.
    if (ours.count == 0) continue;
    Verdict& verdict =
        verdicts
            .emplace_back(kind, IsCast(kind) ? JudgeCasts(kind, stats[kind])
                                             : JudgeOracle(kind, DtypeOf(kind), ours, plain_[kind],
                                                           plain_here, Terms(kind)))
            .second;
    const bool whole = IsWhole(tensor) && kind != CheckedTensor::kDbias;
    if (!whole) JudgeBlocks(kind, "oracle", blocks, verdict);
    if (verdict.ok) continue;
    FindWorst(kind, blocks[kind], verdict);
    tolerances_[kind] = verdict.tolerance;
  }
  if (!tolerances_.empty()) {  // count what is out of the tolerances, which were not known before
    const OracleSample part = WithBadBlocks(sample, stats);
    Results<CompareStats> again = ResultsOf(part);
    StatsOf counted = CompareSample(part, false, again);
    for (auto& [kind, verdict] : verdicts) {
      if (verdict.ok) continue;
      std::vector<BlockResults> parts;
      for (const Stats& each : counted[kind]) parts.push_back(each.blocks);
      FindBad(kind, parts, verdict);
    }
  }
  for (const auto& [kind, verdict] : verdicts) report_.Check(kind, "oracle", verdict);
}

Results<CompareStats> Verifier::ResultsOf(const OracleSample& sample) const {
  return {rt_,
          3 * (local_.outputs().size() * sample.pairs.size() + sample.bias_units.size() +
               2 * sample.whole_heads.size()),
          NotCompared()};
}

Verifier::StatsOf Verifier::CompareSample(const OracleSample& sample, bool divided,
                                          Results<CompareStats>& results) {
  const OracleShares shares(rt_, divided);
  OracleResults mine, others;
  MemoryList memory;
  mine.List(spec_, sample, true, memory);
  if (shares.divided()) others.List(spec_, sample, false, memory);
  memory.Allocate(rt_);
  const auto for_both = [&](CheckedTensor kind, double value) {
    for (const OracleOutputs* outputs : {&mine.exact, &mine.plain}) {
      const Buffer& values = outputs->of(kind);
      if (values)
        kernels_.FillValues(values.get<double>(), value,
                            static_cast<std::int64_t>(values.bytes() / sizeof(double)), rt_->stream);
    }
  };
  for_both(CheckedTensor::kDsoftmaxOffset, 0);
  for_both(CheckedTensor::kMaxLogit, -std::numeric_limits<double>::infinity());

  StatsOf stats;
  // lse_shift of a backward pass in 16 bits.
  const bool together = fp8_ && spec_.training && !fp8_->backward;
  auto unit = sample.bias_units.begin();
  for (std::size_t begin = 0, end = 0; begin < sample.pairs.size(); begin = end) {
    const bool in_unit = unit != sample.bias_units.end() && begin >= unit->begin;
    // A round does not cross the end or the begin of a unit.
    const std::size_t border = unit == sample.bias_units.end() ? sample.pairs.size()
                               : in_unit                       ? unit->end
                                                               : unit->begin;
    end = std::min(begin + shares.most(), border);
    const std::size_t pairs = end - begin;
    if (in_unit && begin == unit->begin) for_both(CheckedTensor::kDbias, 0);
    for (std::size_t i = 0; i < pairs; ++i) {
      for (const bool plain : {false, true}) {
        if (shares.Runs(i, pairs, plain, together))
          RunOracle(sample.pairs[begin + i], plain, plain ? mine.plain : mine.exact, mine.bounds, in_unit);
      }
    }
    for (std::size_t i = 0; i < pairs; ++i) {
      const OraclePair& pair = sample.pairs[begin + i];
      shares.Exchange(PiecesOf(pair, mine, others), i, pairs, together);
      const OracleResults& exact = shares.Runs(i, pairs, false, together) ? mine : others;
      const OracleResults& plain = shares.Runs(i, pairs, true, together) ? mine : others;
      ComparePair(pair, exact.exact, plain.plain, exact.bounds, results, stats);
      // The ranks have the same results, and each saves a part of them.
      if (!sink_ || !tolerances_.empty() ||
          static_cast<int>((begin + i) % static_cast<std::size_t>(rt_->world_size)) != rt_->rank)
        continue;
      for (const TensorSet::Tensor& tensor : global_.outputs()) {
        if (IsWhole(tensor)) continue;
        const Sequences& sequences = tensor.info.rows_of == TensorRows::kKeys ? spec_.keys : spec_.queries;
        const std::int64_t columns =
            (tensor.info.rows_of == TensorRows::kKeys ? 1 : group()) * DimOf(tensor, spec_);
        Save(tensor, exact.exact.of(KindOf(tensor)), sequences.length[pair.sequence],
             FirstRow(spec_, sequences, pair.sequence), RowStep(spec_), pair.kv_head * columns, columns);
      }
    }
    if (!in_unit || end != unit->end) continue;
    for (const OracleOutputs* outputs : {&mine.exact, &mine.plain}) shares.Reduce(outputs->dbias, CPPOOL_SUM);
    if (sink_ && tolerances_.empty() && rt_->rank == 0) {
      for (const TensorSet::Tensor& tensor : global_.outputs()) {
        if (KindOf(tensor) != CheckedTensor::kDbias) continue;
        const std::int64_t heads = spec_.bias_shape.heads ? spec_.heads : 1;
        Save(tensor, mine.exact.dbias, unit->heads * unit->queries,
             (unit->batch * heads + unit->head) * unit->queries, 1, 0, spec_.seqlen_kv);
      }
    }
    CompareBias(*unit++, mine.exact, mine.plain, results, stats);
  }
  for (const OracleOutputs* outputs : {&mine.exact, &mine.plain}) {
    shares.Reduce(outputs->d_softmax_offset, CPPOOL_SUM);
    shares.Reduce(outputs->max_logit, CPPOOL_MAX);
  }
  CompareHeads(sample.whole_heads, mine.exact, mine.plain, results, stats);
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
  if (sink_ && tolerances_.empty() && rt_->rank == 0 &&
      sample.whole_heads.size() == static_cast<std::size_t>(spec_.kv_heads)) {
    for (const TensorSet::Tensor& tensor : global_.outputs())
      if (IsOfHeads(KindOf(tensor))) Save(tensor, mine.exact.of(KindOf(tensor)), 1, 0, 1, 0, spec_.heads);
  }
  return stats;
}

void Verifier::Save(const TensorSet::Tensor& tensor, const Buffer& values, std::int64_t rows,
                    std::int64_t begin, std::int64_t step, std::int64_t first, std::int64_t columns) {
  const HostArray<double> host(rt_, static_cast<std::size_t>(rows * columns));
  Check(rt_, rt_->copy(rt_, host.begin(), values.get(),
                       static_cast<std::size_t>(rows * columns) * sizeof(double), rt_->stream));
  Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
  for (std::int64_t i = 0; i < rows; ++i)
    sink_->WriteOracle(tensor.info, begin + i * step, first,
                       {host.begin() + i * columns, host.begin() + (i + 1) * columns});
}

OracleSample Verifier::WithBadBlocks(const OracleSample& sample, const StatsOf& stats) const {
  std::vector<OraclePair> pairs;
  for (const auto& [kind, tolerance] : tolerances_) {
    for (const Stats& part : stats.at(kind)) {
      if (!part.pair) return sample;  // the sum needs all pairs
      const BlockStats* const found = part.blocks.ours;
      const bool bad = std::any_of(found, found + part.blocks.count(),
                                   [cast = IsCast(kind), limit = tolerance](const auto& block) {
                                     return cast || block.worst_err > limit;
                                   });
      if (bad && std::find(pairs.begin(), pairs.end(), *part.pair) == pairs.end())
        pairs.push_back(*part.pair);
    }
  }
  return {std::move(pairs), {}, {}};
}

void Verifier::FindWorst(CheckedTensor kind, const std::vector<BlockResults>& parts, Verdict& verdict) const {
  const BlockResults* of = nullptr;
  std::size_t at = 0;
  for (const BlockResults& part : parts) {
    for (std::size_t i = 0; i < part.count(); ++i) {
      if (part.ours[i].worst < 0 || (of && part.ours[i].worst_err <= of->ours[at].worst_err)) continue;
      of = &part;
      at = i;
    }
  }
  if (!of) return;
  const BlockStats& block = of->ours[at];
  const RowBlock& rows = (*of->rows)[at / of->columns];
  const auto column = static_cast<std::int64_t>(at % of->columns);
  const bool bias = kind == CheckedTensor::kDbias;
  const std::int64_t width =  // of this block
      bias ? std::min(of->width, spec_.seqlen_kv - column * of->width) : of->width;
  const std::int64_t row = rows.begin + block.worst / width, in_row = block.worst % width;
  const std::int64_t head = static_cast<std::int64_t>(of->first_head) + column;
  WorstElement worst{{}, block.worst_a, block.worst_b};
  if (bias) {
    const std::int64_t heads = spec_.bias_shape.heads ? spec_.heads : 1;
    worst.index = {{"sequence", rows.of / heads},
                   {"head", rows.of % heads},
                   {"query", row},
                   {"key", column * of->width + in_row}};
  } else if (IsOfHeads(kind)) {
    worst.index = {{"head", head}};
  } else {
    worst.index = {{"sequence", rows.of}, {"token", row}, {"head", head}};
    if (width > 1) worst.index.emplace_back("dim", in_row);
  }
  verdict.worst = std::move(worst);
}

void Verifier::FindBad(CheckedTensor kind, const std::vector<BlockResults>& parts, Verdict& verdict) const {
  verdict.bad = 0;
  // The least and the largest of each coordinate.
  using Range = std::pair<std::int64_t, std::int64_t>;
  const Range none{std::numeric_limits<std::int64_t>::max(), -1};
  Range sequences = none, heads = none, rows = none, keys = none;
  const auto add = [](Range& range, std::int64_t first, std::int64_t last) {
    range = {std::min(range.first, first), std::max(range.second, last)};
  };
  const bool bias = kind == CheckedTensor::kDbias;
  const std::int64_t of_bias = spec_.bias_shape.heads ? spec_.heads : 1;  // matrices of a sequence
  for (const BlockResults& part : parts) {
    for (std::size_t i = 0; i < part.count(); ++i) {
      if (part.ours[i].bad == 0) continue;
      *verdict.bad += part.ours[i].bad;
      const RowBlock& block = (*part.rows)[i / part.columns];
      const auto column = static_cast<std::int64_t>(i % part.columns);
      const std::int64_t head =
          bias ? block.of % of_bias : static_cast<std::int64_t>(part.first_head) + column;
      const std::int64_t sequence = bias ? block.of / of_bias : block.of;
      add(heads, head, head);
      add(sequences, sequence, sequence);
      add(rows, block.begin, block.end - 1);
      if (bias) add(keys, column * part.width, std::min((column + 1) * part.width, spec_.seqlen_kv) - 1);
    }
  }
  if (*verdict.bad == 0) return;
  std::ostringstream text;
  const auto say = [&](const char* one, const char* several, const Range& range) {
    if (range == none) return;
    text << (text.tellp() > 0 ? ", " : "");
    if (range.first == range.second)
      text << one << ' ' << range.first;
    else
      text << several << ' ' << range.first << " to " << range.second;
  };
  say("head", "heads", heads);
  if (!IsOfHeads(kind)) {
    const bool of_keys = kind == CheckedTensor::kDk || kind == CheckedTensor::kDv;
    say("sequence", "sequences", sequences);
    say(of_keys ? "key" : bias ? "query" : "token", of_keys ? "keys" : bias ? "queries" : "tokens", rows);
    say("key", "keys", keys);
  }
  verdict.where = text.str();
}

bool Verifier::IsCast(CheckedTensor kind) const {
  if (!fp8_) return false;
  const bool gradient =
      kind == CheckedTensor::kDq || kind == CheckedTensor::kDk || kind == CheckedTensor::kDv;
  return kind == CheckedTensor::kOut || (fp8_->backward && gradient);
}

// Judges all parts together, and each that is large enough for itself.
Verdict Verifier::JudgeCasts(CheckedTensor kind, const std::vector<Stats>& parts) const {
  const Fp8Terms terms{kind == CheckedTensor::kDq || kind == CheckedTensor::kDk,
                       kind == CheckedTensor::kOut && fp8_->out_scale == 0 && TwoKeysInBlocks()};
  CompareStats ours, plain_here;
  for (const Stats& part : parts) {
    Add(ours, *part.ours);
    Add(plain_here, *part.plain_here);
  }
  Verdict verdict = JudgeFp8(ours, plain_here, terms);
  for (const Stats& part : parts) {
    if (part.ours->count >= kFp8Samples)
      verdict.ok = verdict.ok && JudgeFp8(*part.ours, *part.plain_here, terms).ok;
  }
  return verdict;
}

// Whether no step of the schedule has more than two keys of a sequence that are one rank's.
bool Verifier::TwoKeysInBlocks() const {
  const bool by_rank = spec_.comm == CpCommType::kP2p || spec_.comm == CpCommType::kAllGather;
  return by_rank && rt_->world_size > 1 &&
         *std::max_element(spec_.keys.room.begin(), spec_.keys.room.end()) <= 2 * rt_->world_size;
}

void Verifier::RunOracle(const OraclePair& pair, bool rounded, const OracleOutputs& to,
                         const OracleOutputs& bounds, bool dbias) {
  OracleArgs args;
  args.q = {global_.get(InputTensor::kQ), spec_.dtypes.q};
  args.k = {global_.get(InputTensor::kK), spec_.dtypes.k};
  args.v = {global_.get(InputTensor::kV), spec_.dtypes.v};
  args.dout = {global_.get(InputTensor::kDout), spec_.dtypes.dout};
  args.stored = spec_.dtypes.out;
  args.q_row = FirstRow(spec_, spec_.queries, pair.sequence);
  args.kv_row = FirstRow(spec_, spec_.keys, pair.sequence);
  args.q_step = args.kv_step = RowStep(spec_);
  args.seqlen_q = spec_.queries.length[pair.sequence];
  args.seqlen_kv = spec_.keys.length[pair.sequence];
  args.heads = spec_.heads;
  args.kv_heads = spec_.kv_heads;
  args.kv_head = pair.kv_head;
  args.group = static_cast<int>(group());
  args.head_begin = pair.kv_head * args.group;
  args.dim_qk = spec_.dim_qk;
  args.dim_v = spec_.dim_v;
  args.scale = spec_.scale;
  args.mask = spec_.mask;
  args.window_left = spec_.window_left;
  args.window_right = spec_.window_right;
  if (const auto* bias = static_cast<const std::byte*>(global_.get(InputTensor::kBias))) {
    const BiasShape& shape = spec_.bias_shape;
    const std::int64_t queries = shape.queries ? spec_.seqlen_q : 1, heads = shape.heads ? spec_.heads : 1;
    const std::int64_t matrix =
        (shape.batch ? pair.sequence : 0) * heads + (shape.heads ? args.head_begin : 0);
    args.bias = {
        bias + static_cast<std::size_t>(matrix * queries * spec_.seqlen_kv) * SizeOf(spec_.dtypes.bias),
        spec_.dtypes.bias};
    args.bias_query_step = shape.queries ? spec_.seqlen_kv : 0;
    args.bias_head_step = shape.heads ? queries * spec_.seqlen_kv : 0;
    if (dbias) {
      args.dbias = to.dbias.get<double>();
      args.dbias_head_step = args.bias_head_step;
      args.dbias_query_step = args.bias_query_step;
    }
  }
  if (slopes_) args.alibi_slopes = slopes_ + args.head_begin;
  if (const float* offset = global_.softmax_offset()) args.softmax_offset = offset + args.head_begin;
  args.rounded = rounded;
  args.out = to.out.get<double>();
  args.lse = to.lse.get<double>();
  args.dq = to.dq.get<double>();
  args.dk = to.dk.get<double>();
  args.dv = to.dv.get<double>();
  if (to.d_softmax_offset) args.d_softmax_offset = to.d_softmax_offset.get<double>() + args.head_begin;
  if (to.max_logit) args.max_logit = to.max_logit.get<double>() + args.head_begin;
  if (!fp8_) {
    kernels_.Oracle(args, rt_->stream);
    return;
  }
  // The passes of the quantized problem are calls of their own: their operands differ.
  OracleArgs forward = args;
  forward.q = fp8_->q;
  forward.k = fp8_->k;
  forward.v = fp8_->v;
  forward.dout = {};
  forward.dq = forward.dk = forward.dv = forward.dbias = forward.d_softmax_offset = nullptr;
  OracleFp8& of_out = forward.fp8.emplace();
  of_out.p_scale = fp8_->p_scale;
  of_out.out_scale = fp8_->out_scale;
  if (!rounded) of_out.out_bound = bounds.out.get<double>();
  kernels_.Oracle(forward, rt_->stream);
  if (!spec_.training) return;
  args.q = fp8_->q_of_p;
  args.k = fp8_->k_of_p;
  args.v = fp8_->v_of_dp;
  args.dout = fp8_->dout;
  args.out = args.lse = args.max_logit = nullptr;
  OracleFp8& of_gradients = args.fp8.emplace();
  of_gradients.delta = fp8_->delta;
  if (fp8_->backward) {
    of_gradients.q_of_dk = fp8_->q_of_dk;
    of_gradients.k_of_dq = fp8_->k_of_dq;
    of_gradients.dout_of_dv = fp8_->dout_of_dv;
    of_gradients.p_scale = fp8_->p_scale;
    of_gradients.ds_scale = fp8_->ds_scale;
    of_gradients.ds_blocks = fp8_->ds_blocks;
    of_gradients.gradient_scale = fp8_->gradient_scale;
    if (!rounded) {
      of_gradients.dq_bound = bounds.dq.get<double>();
      of_gradients.dk_bound = bounds.dk.get<double>();
      of_gradients.dv_bound = bounds.dv.get<double>();
    }
  } else {
    of_gradients.lse = to.lse.get<double>();
    of_gradients.lse_shift = bounds.lse.get<double>();
  }
  kernels_.Oracle(args, rt_->stream);
}

std::vector<OracleShares::Piece> Verifier::PiecesOf(const OraclePair& pair, const OracleResults& mine,
                                                    const OracleResults& others) const {
  const std::int64_t vectors = spec_.queries.length[pair.sequence] * group();
  const std::int64_t keys = spec_.keys.length[pair.sequence];
  std::vector<OracleShares::Piece> pieces;
  const auto add = [&](CheckedTensor kind, std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(double);
    pieces.push_back({&mine.exact.of(kind), &others.exact.of(kind), bytes, false});
    pieces.push_back({&mine.plain.of(kind), &others.plain.of(kind), bytes, true});
    if (IsCast(kind)) pieces.push_back({&mine.bounds.of(kind), &others.bounds.of(kind), bytes, false});
  };
  add(CheckedTensor::kOut, vectors * spec_.dim_v);
  add(CheckedTensor::kLse, vectors);
  add(CheckedTensor::kDq, vectors * spec_.dim_qk);
  add(CheckedTensor::kDk, keys * spec_.dim_qk);
  add(CheckedTensor::kDv, keys * spec_.dim_v);
  return pieces;
}

void Verifier::ComparePair(const OraclePair& pair, const OracleOutputs& exact, const OracleOutputs& plain,
                           const OracleOutputs& bounds, Results<CompareStats>& results, StatsOf& stats) {
  for (const TensorSet::Tensor& tensor : local_.outputs()) {
    if (IsWhole(tensor)) continue;
    const CheckedTensor kind = KindOf(tensor);
    const bool of_queries = tensor.info.rows_of == TensorRows::kQueries;
    const Rows& rows = RowsOf(tokens_.of(tensor.info), pair.sequence);
    if (rows.count == 0) continue;
    const std::int64_t heads_here = of_queries ? group() : 1, dim = DimOf(tensor, spec_);
    CompareArgs args;
    args.a = {tensor.data.get(), tensor.info.dtype};
    args.a_rows = rows.rows;
    args.a_stride = tensor.info.columns;
    args.a_offset = pair.kv_head * heads_here * dim;
    args.b = {exact.of(kind).get(), Dtype::kFp64};
    args.b_rows = rows.positions;
    args.b_stride = args.columns = heads_here * dim;
    args.rows = rows.count;
    Stats result{results.Next(), results.Next(), results.Next()};
    result.pair = &pair;
    result.blocks = Divide(rows.blocks, dim, args);
    result.blocks.first_head = static_cast<std::size_t>(pair.kv_head * heads_here);
    if (IsCast(kind)) args.bound = bounds.of(kind).get<double>();
    if (tolerances_.count(kind)) args.tolerance = tolerances_.at(kind);
    kernels_.Compare(args, result.ours, rt_->stream);
    args.bound = nullptr;
    args.a = {plain.of(kind).get(), Dtype::kFp64};
    args.a_rows = rows.positions;
    args.a_offset = 0;
    args.a_stride = args.columns;
    result.blocks.plain = Divide(rows.blocks, dim, args).ours;
    kernels_.Compare(args, result.plain_here, rt_->stream);
    args.a_rows = args.b_rows = args.row_blocks = nullptr;
    args.blocks = nullptr;
    args.rows = (of_queries ? spec_.queries : spec_.keys).length[pair.sequence];
    kernels_.Compare(args, result.plain, rt_->stream);
    stats[kind].push_back(result);
  }
}

// For a tensor that every rank holds completely, plain attention's error on this rank's rows is its error on
// all rows.
Verifier::Stats Verifier::StatsOfWhole(Results<CompareStats>& results) {
  CompareStats* const ours = results.Next();
  CompareStats* const plain = results.Next();
  return {ours, plain, plain};
}

void Verifier::CompareBias(const BiasUnit& unit, const OracleOutputs& exact, const OracleOutputs& plain,
                           Results<CompareStats>& results, StatsOf& stats) {
  const std::int64_t keys = spec_.seqlen_kv, rows = unit.heads * unit.queries;
  kernels_.RoundValues(spec_.dtypes.dbias, plain.dbias.get<double>(), rows * keys, rt_->stream);
  const std::int64_t all_heads = spec_.bias_shape.heads ? spec_.heads : 1;
  CompareArgs args;
  args.a = {local_.get(CheckedTensor::kDbias), spec_.dtypes.dbias};
  args.a_offset = (unit.batch * all_heads + unit.head) * unit.queries * keys;
  args.b = {exact.dbias.get(), Dtype::kFp64};
  args.a_stride = args.b_stride = args.columns = keys;
  args.rows = rows;
  Stats result = StatsOfWhole(results);
  const RowBlocks& blocks = BlocksOfBias(unit.batch * all_heads + unit.head, unit.heads);
  result.blocks = Divide(blocks, kBlockRows, args);
  if (tolerances_.count(CheckedTensor::kDbias)) args.tolerance = tolerances_.at(CheckedTensor::kDbias);
  kernels_.Compare(args, result.ours, rt_->stream);
  args.a = {plain.dbias.get(), Dtype::kFp64};
  args.a_offset = 0;
  result.blocks.plain = Divide(blocks, kBlockRows, args).ours;
  kernels_.Compare(args, result.plain, rt_->stream);
  stats[CheckedTensor::kDbias].push_back(result);
}

void Verifier::CompareHeads(const std::vector<int>& kv_heads, const OracleOutputs& exact,
                            const OracleOutputs& plain, Results<CompareStats>& results, StatsOf& stats) {
  for (const CheckedTensor kind : {CheckedTensor::kDsoftmaxOffset, CheckedTensor::kMaxLogit}) {
    if (!local_.get(kind)) continue;
    kernels_.RoundValues(Dtype::kFp32, plain.of(kind).get<double>(), spec_.heads, rt_->stream);
    for (const int kv_head : kv_heads) {
      CompareArgs args;
      args.a = {local_.get(kind), Dtype::kFp32};
      args.b = {exact.of(kind).get(), Dtype::kFp64};
      args.a_offset = args.b_offset = kv_head * group();
      args.columns = args.a_stride = args.b_stride = group();
      args.rows = 1;
      Stats result = StatsOfWhole(results);
      result.blocks = Divide(BlocksOfWhole(), 1, args);
      result.blocks.first_head = static_cast<std::size_t>(kv_head * group());
      if (tolerances_.count(kind)) args.tolerance = tolerances_.at(kind);
      kernels_.Compare(args, result.ours, rt_->stream);
      args.blocks = nullptr;
      args.a = {plain.of(kind).get(), Dtype::kFp64};
      kernels_.Compare(args, result.plain, rt_->stream);
      stats[kind].push_back(result);
    }
  }
}

const Verifier::Rows& Verifier::RowsOf(const RankRows& rank, int sequence) {
  const auto key = std::make_pair(&rank, sequence);
  if (const auto known = rows_.find(key); known != rows_.end()) return known->second;
  std::vector<std::int64_t> rows, positions;
  std::vector<RowBlock> blocks;
  const auto& segments = rank.layout.segments;
  const auto first = std::partition_point(segments.begin(), segments.end(),
                                          [&](const Segment& s) { return s.sequence < sequence; });
  for (auto segment = first; segment != segments.end() && (sequence == kAll || segment->sequence == sequence);
       ++segment) {
    for (std::int64_t i = 0; i < segment->length; ++i) {
      const std::int64_t row = segment->row + i * rank.layout.row_step;
      rows.push_back(row);
      positions.push_back(sequence == kAll ? rank.whole[row] : segment->position + i);
    }
    AddBlocks(segment->sequence, segment->position, segment->length, blocks);
  }
  const auto count = static_cast<std::int64_t>(rows.size());
  return rows_[key] = {Upload(rows), Upload(positions), count, UploadBlocks(std::move(blocks))};
}

const Verifier::RowBlocks& Verifier::BlocksOfWhole() {
  if (!whole_blocks_) whole_blocks_ = UploadBlocks({{0, 0, 1}});
  return *whole_blocks_;
}

const Verifier::RowBlocks& Verifier::BlocksOfBias(std::int64_t first, std::int64_t matrices) {
  std::vector<RowBlock> blocks;
  for (std::int64_t i = 0; i < matrices; ++i)
    AddBlocks(first + i, 0, spec_.bias_shape.queries ? spec_.seqlen_q : 1, blocks);
  for (RowBlock& block : blocks) AddTerms(block);
  return bias_blocks_.emplace_back(UploadBlocks(std::move(blocks)));
}

// How large the terms of dbias are where they do not cancel: a query that sees n keys has a sum of squared
// probabilities of about 1 / n, more with a bias or a large scale, and its row of dbias is about that times
// GradientTerms::of_values.
void Verifier::AddTerms(RowBlock& block) const {
  const BiasShape& shape = spec_.bias_shape;
  const double sharpness = std::max(1.0, TermsOf(spec_, CheckedTensor::kDbias).sharpness);
  const std::int64_t summed = shape.heads ? 1 : spec_.heads;
  const std::int64_t matrices = shape.heads ? spec_.heads : 1;
  const std::int64_t first = shape.batch ? block.of / matrices : 0;
  for (std::int64_t sequence = first; sequence < (shape.batch ? first + 1 : spec_.batch); ++sequence) {
    const std::int64_t queries = spec_.queries.length[sequence];
    const OracleMask mask{spec_.mask, spec_.window_left, spec_.window_right, queries,
                          spec_.keys.length[sequence]};
    const std::int64_t begin = shape.queries ? block.begin : 0;
    double largest = 0;
    for (std::int64_t i = begin; i < (shape.queries ? std::min(block.end, queries) : queries); ++i) {
      const KeyRange keys = mask.Keys(i);
      if (keys.begin == keys.end) continue;
      const double squares =
          std::min(1.0, 2 * sharpness * sharpness / static_cast<double>(keys.end - keys.begin));
      block.terms.sum_sq_ref += static_cast<double>(summed) * squares * squares;
      largest = std::max(largest, squares);
    }
    block.terms.max_abs_ref = std::hypot(block.terms.max_abs_ref, std::sqrt(summed) * largest);
  }
}

void Verifier::AddBlocks(std::int64_t of, std::int64_t begin, std::int64_t rows,
                         std::vector<RowBlock>& blocks) {
  for (const std::int64_t end = begin + rows; begin < end; begin += kBlockRows)
    blocks.push_back({of, begin, std::min(begin + kBlockRows, end)});
}

Verifier::RowBlocks Verifier::UploadBlocks(std::vector<RowBlock> blocks) {
  std::vector<std::int64_t> begins = {0};
  for (const RowBlock& block : blocks) begins.push_back(begins.back() + block.end - block.begin);
  return {Upload(begins), std::move(blocks)};
}

Verifier::BlockResults Verifier::Divide(const RowBlocks& rows, std::int64_t columns, CompareArgs& args) {
  args.row_blocks = rows.begins;
  args.row_block_count = static_cast<std::int64_t>(rows.each.size());
  args.block_columns = columns;
  const std::int64_t across = args.ColumnBlocks();
  args.blocks =
      block_stats_.emplace_back(rt_, static_cast<std::size_t>(args.row_block_count * across)).begin();
  return {args.blocks, nullptr, &rows.each, static_cast<std::size_t>(across), columns, 0};
}

GradientTerms Verifier::Terms(CheckedTensor kind) const {
  GradientTerms terms = TermsOf(spec_, kind);
  terms.of_payloads = fp8_sum_keys_ != 0;
  return terms;
}

void Verifier::JudgeBlocks(CheckedTensor kind, const char* against, const BlocksOf& blocks,
                           Verdict& verdict) {
  const auto of_kind = blocks.find(kind);
  if (of_kind == blocks.end()) return;
  // The terms of dq and dk have the probabilities that those of out and dv have, in the same rows.
  const auto values = kind == CheckedTensor::kDq   ? blocks.find(CheckedTensor::kOut)
                      : kind == CheckedTensor::kDk ? blocks.find(CheckedTensor::kDv)
                                                   : blocks.end();
  const GradientTerms terms = Terms(kind);
  const BlockResults* worst = nullptr;
  std::size_t worst_at = 0;
  for (std::size_t part = 0; part < of_kind->second.size(); ++part) {
    const BlockResults& found = of_kind->second[part];
    for (std::size_t i = 0; i < found.count(); ++i) {
      const BlockStats* const plain = found.plain ? found.plain + i : nullptr;
      const BlockStats* of_values = values == blocks.end() ? nullptr : values->second[part].ours + i;
      BlockStats of_bias;
      if (kind == CheckedTensor::kDbias) {
        of_bias = (*found.rows)[i / found.columns].terms;
        of_bias.count = found.ours[i].count;
        of_values = &of_bias;
      }
      const double ratio = IsCast(kind)
                               ? JudgeBlockFp8(found.ours[i], plain, of_values, terms)
                               : JudgeBlock(kind, DtypeOf(kind), found.ours[i], plain, of_values, terms);
      if (ratio <= verdict.block_ratio) continue;
      verdict.block_ratio = ratio;
      worst = &found;
      worst_at = i;
    }
  }
  if (verdict.block_ratio <= 1) return;
  verdict.ok = false;
  const RowBlock& rows = (*worst->rows)[worst_at / worst->columns];
  const std::size_t column = worst_at % worst->columns;
  std::ostringstream text;
  text << NameOf(kind) << " against " << against << ": ";
  if (kind == CheckedTensor::kDbias) {
    text << "keys from " << column * kBlockRows << " on and queries " << rows.begin << " to " << rows.end - 1
         << " of matrix " << rows.of;
  } else {
    text << "tokens " << rows.begin << " to " << rows.end - 1 << " of sequence " << rows.of << ", head "
         << worst->first_head + column;
  }
  text << ": the error is " << std::setprecision(3) << verdict.block_ratio
       << " times the limit of this block";
  verdict.block = text.str();
}

template <typename T>
const T* Verifier::Upload(const std::vector<T>& values) {
  const std::size_t bytes = values.size() * sizeof(T);
  const auto& staged = staged_.emplace_back(rt_, bytes);
  const Buffer& buffer = uploaded_.emplace_back(rt_, bytes, rt_->stream);
  if (bytes) {
    std::memcpy(staged.begin(), values.data(), bytes);
    Check(rt_, rt_->copy(rt_, buffer.get(), staged.begin(), bytes, rt_->stream));
  }
  return buffer.get<T>();
}

double Verifier::OutputBytes(const AttentionSpec& spec, const OracleSample& sample, int world_size) {
  OracleResults mine, others;
  MemoryList list;
  mine.List(spec, sample, true, list);
  if (spec.fp8 && world_size > 1) others.List(spec, sample, false, list);
  return list.buffer_bytes();
}

double OracleBytes(const AttentionSpec& spec, bool host, int world_size) {
  const int group = spec.heads / spec.kv_heads;
  const OracleSample sample = SampleOracle(spec, host);
  const auto shape = [&](std::int64_t seqlen_q, std::int64_t seqlen_kv) {
    return OracleShape{seqlen_q,
                       seqlen_kv,
                       group,
                       spec.dim_qk,
                       spec.dim_v,
                       spec.training,
                       spec.training && spec.softmax == SoftmaxType::kLearnable,
                       spec.fp8.has_value()};
  };
  std::size_t workspace = host ? HostOracleWorkspace(shape(spec.seqlen_q, spec.seqlen_kv)) : 0;
  if (!host) {  // a shorter sequence may need more workspace, because its sums are divided into more parts
    for (const auto& [sequence, kv_head] : sample.pairs) {
      OracleShape call = shape(spec.queries.length[sequence], spec.keys.length[sequence]);
      workspace = std::max(workspace, OracleWorkspace(call));
      if (!spec.fp8) continue;
      call.backward = call.offset_gradient = false;  // a call for each pass
      workspace = std::max(workspace, OracleWorkspace(call));
    }
  }
  return Verifier::OutputBytes(spec, sample, world_size) + static_cast<double>(workspace);
}

}  // namespace cppool::kernels
