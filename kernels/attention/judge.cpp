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
// lse is fp32: a few roundings of the largest logit, when plain attention happens to have no error at all.
constexpr double kLseFloor = 1e-5;

// Where the exact gradient is 0 because a query sees one key, dP - delta is a difference of two equal sums of
// fp32 products: a few units of 2^-24 of |dP| <~ 16, times the scale and |k| <= 2. Far below the RMS of any
// other gradient, down to 1M keys.
constexpr double kNoise = 1e-5;

// dbias is a gradient like the others: single terms P * (dP - delta) of about 4 / keys, whose errors (fp32, and
// delta's from the rounding of `out`) are a fraction of the unit roundoff, so that the limit on the RMS shows a
// rank's part that is missing or there twice. The noise of a sum grows as that of independent terms.
double NoiseOf(CheckedTensor tensor, double summed) {
  return tensor == CheckedTensor::kDbias ? kNoise * std::sqrt(summed) : kNoise;
}

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

NoCpTolerance ToleranceNoCp(CheckedTensor tensor, Dtype dtype, bool gqa) {
  if (tensor == CheckedTensor::kLse)
    return {kLseAbsolute, kLseRelative, std::numeric_limits<double>::infinity()};
  if (tensor == CheckedTensor::kMaxLogit)
    return {kMaxLogitAbsolute, kMaxLogitRelative, std::numeric_limits<double>::infinity()};
  if (dtype == Dtype::kBf16)
    return gqa ? NoCpTolerance{kBf16Gqa, kBf16Gqa, kBf16Rms} : NoCpTolerance{kBf16, kBf16, kBf16Rms};
  if (dtype == Dtype::kFp16) return {kFp16, kFp16, kFp16Rms};
  throw RuntimeError(CPPOOL_INTERNAL, "judge: no tolerance for this dtype");
}

Verdict JudgeNoCp(CheckedTensor tensor, Dtype dtype, bool gqa, const CompareStats& stats, double summed) {
  const NoCpTolerance tolerance = ToleranceNoCp(tensor, dtype, gqa);
  double rms = tolerance.rms;
  double noise = NoiseOf(tensor, summed);
  if (tensor == CheckedTensor::kDsoftmaxOffset) {
    rms *= CancellationFactor(stats.count);
    noise = 0;  // no term is a difference of two that are equal
  }
  Verdict verdict = Describe(stats, tolerance.absolute);
  // An infinite limit would be NaN times a reference of 0.
  const bool rms_holds = std::isinf(rms) || Rms(stats.sum_sq_err, stats.count) <=
                                                rms * Rms(stats.sum_sq_ref, stats.count) + noise;
  verdict.ok =
      stats.count > 0 && stats.mismatches == 0 && stats.max_excess <= tolerance.absolute && rms_holds;
  return verdict;
}

Verdict JudgeOracle(CheckedTensor tensor, Dtype dtype, const CompareStats& ours, const CompareStats& plain,
                    double summed) {
  double floor = 0;
  double factor = IsGradient(tensor) ? kGradientFactor : kOutFactor;
  if (tensor == CheckedTensor::kLse) {
    floor = kLseFloor * std::max(1.0, ours.max_abs_ref);
  } else if (tensor == CheckedTensor::kMaxLogit) {
    floor = kMaxLogitAbsolute + kMaxLogitRelative * ours.max_abs_ref;
    factor = 0;  // plain attention rounds it to the dtype
  } else {
    // One rounding of the largest element: the error that even a perfect kernel makes when it stores its
    // result.
    floor = UnitRoundoff(dtype) * ours.max_abs_ref;
    // Plain attention's few sums may happen to have no error.
    if (tensor == CheckedTensor::kDsoftmaxOffset)
      floor *= CancellationFactor(ours.count);
    else if (IsGradient(tensor))
      floor += NoiseOf(tensor, summed);
  }
  Verdict verdict = Describe(ours, factor * plain.max_abs_err + floor);
  const double yardstick = std::max(plain.max_abs_err, floor);
  verdict.ratio = yardstick > 0 ? ours.max_abs_err / yardstick : 0;
  verdict.ok = ours.count > 0 && ours.mismatches == 0 && plain.mismatches == 0 &&
               ours.max_abs_err <= verdict.tolerance;
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
