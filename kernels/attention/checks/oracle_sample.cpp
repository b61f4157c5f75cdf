#include "kernels/attention/checks/oracle_sample.h"

#include <algorithm>
#include <tuple>

namespace cppool::kernels {
namespace {

// Limit on the bytes of dbias (exact and plain sums together); if it is exceeded, dbias is not checked
// against the oracle.
constexpr double kMostBiasBytes = 16.0 * (1 << 30);
// Limit on the number of pairs that Require adds for a complete sum.
constexpr std::size_t kMostPairs = 4096;

// The pairs that add to the same elements of dbias: one pair, all sequences of a head, all heads of a
// sequence, or all pairs.
enum class Unit { kPair, kHead, kSequence, kAll };

class Sampler {
 public:
  Sampler(const AttentionSpec& spec, bool host) : spec_(spec), host_(host) {
    for (std::int64_t i = 0; i < spec.batch; ++i) {
      const bool tokens = spec.queries.length[i] > 0 || spec.keys.length[i] > 0;
      if (tokens) (Flops(i) > 0 ? sequences_ : one_sided_).push_back(static_cast<int>(i));
    }
    unit_ = spec.bias_shape.batch ? (spec.bias_shape.heads ? Unit::kPair : Unit::kSequence)
                                  : (spec.bias_shape.heads ? Unit::kHead : Unit::kAll);
    const BiasShape& shape = spec.bias_shape;
    const double bytes = 2.0 * sizeof(double) * static_cast<double>(shape.heads ? group() : 1) *
                         static_cast<double>(shape.queries ? spec.seqlen_q : 1) *
                         static_cast<double>(spec.seqlen_kv);
    bias_ = spec.bias == BiasType::kPostScale && spec.training && bytes <= kMostBiasBytes;
  }

  OracleSample Sample() {
    Pick(sequences_);
    Pick(one_sided_);
    if (pairs_.empty()) return {};
    const bool head_sums = spec_.max_logit || (spec_.softmax == SoftmaxType::kLearnable && spec_.training);
    const OraclePair first = pairs_.front();
    if (head_sums || (bias_ && unit_ == Unit::kHead)) Require(sequences_, {first.kv_head});
    if (bias_ && unit_ == Unit::kSequence) Require({first.sequence}, AllHeads());
    if (bias_ && unit_ == Unit::kAll) Require(sequences_, AllHeads());

    const bool by_sequence = unit_ == Unit::kPair || unit_ == Unit::kSequence;
    std::sort(pairs_.begin(), pairs_.end(), [&](const OraclePair& a, const OraclePair& b) {
      return by_sequence ? std::tie(a.sequence, a.kv_head) < std::tie(b.sequence, b.kv_head)
                         : std::tie(a.kv_head, a.sequence) < std::tie(b.kv_head, b.sequence);
    });
    OracleSample sample;
    for (int head = 0; head < spec_.kv_heads; ++head) {
      const auto mine = std::count_if(pairs_.begin(), pairs_.end(), [&](const OraclePair& pair) {
        return pair.kv_head == head && Flops(pair.sequence) > 0;
      });
      if (static_cast<std::size_t>(mine) == sequences_.size()) sample.whole_heads.push_back(head);
    }
    if (bias_) sample.bias_units = BiasUnits();
    sample.pairs = std::move(pairs_);
    return sample;
  }

 private:
  std::int64_t group() const { return spec_.heads / spec_.kv_heads; }
  // Operations of the oracle for one pair of this sequence. The mask is ignored.
  double Flops(std::int64_t sequence) const {
    return 12.0 * static_cast<double>(spec_.queries.length[sequence]) *
           static_cast<double>(spec_.keys.length[sequence]) * (spec_.dim_qk + spec_.dim_v) *
           static_cast<double>(group());
  }
  std::vector<int> AllHeads() const {
    std::vector<int> heads(static_cast<std::size_t>(spec_.kv_heads));
    for (int i = 0; i < spec_.kv_heads; ++i) heads[i] = i;
    return heads;
  }

