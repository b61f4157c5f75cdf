#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "check_rank.h"
#include "kernels/attention/judge.h"
#include "kernels/host/check_kernels.h"

namespace cppool::kernels::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr CheckedTensor kAll[] = {CheckedTensor::kOut, CheckedTensor::kLse, CheckedTensor::kDq,
                                  CheckedTensor::kDk, CheckedTensor::kDv};

CompareStats Stats(const std::vector<double>& a, const std::vector<double>& b, double relative = 0) {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const Buffer a_device = rank.Upload(a);
  const Buffer b_device = rank.Upload(b);
  CompareArgs args;
  args.a = a_device.get();
  args.b = b_device.get();
  args.a_dtype = args.b_dtype = Dtype::kFp64;
  args.rows = 1;
  args.columns = args.a_stride = args.b_stride = static_cast<std::int64_t>(a.size());
  args.relative = relative;
  return rank.Compare(args);
}

Verdict NoCp(CheckedTensor tensor, Dtype dtype, bool gqa, const std::vector<double>& a,
             const std::vector<double>& b) {
  return JudgeNoCp(tensor, dtype, gqa, Stats(a, b, ToleranceNoCp(tensor, dtype, gqa).relative));
}

std::vector<double> Wave(double amplitude) {
  std::vector<double> values;
  for (int i = 0; i < 1000; ++i) values.push_back(amplitude * std::sin(i));
  return values;
}

TEST_CASE("equal tensors pass, against either reference") {
  for (const CheckedTensor tensor : kAll) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      for (const double amplitude : {0.0, 1e-3, 1.0}) {
        CAPTURE(NameOf(tensor), amplitude);
        const Verdict verdict = NoCp(tensor, dtype, false, Wave(amplitude), Wave(amplitude));
        CHECK(verdict.ok);
        CHECK(verdict.rel_err == 0);
        CHECK(verdict.max_abs_err == 0);
        const CompareStats stats = Stats(Wave(amplitude), Wave(amplitude));
        CHECK(JudgeOracle(tensor, dtype, stats, stats).ok);
      }
    }
  }
}

TEST_CASE("an all-zero dq fails, although its elements are below Transformer Engine's tolerance") {
  const std::vector<double> reference = Wave(3e-3);
  const std::vector<double> zero(reference.size(), 0.0);
  for (const CheckedTensor tensor :
       {CheckedTensor::kDq, CheckedTensor::kDk, CheckedTensor::kDv, CheckedTensor::kOut}) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      const Verdict verdict = NoCp(tensor, dtype, true, zero, reference);
      CHECK(verdict.max_abs_err < verdict.tolerance);
      CHECK(Near(verdict.rel_err, 1, 1e-5));
      CHECK_FALSE(verdict.ok);
      CHECK_FALSE(JudgeOracle(tensor, dtype, Stats(zero, reference), Stats(reference, reference)).ok);
    }
  }
  // Down to gradients of a million keys.
  CHECK_FALSE(NoCp(CheckedTensor::kDq, Dtype::kBf16, false, zero, Wave(2e-4)).ok);
}

TEST_CASE("no_cp: Transformer Engine's tolerances hold for each element") {
  const auto one_off = [](CheckedTensor tensor, Dtype dtype, bool gqa, double at, double error) {
    std::vector<double> b(100000, 1.0);  // so many that one element does not count in the RMS
    b[7] = at;
    std::vector<double> a = b;
    a[7] += error;
    return NoCp(tensor, dtype, gqa, a, b).ok;
  };
  struct Case {
    Dtype dtype;
    bool gqa;
    double tolerance;
  };
  for (const auto& [dtype, gqa, tolerance] :
       {Case{Dtype::kBf16, false, 2.5e-2}, Case{Dtype::kBf16, true, 3.5e-2}, Case{Dtype::kFp16, false, 5e-3},
        Case{Dtype::kFp16, true, 5e-3}}) {
    for (const CheckedTensor tensor :
         {CheckedTensor::kOut, CheckedTensor::kDq, CheckedTensor::kDk, CheckedTensor::kDv}) {
      for (const double at : {0.0, -1.0, 4.0}) {
        CHECK(one_off(tensor, dtype, gqa, at, 0.99 * tolerance * (1 + std::abs(at))));
        CHECK_FALSE(one_off(tensor, dtype, gqa, at, 1.01 * tolerance * (1 + std::abs(at))));
        CHECK_FALSE(one_off(tensor, dtype, gqa, at, -1.01 * tolerance * (1 + std::abs(at))));
      }
    }
  }
}

TEST_CASE("no_cp: the RMS of the error is limited to a part of the reference's") {
  for (const auto& [dtype, limit] : {std::pair{Dtype::kBf16, 0.01}, std::pair{Dtype::kFp16, 0.002}}) {
    for (const CheckedTensor tensor : {CheckedTensor::kOut, CheckedTensor::kDq}) {
      CHECK(NoCp(tensor, dtype, false, Wave(1 + 0.98 * limit), Wave(1)).ok);
      const Verdict verdict = NoCp(tensor, dtype, false, Wave(1 + 1.02 * limit), Wave(1));
      CHECK_FALSE(verdict.ok);
      CHECK(Near(verdict.rel_err, 1.02 * limit, 1e-5));
    }
  }
}

