#include "kernels/attention/judge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/error.h"

namespace cppool::kernels {
namespace {

// Transformer Engine, tests/pytorch/attention/run_attention_with_cp.py: the absolute and the relative
// tolerance are the same number.
constexpr double kBf16 = 2.5e-2;
constexpr double kBf16Gqa = 3.5e-2;
constexpr double kFp16 = 5e-3;
// Limits on the relative RMS error between the runs with and without CP. The two runs round P and dS to the
// dtype at different running maxima and add blocks in a different order. Each causes a relative difference of
// a fraction of the unit roundoff (2^-8 and 2^-11), independent between elements. The limits are 2.5 and 4
// unit roundoffs.
constexpr double kBf16Rms = 1e-2;
constexpr double kFp16Rms = 2e-3;
// lse is the fp32 logarithm of a sum, and the order of the sum differs between runs.
constexpr double kLseAbsolute = 1e-4;
constexpr double kLseRelative = 1e-5;

// The error of max_logit comes only from the fp32 sum of one dot product, whose terms add up to less than 10
// in absolute value at the usual scale, and from the addition of the bias. The products are exact; a tensor
// core may truncate the bits of a sum of 16 products below its last place. At other scales the same holds
// relative to the logit. A missing key or an extra key changes max_logit by far more.
constexpr double kMaxLogitAbsolute = 1e-5;
constexpr double kMaxLogitRelative = 1e-5;

// From FlashAttention's tests: twice the error of plain attention is allowed for the output, three times for
// gradients.
constexpr double kOutFactor = 2;
constexpr double kGradientFactor = 3;
// Each of the two compared runs may have plain attention's error.
constexpr double kTwoRuns = 2;
// Plain attention rounds its logits to the dtype, our kernels do not: over all cells of the suite our lse has
// at most 2 % of plain attention's error. A limit of the full error would not detect a window that is one key
// too wide, beyond about 2000 keys.
constexpr double kLseFactor = 0.25;
// A lower bound of the limit on lse, for the case that plain attention has no error: a few fp32 roundings of
// the largest logit.
constexpr double kLseFloor = 1e-5;

// The sums of an 8-bit product cut off what 13 bits beside its largest term do not hold, while logits are
// what is left of terms that cancel: over 720 cells on an H100 lse and max_logit were wrong by at most
// 2^-12.3 of themselves.
constexpr double kPayloadLogits = 0x1p-11;

// Absolute error allowed for every gradient. If a query sees one key, the exact gradient is 0, and dP - delta
// is a difference of two equal sums of fp32 products: a few units of 2^-24 of |dP| <~ 16, times the usual
// scale and |k| <= 2. This is far below the RMS of all other gradients, up to 1M keys.
constexpr double kNoise = 1e-5;
// The error of a row's delta, a sum over the head dimension, due to the rounding of `out`, in unit roundoffs.
constexpr double kDeltaError = 4;

// d_softmax_offset is one sum over all queries for each head. The errors of its terms come from the rounding
// of `out` and are, relative to a term, as large as for other gradients. But the terms of a head may cancel
// by chance. The probability that the sums of all n heads are below a fraction x of their standard deviation
// is x^n, so the limit is wider for few heads: a third for one head in bf16, 3 % for 16.
double CancellationFactor(std::uint64_t heads) {
  return 1 + 32 / static_cast<double>(std::max<std::uint64_t>(heads, 1));
}

// fp8: see JudgeFp8. The RMS error of a cast is 2.65 % (E4M3) and 5.3 % (E5M2), and sums of randomly signed
// terms keep it, so that two right results have the same error within a few per cent, and none of them is too
// large or too small by 1 %. The largest error is that of one cast of an outlier, which may happen to be
// small in one of them: it differs by up to 2.4 times.
constexpr double kFp8Most = 1.25, kFp8Largest = 3, kFp8Least = 0.7, kFp8LeastOfTwo = 0.25, kFp8Floor = 2e-3,
                 kFp8Gain = 2e-2;
// Two right runs differ by up to the square root of 2 times plain's error, since their casts round
// independently: P is cast relative to the running maximum of each block, and dS and results with each run's
// own scale. Inputs with outliers have few elements that carry the RMS, and the error of a right run is then
// up to 1.4 times that of another.
constexpr double kFp8NoCp = 2;

// Blocks: see JudgeBlock. A row of 64 that is missing is an RMS of 12.5 % of the block's, and an error as
// large as its elements. Two right results are apart by at most one unit in the last place of the largest
// element (2 unit roundoffs) and, in RMS, by a third of a unit roundoff. The error of delta, from the
// rounding of a row of out, is 0.4 unit roundoffs of the terms.
constexpr double kBlockPlain = 4, kBlockRoundings = 8, kBlockTerms = 2, kBlockLargestTerms = 4;
// Terms that are too small for fp16 (2^-24), or for fp32 and bf16 (2^-126), become zero, and an element is a
// sum of many. ALiBi has such probabilities far from the diagonal.
constexpr double kFp16SmallestTerms = 0x1p-20, kSmallestTerms = 0x1p-116;
// In fp8 the RMS of a block's error is up to 1.06 times plain's and the largest error 2.3 times. Without CP
// the largest is up to one step of E5M2, a quarter of the largest element. The noise of fp32 is that of sums
// of terms with random signs.
constexpr double kFp8BlockMost = 1.5, kFp8BlockFloor = 0.02, kFp8BlockLargestFloor = 0.1;
constexpr double kFp8BlockNoCp = 0.2, kFp8BlockNoCpLargest = 0.4, kFp32Terms = 0x1p-16;

double UnitRoundoff(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
      return 0x1p-11;
    case Dtype::kBf16:
      return 0x1p-8;
    case Dtype::kFp32:
      return 0x1p-24;
    case Dtype::kFp64:
      return 0x1p-53;
    case Dtype::kE4M3:
      return 0x1p-4;
    case Dtype::kE5M2:
      return 0x1p-3;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "judge: unknown dtype");
}

// Widens limits that are multiples of plain attention's error if there are few elements. The elements of a
// row share the error of the row's delta (from the rounded `out` in our kernels, from the rounded P in plain
// attention), so a few tokens are only a few independent samples, and the ratio of two such errors is often
// large by chance.
double FewSamplesFactor(std::uint64_t elements) {
  return 1 + 256 / static_cast<double>(std::max<std::uint64_t>(elements, 1));
}

// The absolute error allowed for a gradient.
//
// dq and dk: delta is computed from the rounded `out`, and all elements of a row share its error. If the
// terms dP - delta cancel, only this error remains, while plain attention may have none by chance. This
// happens with few samples, and with a large scale, where each query attends to only one key.
//
// dbias: its terms P * (dP - delta) are about 4 / keys, with errors (of fp32, and of delta from the rounding
// of `out`) of a fraction of the unit roundoff, so the limit on the RMS detects a rank's partial sum that is
// missing or added twice. The noise of a sum grows with the square root of the number of terms.
double NoiseOf(CheckedTensor tensor, Dtype dtype, const GradientTerms& terms, std::uint64_t elements) {
  if (tensor == CheckedTensor::kDbias) return kNoise * std::sqrt(terms.summed);
  if (tensor == CheckedTensor::kDsoftmaxOffset) {  // the error of each delta, times the offset's probability
    return kDeltaError * UnitRoundoff(dtype) * std::sqrt(terms.summed) /
           static_cast<double>(std::max<std::uint64_t>(elements, 1));
  }
  if (tensor != CheckedTensor::kDq && tensor != CheckedTensor::kDk) return kNoise;
  const double sharper = std::clamp((terms.sharpness - 1) / 8, 0.0, 1.0);
  return kNoise * std::max(1.0, terms.sharpness) +
         kDeltaError * UnitRoundoff(dtype) * terms.scale * (FewSamplesFactor(elements) - 1 + sharper);
}

bool IsGradient(CheckedTensor tensor) {
  return tensor != CheckedTensor::kOut && tensor != CheckedTensor::kLse && tensor != CheckedTensor::kMaxLogit;
}

// The least limit on the error of lse.
double LseFloor(double largest, const GradientTerms& terms) {
  return (terms.of_payloads ? kPayloadLogits : kLseFloor) * std::max(1.0, largest);
}

double Rms(double sum_sq, std::uint64_t count) {
  return count ? std::sqrt(sum_sq / static_cast<double>(count)) : 0;
}

// If the reference is all zeros, the error is divided by the noise, so that the result stays finite.
double RelativeError(const CompareStats& stats) {
  const double error = Rms(stats.sum_sq_err, stats.count);
  const double reference = Rms(stats.sum_sq_ref, stats.count);
  return error == 0 ? 0 : error / (reference > 0 ? reference : kNoise);
}

struct BlockLimits {
  double rms = 0, largest = 0;
};

double OverLimits(const BlockStats& block, const BlockLimits& limits) {
  const auto over = [](double error, double limit) { return error == 0 ? 0 : error / limit; };
  return std::max(over(Rms(block.sum_sq_err, block.count), limits.rms),
                  over(block.max_abs_err, limits.largest));
}

Verdict Describe(const CompareStats& stats, double tolerance) {
  return {.max_abs_err = stats.max_abs_err,
          .rel_err = RelativeError(stats),
          .tolerance = tolerance,
          .ok = false,
          .mismatches = stats.mismatches};
}

}  // namespace

