#include "kernels/attention/judge.h"

#include <algorithm>
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
// The two runs round P and dS to the dtype at different running maxima and add blocks in another order: each
// a relative difference of a fraction of the unit roundoff (2^-8 and 2^-11), independent from element to
// element. These are 2.5 and 4 unit roundoffs.
constexpr double kBf16Rms = 1e-2;
constexpr double kFp16Rms = 2e-3;
// fp32 logarithms of sums that are added in another order.
constexpr double kLseAbsolute = 1e-4;
constexpr double kLseRelative = 1e-5;

// max_logit is exact but for the fp32 sums of one dot product, whose terms add up to less than 10 in absolute
// value at the usual scale, and of the bias: the products are exact, and a tensor core may cut off what a sum of
// 16 of them leaves below its last place. The same, in relation to the logit, at other scales. Keys that are
// left out, or seen in excess, change it by far more.
constexpr double kMaxLogitAbsolute = 1e-5;
constexpr double kMaxLogitRelative = 1e-5;

// FlashAttention's tests: twice the error of plain attention for the output, three times for gradients.
constexpr double kOutFactor = 2;
constexpr double kGradientFactor = 3;
// Each of two right runs may have plain attention's error.
constexpr double kTwoRuns = 2;
// Plain attention's logits are rounded to the dtype, ours are not: over all cells of the suite our lse has at most 2 % of
// its error. A window that is one key too wide changes lse by less than that error from some 2000 keys on.
constexpr double kLseFactor = 0.25;
// lse is fp32: a few roundings of the largest logit, when plain attention happens to have no error at all.
constexpr double kLseFloor = 1e-5;

// Where the exact gradient is 0 because a query sees one key, dP - delta is a difference of two equal sums of
// fp32 products: a few units of 2^-24 of |dP| <~ 16, times the usual scale and |k| <= 2. Far below the RMS of any
// other gradient, down to 1M keys.
constexpr double kNoise = 1e-5;
// The error that the rounding of `out` makes in a row's delta, in units of the roundoff: a sum over the head dimension.
constexpr double kDeltaError = 4;

// d_softmax_offset is one sum over all queries for each head. The terms' errors come from the rounding of `out`,
// as large as those of other gradients in relation to a term; but a head's sum may happen to cancel, and where
// there are few heads, all of theirs: the chance that n of them are all below a fraction x of their standard
// deviation is x^n. So few heads get a wider limit: a third for one head in bf16, 3 % for 16.
double CancellationFactor(std::uint64_t heads) {
  return 1 + 32 / static_cast<double>(std::max<std::uint64_t>(heads, 1));
}

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
  }
  throw RuntimeError(CPPOOL_INTERNAL, "judge: unknown dtype");
}

// Plain attention's error measures ours only as far as both are large samples. The elements of a row share the error of
// its delta (ours of the rounded `out`, plain's of the rounded P), so that those of two tokens are one sample, and of
// two single samples one is often many times the other.
double FewSamplesFactor(std::uint64_t elements) {
  return 1 + 256 / static_cast<double>(std::max<std::uint64_t>(elements, 1));
}