  // Adds all pairs of these sequences if that is cheap, otherwise a sample selected by the seed.
  void Pick(const std::vector<int>& sequences) {
    if (sequences.empty()) return;
    // The judgement of fp8 wants kFp8Samples elements of a rank, if the case has them.
    const double budget = host_ ? (spec_.fp8 ? 1e9 : 4e8) : 1e11;
    const std::int64_t most = host_ ? 256 : 16;
    double mean = 0;
    for (const int sequence : sequences) mean += Flops(sequence) / static_cast<double>(sequences.size());
    const std::int64_t all = static_cast<std::int64_t>(sequences.size()) * spec_.kv_heads;
    const std::int64_t count = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(budget / std::max(mean, 1.0)), 1, std::min(all, most));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto index = static_cast<std::int64_t>((spec_.seed + i * all / count) % all);
      pairs_.push_back({sequences[index / spec_.kv_heads], static_cast<int>(index % spec_.kv_heads)});
    }
  }

  // Adds all pairs of these sequences and heads, unless that is too much work.
  void Require(const std::vector<int>& sequences, const std::vector<int>& kv_heads) {
    if (sequences.size() * kv_heads.size() > kMostPairs) return;
    std::vector<OraclePair> missing;
    double flops = 0;
    for (const int sequence : sequences) {
      for (const int kv_head : kv_heads) {
        const OraclePair pair{sequence, kv_head};
        if (std::find(pairs_.begin(), pairs_.end(), pair) != pairs_.end()) continue;
        missing.push_back(pair);
        flops += Flops(sequence);
      }
    }
    if (flops <= (host_ ? 4e9 : 1e13)) pairs_.insert(pairs_.end(), missing.begin(), missing.end());
  }

  std::vector<BiasUnit> BiasUnits() const {
    const auto same = [&](const OraclePair& a, const OraclePair& b) {
      return (unit_ == Unit::kAll || unit_ == Unit::kHead || a.sequence == b.sequence) &&
             (unit_ == Unit::kAll || unit_ == Unit::kSequence || a.kv_head == b.kv_head);
    };
    const bool of_one = unit_ == Unit::kPair || unit_ == Unit::kSequence;
    const std::size_t sequences = of_one ? 1 : sequences_.size();
    const std::size_t heads = unit_ == Unit::kPair || unit_ == Unit::kHead ? 1 : spec_.kv_heads;
    std::vector<BiasUnit> units;
    for (std::size_t begin = 0; begin < pairs_.size();) {
      std::size_t end = begin + 1;
      while (end < pairs_.size() && same(pairs_[begin], pairs_[end])) ++end;
      const auto adding = static_cast<std::size_t>(
          std::count_if(pairs_.begin() + static_cast<std::ptrdiff_t>(begin),
                        pairs_.begin() + static_cast<std::ptrdiff_t>(end),
                        [&](const OraclePair& pair) { return of_one || Flops(pair.sequence) > 0; }));
      if (adding == sequences * heads) {
        const BiasShape& shape = spec_.bias_shape;
        units.push_back({begin, end, shape.batch ? pairs_[begin].sequence : 0,
                         shape.heads ? pairs_[begin].kv_head * group() : 0, shape.heads ? group() : 1,
                         shape.queries ? spec_.seqlen_q : 1});
      }
      begin = end;
    }
    return units;
  }

  const AttentionSpec& spec_;
  const bool host_;
  std::vector<int> sequences_;  // with queries and keys
  std::vector<int> one_sided_;  // with only queries or only keys: their results are zero or minus infinity
  Unit unit_ = Unit::kPair;
  bool bias_ = false;
  std::vector<OraclePair> pairs_;
};

}  // namespace

OracleSample SampleOracle(const AttentionSpec& spec, bool host) { return Sampler(spec, host).Sample(); }

}  // namespace cppool::kernels