const char* NameOf(CheckedTensor tensor) {
  static constexpr auto kNames = std::to_array({"out", "lse", "dq", "dk", "dv", "dbias", "d_softmax_offset",
                                                "max_logit", "q", "k", "v", "dout", "delta"});
  static_assert(kNames.size() == static_cast<std::size_t>(CheckedTensor::kDelta) + 1);
  return kNames.at(static_cast<std::size_t>(tensor));
}

Dtype JudgedDtype(CheckedTensor tensor, const TensorDtypes& dtypes) {
  switch (tensor) {
    case CheckedTensor::kOut:
    case CheckedTensor::kLse:
    case CheckedTensor::kDsoftmaxOffset:  // its error comes from delta, and thus from the rounded out
    case CheckedTensor::kMaxLogit:
      return dtypes.out;
    case CheckedTensor::kDq:
      return dtypes.dq;
    case CheckedTensor::kDk:
      return dtypes.dk;
    case CheckedTensor::kDv:
      return dtypes.dv;
    case CheckedTensor::kDbias:
      return dtypes.dbias;
    case CheckedTensor::kQ:
      return dtypes.q;
    case CheckedTensor::kK:
      return dtypes.k;
    case CheckedTensor::kV:
      return dtypes.v;
    case CheckedTensor::kDout:
    case CheckedTensor::kDelta:
      return dtypes.dout;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "judge: no such tensor");
}