TEST_CASE(
    "noise where the gradient is 0 passes; a finite error against a zero reference is reported as finite") {
  const std::vector<double> zero(1000, 0.0);
  CHECK(NoCp(CheckedTensor::kDq, Dtype::kBf16, false, Wave(1e-6), zero).ok);
  CHECK(NoCp(CheckedTensor::kDq, Dtype::kBf16, false, Wave(1e-6), Wave(-1e-6)).ok);
  CHECK(JudgeOracle(CheckedTensor::kDq, Dtype::kBf16, Stats(Wave(1e-6), zero), Stats(zero, zero)).ok);
  const Verdict verdict = NoCp(CheckedTensor::kDq, Dtype::kBf16, false, Wave(1e-3), zero);
  CHECK_FALSE(verdict.ok);
  CHECK(std::isfinite(verdict.rel_err));
  CHECK(verdict.rel_err > 1);
  CHECK_FALSE(JudgeOracle(CheckedTensor::kDq, Dtype::kBf16, Stats(Wave(1e-3), zero), Stats(zero, zero)).ok);
}

TEST_CASE("lse: -inf on both sides is equal, and its tolerance is fp32's") {
  const std::vector<double> b{8.5, -kInfinity, 7.25, 0.5};
  CHECK(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, b, b).ok);
  CHECK(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.50009, -kInfinity, 7.25, 0.50009}, b).ok);
  CHECK_FALSE(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.5, -kInfinity, 7.2504, 0.5}, b).ok);
  const Verdict mismatch = NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.5, -1e30, 7.25, 0.5}, b);
  CHECK_FALSE(mismatch.ok);
  CHECK(mismatch.mismatches == 1);
  CHECK_FALSE(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.5, -kInfinity, -kInfinity, 0.5}, b).ok);

  const CompareStats exact = Stats(b, b);
  CHECK(JudgeOracle(CheckedTensor::kLse, Dtype::kBf16, Stats({8.50008, -kInfinity, 7.25, 0.5}, b), exact).ok);
  CHECK_FALSE(
      JudgeOracle(CheckedTensor::kLse, Dtype::kBf16, Stats({8.5001, -kInfinity, 7.25, 0.5}, b), exact).ok);
}

TEST_CASE("oracle: twice plain attention's error for the output, three times for gradients") {
  const std::vector<double> exact = Wave(1);
  for (const CheckedTensor tensor :
       {CheckedTensor::kOut, CheckedTensor::kDq, CheckedTensor::kDk, CheckedTensor::kDv}) {
    const double factor = tensor == CheckedTensor::kOut ? 2 : 3;
    const CompareStats plain = Stats(Wave(1.1), exact);
    CHECK(JudgeOracle(tensor, Dtype::kFp16, Stats(Wave(1 + 0.1 * factor), exact), plain).ok);
    CHECK_FALSE(JudgeOracle(tensor, Dtype::kFp16, Stats(Wave(1 + 0.1 * factor + 0.002), exact), plain).ok);
    // The floor: one rounding of the largest element.
    const CompareStats lucky = Stats(exact, exact);
    CHECK(JudgeOracle(tensor, Dtype::kFp16, Stats(Wave(1 + 0.9 * 0x1p-11), exact), lucky).ok);
    CHECK_FALSE(JudgeOracle(tensor, Dtype::kFp16, Stats(Wave(1 + 1.1 * 0x1p-11), exact), lucky).ok);
    CHECK(JudgeOracle(tensor, Dtype::kBf16, Stats(Wave(1 + 0.9 * 0x1p-8), exact), lucky).ok);
    CHECK_FALSE(JudgeOracle(tensor, Dtype::kBf16, Stats(Wave(1 + 1.1 * 0x1p-8), exact), lucky).ok);
  }
}

TEST_CASE("one NaN fails, and so does a comparison of nothing") {
  const std::vector<double> exact = Wave(1);
  std::vector<double> poisoned = exact;
  poisoned[500] = std::numeric_limits<double>::quiet_NaN();
  for (const CheckedTensor tensor : kAll) {
    CHECK_FALSE(NoCp(tensor, Dtype::kBf16, false, poisoned, exact).ok);
    CHECK_FALSE(JudgeOracle(tensor, Dtype::kBf16, Stats(poisoned, exact), Stats(exact, exact)).ok);
    CHECK_FALSE(JudgeOracle(tensor, Dtype::kBf16, Stats(exact, exact), Stats(poisoned, exact)).ok);
    CHECK_FALSE(JudgeNoCp(tensor, Dtype::kBf16, false, {}).ok);
    CHECK_FALSE(JudgeOracle(tensor, Dtype::kBf16, {}, {}).ok);
  }
}

}  // namespace
}  // namespace cppool::kernels::test