// dq and dk: delta is of the rounded `out`, and its error is shared by all of a row. Where the terms dP - delta cancel
// it is all that is left, while plain attention may by chance have none: where there are few samples, or where a large
// scale leaves each query one key.
//
// dbias is a gradient like the others: single terms P * (dP - delta) of about 4 / keys, whose errors (fp32, and
// delta's from the rounding of `out`) are a fraction of the unit roundoff, so that the limit on the RMS shows a
// rank's part that is missing or there twice. The noise of a sum grows as that of independent terms.
double NoiseOf(CheckedTensor tensor, Dtype dtype, const GradientTerms& terms, std::uint64_t elements) {
  if (tensor == CheckedTensor::kDbias) return kNoise * std::sqrt(terms.summed);
  if (tensor ==
      CheckedTensor::kDsoftmaxOffset) {  // each delta's error, times the offset's share of the query
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

double Rms(double sum_sq, std::uint64_t count) {
  return count ? std::sqrt(sum_sq / static_cast<double>(count)) : 0;
}

// With a reference that is zero throughout, the error is put in relation to the noise, so that it stays
// finite.
double RelativeError(const CompareStats& stats) {
  const double error = Rms(stats.sum_sq_err, stats.count);
  const double reference = Rms(stats.sum_sq_ref, stats.count);
  return error == 0 ? 0 : error / (reference > 0 ? reference : kNoise);
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
  switch (tensor) {
    case CheckedTensor::kOut:
      return "out";
    case CheckedTensor::kLse:
      return "lse";
    case CheckedTensor::kDq:
      return "dq";
    case CheckedTensor::kDk:
      return "dk";
    case CheckedTensor::kDv:
      return "dv";
    case CheckedTensor::kDbias:
      return "dbias";
    case CheckedTensor::kDsoftmaxOffset:
      return "d_softmax_offset";
    case CheckedTensor::kMaxLogit:
      return "max_logit";
  }
  return "?";
}

Dtype JudgedDtype(CheckedTensor tensor, const TensorDtypes& dtypes) {
  switch (tensor) {
    case CheckedTensor::kOut:
    case CheckedTensor::kLse:
    case CheckedTensor::kDsoftmaxOffset:  // its noise is that of delta, which is of the rounded out
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
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "judge: no tolerance for this dtype");
}

Verdict JudgeNoCp(CheckedTensor tensor, Dtype dtype, bool gqa, const CompareStats& stats,
                  const CompareStats& plain, const GradientTerms& terms) {
  const NoCpTolerance tolerance = ToleranceNoCp(tensor, dtype, gqa);
  double rms = tolerance.rms;
  const double noise = NoiseOf(tensor, dtype, terms, stats.count);
  // lse and max_logit are fp32, and plain attention's are not.
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
  // An infinite limit would be NaN times a reference of 0.
  const bool rms_holds = fp32 || Rms(stats.sum_sq_err, stats.count) <=
                                     std::max(rms * Rms(stats.sum_sq_ref, stats.count), plain_rms) + noise;
  verdict.ok = stats.count > 0 && stats.mismatches == 0 && holds && rms_holds;
  return verdict;
}

Verdict JudgeOracle(CheckedTensor tensor, Dtype dtype, const CompareStats& ours, const CompareStats& plain,
                    const CompareStats& plain_here, const GradientTerms& terms) {
  double floor = 0;
  double factor = IsGradient(tensor) ? kGradientFactor : kOutFactor;
  double rms_floor = std::numeric_limits<double>::infinity();  // of what has one value for each head: none
  if (tensor == CheckedTensor::kLse) {
    floor = rms_floor = kLseFloor * std::max(1.0, ours.max_abs_ref);
    factor = kLseFactor;
  } else if (tensor == CheckedTensor::kMaxLogit) {
    floor = kMaxLogitAbsolute + kMaxLogitRelative * ours.max_abs_ref;
    factor = 0;  // plain attention rounds it to the dtype
  } else {
    // One rounding of the largest element: the error that even a perfect kernel makes when it stores its
    // result.
    floor = UnitRoundoff(dtype) * ours.max_abs_ref;
    // Plain attention's few sums may happen to have no error.
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
  // Plain attention's own logits may overflow, of inputs that are given; what is left of it is the measure.
  verdict.ok = ours.count > 0 && ours.mismatches == 0 && plain.count > 0 &&
               ours.max_abs_err <= verdict.tolerance && rms_holds;
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
  if (!verdict.ok) {  // by how much is not known
    verdict.max_abs_err = verdict.rel_err = std::numeric_limits<double>::quiet_NaN();
    verdict.mismatches = 1;
  }
  return verdict;
}

}  // namespace cppool::kernels