NoCpTolerance ToleranceNoCp(CheckedTensor tensor, Dtype dtype, bool gqa) {
  if (tensor == CheckedTensor::kLse)
    return {kLseAbsolute, kLseRelative, std::numeric_limits<double>::infinity()};
  if (tensor == CheckedTensor::kMaxLogit)
    return {kMaxLogitAbsolute, kMaxLogitRelative, std::numeric_limits<double>::infinity()};
  switch (dtype) {
    case Dtype::kBf16:
      return gqa ? NoCpTolerance{kBf16Gqa, kBf16Gqa, kBf16Rms} : NoCpTolerance{kBf16, kBf16, kBf16Rms};
    case Dtype::kFp16:
      return {kFp16, kFp16, kFp16Rms};
    case Dtype::kFp32:
    case Dtype::kFp64:
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "judge: no tolerance for this dtype");
}

Verdict JudgeNoCp(CheckedTensor tensor, Dtype dtype, bool gqa, const CompareStats& stats,
                  const CompareStats& plain, const GradientTerms& terms) {
  const NoCpTolerance tolerance = ToleranceNoCp(tensor, dtype, gqa);
  double rms = tolerance.rms;
  const double noise = NoiseOf(tensor, dtype, terms, stats.count);
  // lse and max_logit are fp32 here, but not in plain attention.
  const bool fp32 = std::isinf(rms);
  double factor = fp32 ? 0 : kTwoRuns * FewSamplesFactor(stats.count);
  if (tensor == CheckedTensor::kDsoftmaxOffset) {
    rms *= CancellationFactor(stats.count);
    factor = kTwoRuns;
  }
  const double plain_largest = factor * plain.max_abs_err,
               plain_rms = factor * Rms(plain.sum_sq_err, plain.count);
  Verdict verdict = Describe(stats, std::max(tolerance.absolute, plain_largest));
  const bool holds = stats.max_excess <= tolerance.absolute || stats.max_abs_err <= plain_largest + noise;
  // An infinite limit times a reference of 0 would be NaN.
  const bool rms_holds = fp32 || Rms(stats.sum_sq_err, stats.count) <=
                                     std::max(rms * Rms(stats.sum_sq_ref, stats.count), plain_rms) + noise;
  verdict.ok = stats.count > 0 && stats.mismatches == 0 && holds && rms_holds;
  return verdict;
}

Verdict JudgeOracle(CheckedTensor tensor, Dtype dtype, const CompareStats& ours, const CompareStats& plain,
                    const CompareStats& plain_here, const GradientTerms& terms) {
  double floor = 0;
  double factor = IsGradient(tensor) ? kGradientFactor : kOutFactor;
  // Infinite, which means no limit on the RMS, for tensors with one value per head.
  double rms_floor = std::numeric_limits<double>::infinity();
  if (tensor == CheckedTensor::kLse) {
    floor = rms_floor = LseFloor(ours.max_abs_ref, terms);
    factor = kLseFactor;
  } else if (tensor == CheckedTensor::kMaxLogit) {
    floor = terms.of_payloads ? LseFloor(ours.max_abs_ref, terms)
                              : kMaxLogitAbsolute + kMaxLogitRelative * ours.max_abs_ref;
    factor = 0;  // plain attention rounds it to the dtype
  } else {
    // One rounding of the largest element: the error of an exact kernel that stores its result in the dtype.
    floor = UnitRoundoff(dtype) * ours.max_abs_ref;
    // If plain attention has only few sums, it may have no error by chance.
    const double noise = IsGradient(tensor) ? NoiseOf(tensor, dtype, terms, ours.count) : 0;
    if (tensor == CheckedTensor::kDsoftmaxOffset) {
      floor = floor * CancellationFactor(ours.count) + noise;
    } else {
      if (IsGradient(tensor)) factor *= FewSamplesFactor(ours.count);
      floor += noise;
      rms_floor = UnitRoundoff(dtype) * Rms(ours.sum_sq_ref, ours.count) + noise;
    }
  }
  Verdict verdict = Describe(ours, factor * plain.max_abs_err + floor);
  const double yardstick = std::max(plain.max_abs_err, floor);
  verdict.ratio = yardstick > 0 ? ours.max_abs_err / yardstick : 0;
  const bool rms_holds =
      Rms(ours.sum_sq_err, ours.count) <=
      factor * std::max(Rms(plain_here.sum_sq_err, plain_here.count), Rms(plain.sum_sq_err, plain.count)) +
          rms_floor;
  // plain.mismatches is not checked: with inputs from a file, the rounded logits of plain attention may
  // overflow. Its finite elements give the limit.
  verdict.ok = ours.count > 0 && ours.mismatches == 0 && plain.count > 0 &&
               ours.max_abs_err <= verdict.tolerance && rms_holds;
  return verdict;
}

double JudgeBlock(CheckedTensor tensor, Dtype dtype, const BlockStats& block, const BlockStats* plain,
                  const BlockStats* values, const GradientTerms& terms) {
  BlockLimits limits;
  double factor = kBlockPlain;
  if (tensor == CheckedTensor::kLse) {
    limits.rms = limits.largest = LseFloor(block.max_abs_ref, terms);
    factor = kLseFactor;
  } else {
    const double rounding = UnitRoundoff(dtype);
    double least = dtype == Dtype::kFp16 ? kFp16SmallestTerms : kSmallestTerms;
    if (tensor == CheckedTensor::kDbias) least += NoiseOf(tensor, dtype, terms, block.count);
    limits.rms = kBlockRoundings * rounding * Rms(block.sum_sq_ref, block.count) + least;
    limits.largest = kBlockRoundings * rounding * block.max_abs_ref + least;
    if (values) {
      limits.rms += kBlockTerms * rounding * terms.of_values * Rms(values->sum_sq_ref, values->count);
      limits.largest += kBlockLargestTerms * rounding * terms.of_values * values->max_abs_ref;
    }
  }
  if (plain) {
    limits.rms += factor * Rms(plain->sum_sq_err, plain->count);
    limits.largest += factor * plain->max_abs_err;
  }
  return OverLimits(block, limits);
}

double JudgeBlockFp8(const BlockStats& block, const BlockStats* plain, const BlockStats* values,
                     const GradientTerms& terms) {
  const double rms = Rms(block.sum_sq_ref, block.count), largest = block.max_abs_ref;
  BlockLimits limits{kFp8BlockNoCp * rms, kFp8BlockNoCpLargest * largest};
  if (plain) {
    limits = {kFp8BlockMost * Rms(plain->sum_sq_err, plain->count) + kFp8BlockFloor * rms,
              kFp8Largest * plain->max_abs_err + kFp8BlockLargestFloor * largest};
  }
  limits.rms += kSmallestTerms;
  limits.largest += kSmallestTerms;
  if (values) {
    limits.rms += kFp32Terms * terms.of_values * Rms(values->sum_sq_ref, values->count);
    limits.largest += kFp32Terms * terms.of_values * values->max_abs_ref;
  }
  return OverLimits(block, limits);
}

Verdict JudgeFp8(const CompareStats& ours, const CompareStats& plain_here, const Fp8Terms& terms) {
  Verdict verdict = Describe(ours, ours.largest_bound);
  const double error = Rms(ours.sum_sq_err, ours.count), plain = Rms(plain_here.sum_sq_err, plain_here.count);
  verdict.ratio = plain > 0 ? error / plain : 0;
  verdict.ok = ours.count > 0 && ours.mismatches == 0 && ours.max_of_bound <= 1;
  if (ours.count < kFp8Samples) return verdict;
  const double largest = kFp8Largest * plain_here.max_abs_err;
  const double reference = Rms(ours.sum_sq_ref, ours.count);
  if (terms.cancel && ours.max_abs_ref <= kNoise) {
    verdict.ok = verdict.ok && ours.max_abs_err <= kNoise;
    return verdict;
  }
  const auto gain = [](const CompareStats& stats) {
    return stats.sum_sq_ref > 0 ? std::abs(stats.sum_err_ref / stats.sum_sq_ref) : 0;
  };
  verdict.ok = verdict.ok && ours.max_abs_err <= largest && gain(ours) <= gain(plain_here) + kFp8Gain &&
               error <= kFp8Most * plain + kFp8Floor * reference &&
               error >= (terms.two_keys ? kFp8LeastOfTwo : kFp8Least) * plain;
  return verdict;
}

Verdict JudgeFp8NoCp(const CompareStats& stats, const CompareStats& ours, const CompareStats& plain_here,
                     const CompareStats& plain) {
  const bool all = ours.count == stats.count;
  Verdict verdict = Describe(stats, std::max(2 * ours.largest_bound, all ? 0 : stats.max_abs_ref / 2));
  verdict.ok = stats.count > 0 && stats.mismatches == 0 && stats.max_abs_err <= verdict.tolerance;
  if (stats.count < kFp8Samples || plain.count < kFp8Samples) return verdict;
  // Relative, since the heads of the sample may be smaller than others.
  double relative = RelativeError(plain);
  if (plain_here.count >= kFp8Samples) relative = std::max(relative, RelativeError(plain_here));
  verdict.ok = verdict.ok && Rms(stats.sum_sq_err, stats.count) <=
                                 (kFp8NoCp * relative + kFp8Floor) * Rms(stats.sum_sq_ref, stats.count);
  return verdict;
}

Verdict JudgeBits(std::uint64_t wrong, std::uint64_t count, double largest_error) {
  Verdict verdict;
  verdict.max_abs_err = largest_error;
  verdict.rel_err = count ? static_cast<double>(wrong) / static_cast<double>(count) : 0;
  verdict.ok = wrong == 0;
  return verdict;
}

Verdict JudgePadding(const CompareStats& against_zeros) {
  Verdict verdict = Describe(against_zeros, 0);
  verdict.ok = against_zeros.count > 0 && against_zeros.mismatches == 0 && against_zeros.max_abs_err == 0;
  return verdict;
}

Verdict JudgeRerun(std::uint64_t first, std::uint64_t second) {
  Verdict verdict;
  verdict.ok = first == second;
  if (!verdict.ok) {  // a digest does not tell the size of the error
    verdict.max_abs_err = verdict.rel_err = std::numeric_limits<double>::quiet_NaN();
    verdict.mismatches = 1;
  }
  return verdict;
}

}  // namespace cppool::kernels
