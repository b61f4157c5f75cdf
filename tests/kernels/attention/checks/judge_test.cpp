#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/checks/host_array.h"
#include "kernels/attention/judge.h"
#include "kernels/numerics/rounding.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/check_rank.h"
#include "tests/sanitized.h"

namespace cppool::kernels::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr CheckedTensor kAll[] = {CheckedTensor::kOut,
                                  CheckedTensor::kLse,
                                  CheckedTensor::kDq,
                                  CheckedTensor::kDk,
                                  CheckedTensor::kDv,
                                  CheckedTensor::kDbias,
                                  CheckedTensor::kDsoftmaxOffset,
                                  CheckedTensor::kMaxLogit};

CompareStats Stats(const std::vector<double>& a, const std::vector<double>& b, double relative = 0) {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const Buffer a_device = rank.Upload(a);
  const Buffer b_device = rank.Upload(b);
  CompareArgs args;
  args.a = {a_device.get(), Dtype::kFp64};
  args.b = {b_device.get(), Dtype::kFp64};
  args.rows = 1;
  args.columns = args.a_stride = args.b_stride = static_cast<std::int64_t>(a.size());
  args.relative = relative;
  return rank.Compare(args);
}

Verdict NoCp(CheckedTensor tensor, Dtype dtype, bool gqa, const std::vector<double>& a,
             const std::vector<double>& b, double summed = 1) {
  return JudgeNoCp(tensor, dtype, gqa, Stats(a, b, ToleranceNoCp(tensor, dtype, gqa).relative), {}, {summed});
}

// JudgeOracle when the rank holds the whole sample: plain attention's error on the rank is its error
// everywhere.
Verdict Oracle(CheckedTensor tensor, Dtype dtype, const CompareStats& ours, const CompareStats& plain,
               double summed = 1) {
  return JudgeOracle(tensor, dtype, ours, plain, plain, {summed});
}

// So many elements that FewSamplesFactor is nearly 1.
constexpr int kMany = 100000;

std::vector<double> Wave(double amplitude, int count = kMany) {
  std::vector<double> values;
  values.reserve(count);
  for (int i = 0; i < count; ++i) values.push_back(amplitude * std::sin(i));
  return values;
}

TEST_CASE("equal tensors pass the checks no_cp and oracle") {
  for (const CheckedTensor tensor : kAll) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      for (const double amplitude : {0.0, 1e-3, 1.0}) {
        CAPTURE(NameOf(tensor), amplitude);
        const Verdict verdict = NoCp(tensor, dtype, false, Wave(amplitude), Wave(amplitude));
        CHECK(verdict.ok);
        CHECK(verdict.rel_err == 0);
        CHECK(verdict.max_abs_err == 0);
        const CompareStats stats = Stats(Wave(amplitude), Wave(amplitude));
        CHECK(Oracle(tensor, dtype, stats, stats).ok);
      }
    }
  }
}

TEST_CASE("an all-zero dq fails, although its elements are below Transformer Engine's tolerance") {
  const std::vector<double> reference = Wave(3e-3);
  const std::vector<double> zero(reference.size(), 0.0);
  for (const CheckedTensor tensor :
       {CheckedTensor::kDq, CheckedTensor::kDk, CheckedTensor::kDv, CheckedTensor::kOut,
        CheckedTensor::kDbias, CheckedTensor::kDsoftmaxOffset}) {
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      const Verdict verdict = NoCp(tensor, dtype, true, zero, reference);
      CHECK(verdict.max_abs_err < verdict.tolerance);
      CHECK(Near(verdict.rel_err, 1, 1e-5));
      CHECK_FALSE(verdict.ok);
      if (tensor == CheckedTensor::kDbias) CHECK_FALSE(NoCp(tensor, dtype, true, zero, reference, 64).ok);
      CHECK_FALSE(Oracle(tensor, dtype, Stats(zero, reference), Stats(reference, reference)).ok);
    }
  }
  // Also with gradients as small as those of a million keys.
  CHECK_FALSE(NoCp(CheckedTensor::kDq, Dtype::kBf16, false, zero, Wave(2e-4)).ok);
}

TEST_CASE("no_cp: each element is limited by Transformer Engine's tolerances") {
  const auto one_off = [](CheckedTensor tensor, Dtype dtype, bool gqa, double at, double error) {
    std::vector<double> b(100000, 1.0);  // so many that one element hardly changes the RMS
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

TEST_CASE("no_cp: the RMS of the error is limited to a fraction of the reference's RMS") {
  for (const auto& [dtype, limit] : {std::pair{Dtype::kBf16, 0.01}, std::pair{Dtype::kFp16, 0.002}}) {
    for (const CheckedTensor tensor : {CheckedTensor::kOut, CheckedTensor::kDq}) {
      CHECK(NoCp(tensor, dtype, false, Wave(1 + 0.98 * limit), Wave(1)).ok);
      const Verdict verdict = NoCp(tensor, dtype, false, Wave(1 + 1.02 * limit), Wave(1));
      CHECK_FALSE(verdict.ok);
      CHECK(Near(verdict.rel_err, 1.02 * limit, 1e-5));
    }
  }
}

TEST_CASE("noise passes if the gradient is 0, and the relative error against a zero reference is finite") {
  const std::vector<double> zero(kMany, 0.0);
  CHECK(NoCp(CheckedTensor::kDq, Dtype::kBf16, false, Wave(1e-6), zero).ok);
  CHECK(NoCp(CheckedTensor::kDq, Dtype::kBf16, false, Wave(1e-6), Wave(-1e-6)).ok);
  CHECK(Oracle(CheckedTensor::kDq, Dtype::kBf16, Stats(Wave(1e-6), zero), Stats(zero, zero)).ok);
  const Verdict verdict = NoCp(CheckedTensor::kDq, Dtype::kBf16, false, Wave(1e-3), zero);
  CHECK_FALSE(verdict.ok);
  CHECK(std::isfinite(verdict.rel_err));
  CHECK(verdict.rel_err > 1);
  CHECK_FALSE(Oracle(CheckedTensor::kDq, Dtype::kBf16, Stats(Wave(1e-3), zero), Stats(zero, zero)).ok);
}

TEST_CASE("lse: -inf on both sides is equal, and the tolerance is that of fp32") {
  const std::vector<double> b{8.5, -kInfinity, 7.25, 0.5};
  CHECK(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, b, b).ok);
  CHECK(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.50009, -kInfinity, 7.25, 0.50009}, b).ok);
  CHECK_FALSE(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.5, -kInfinity, 7.2504, 0.5}, b).ok);
  const Verdict mismatch = NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.5, -1e30, 7.25, 0.5}, b);
  CHECK_FALSE(mismatch.ok);
  CHECK(mismatch.mismatches == 1);
  CHECK_FALSE(NoCp(CheckedTensor::kLse, Dtype::kBf16, false, {8.5, -kInfinity, -kInfinity, 0.5}, b).ok);

  const CompareStats exact = Stats(b, b);
  CHECK(Oracle(CheckedTensor::kLse, Dtype::kBf16, Stats({8.50008, -kInfinity, 7.25, 0.5}, b), exact).ok);
  CHECK_FALSE(Oracle(CheckedTensor::kLse, Dtype::kBf16, Stats({8.5001, -kInfinity, 7.25, 0.5}, b), exact).ok);
}

TEST_CASE("oracle: the limit is twice plain attention's error for the output, three times for gradients") {
  const std::vector<double> exact = Wave(1);
  for (const CheckedTensor tensor :
       {CheckedTensor::kOut, CheckedTensor::kDq, CheckedTensor::kDk, CheckedTensor::kDv}) {
    const double factor = tensor == CheckedTensor::kOut ? 2 : 3;
    const CompareStats plain = Stats(Wave(1.1), exact);
    CHECK(Oracle(tensor, Dtype::kFp16, Stats(Wave(1 + 0.1 * factor), exact), plain).ok);
    CHECK_FALSE(Oracle(tensor, Dtype::kFp16, Stats(Wave(1 + 0.1 * factor + 0.002), exact), plain).ok);
    // The lower bound of the limit: one rounding of the largest element.
    const CompareStats lucky = Stats(exact, exact);
    CHECK(Oracle(tensor, Dtype::kFp16, Stats(Wave(1 + 0.9 * 0x1p-11), exact), lucky).ok);
    CHECK_FALSE(Oracle(tensor, Dtype::kFp16, Stats(Wave(1 + 1.1 * 0x1p-11), exact), lucky).ok);
    CHECK(Oracle(tensor, Dtype::kBf16, Stats(Wave(1 + 0.9 * 0x1p-8), exact), lucky).ok);
    CHECK_FALSE(Oracle(tensor, Dtype::kBf16, Stats(Wave(1 + 1.1 * 0x1p-8), exact), lucky).ok);
  }
}

TEST_CASE(
    "oracle: the RMS of the error is limited, so that one large error of plain attention does not hide many "
    "errors") {
  const std::vector<double> exact = Wave(1);
  std::vector<double> one_large = exact;
  one_large[0] += 0.1;
  const CompareStats plain = Stats(one_large, exact);
  for (const CheckedTensor tensor :
       {CheckedTensor::kOut, CheckedTensor::kDq, CheckedTensor::kDv, CheckedTensor::kDbias}) {
    CHECK(Oracle(tensor, Dtype::kBf16, Stats(Wave(1.001), exact), plain).ok);
    const Verdict wrong = Oracle(tensor, Dtype::kBf16, Stats(Wave(1.05), exact), plain);
    CHECK(wrong.max_abs_err < wrong.tolerance);
    CHECK_FALSE(wrong.ok);
    // The larger RMS of plain attention's error counts: that on this rank's rows or that on all rows.
    const CompareStats everywhere = Stats(Wave(1.05), exact);
    CHECK(JudgeOracle(tensor, Dtype::kBf16, everywhere, everywhere, plain).ok);
    CHECK(JudgeOracle(tensor, Dtype::kBf16, everywhere, plain, everywhere).ok);
  }
}

TEST_CASE(
    "oracle: the limit for lse is a quarter of plain attention's error, to detect a window that is too "
    "wide") {
  const std::vector<double> exact = Wave(8);
  const CompareStats plain = Stats(Wave(8.02), exact);
  CHECK(Oracle(CheckedTensor::kLse, Dtype::kBf16, Stats(Wave(8.0049), exact), plain).ok);
  CHECK_FALSE(Oracle(CheckedTensor::kLse, Dtype::kBf16, Stats(Wave(8.0052), exact), plain).ok);
}

TEST_CASE("no_cp: an error below twice plain attention's error passes") {
  const std::vector<double> exact = Wave(1e-3);
  const CompareStats plain = Stats(Wave(1.1e-3), exact);
  const auto ok = [&](CheckedTensor tensor, const std::vector<double>& got, const CompareStats& allowed) {
    return JudgeNoCp(tensor, Dtype::kBf16, false,
                     Stats(got, exact, ToleranceNoCp(tensor, Dtype::kBf16, false).relative), allowed)
        .ok;
  };
  for (const CheckedTensor tensor : {CheckedTensor::kOut, CheckedTensor::kDq}) {
    CHECK_FALSE(ok(tensor, Wave(1.19e-3), {}));
    CHECK(ok(tensor, Wave(1.19e-3), plain));
    CHECK_FALSE(ok(tensor, Wave(1.25e-3), plain));
  }
  // Errors above Transformer Engine's tolerance, which occur with a large scale.
  std::vector<double> large = exact;
  large[3] += 0.2;
  CHECK_FALSE(ok(CheckedTensor::kDq, large, {}));
  CHECK(ok(CheckedTensor::kDq, large, Stats(large, exact)));
  CHECK_FALSE(ok(CheckedTensor::kLse, large, Stats(large, exact)));
}

TEST_CASE("limits on gradients are wider for a sample of two tokens") {
  for (const auto& [count, ok] : {std::pair{128, true}, std::pair{kMany, false}}) {
    const std::vector<double> exact = Wave(4e-4, count);
    const CompareStats lucky = Stats(exact, exact), ours = Stats(Wave(4.6e-4, count), exact);
    CHECK(JudgeOracle(CheckedTensor::kDq, Dtype::kFp16, ours, lucky, lucky).ok == ok);
    CHECK(JudgeNoCp(CheckedTensor::kDq, Dtype::kFp16, false, ours, lucky).ok == ok);
    CHECK_FALSE(JudgeOracle(CheckedTensor::kOut, Dtype::kFp16, ours, lucky, lucky).ok);
  }
}

TEST_CASE("one NaN fails, and so does a comparison of no elements") {
  const std::vector<double> exact = Wave(1);
  std::vector<double> poisoned = exact;
  poisoned[500] = std::numeric_limits<double>::quiet_NaN();
  for (const CheckedTensor tensor : kAll) {
    CHECK_FALSE(NoCp(tensor, Dtype::kBf16, false, poisoned, exact).ok);
    CHECK_FALSE(Oracle(tensor, Dtype::kBf16, Stats(poisoned, exact), Stats(exact, exact)).ok);
    // Plain attention's logits may overflow where ours do not; its finite elements give the limit.
    CHECK(Oracle(tensor, Dtype::kBf16, Stats(exact, exact), Stats(poisoned, exact)).ok);
    CHECK_FALSE(Oracle(tensor, Dtype::kBf16, Stats(exact, exact), {}).ok);
    CHECK_FALSE(JudgeNoCp(tensor, Dtype::kBf16, false, {}, {}).ok);
    CHECK_FALSE(Oracle(tensor, Dtype::kBf16, {}, {}).ok);
  }
}

// A sum of independent partial sums of ranks, like dbias and d_softmax_offset; each rank's partial sum is
// multiplied by its element of `weights`.
std::vector<double> Parts(const std::vector<int>& weights, std::size_t count, double amplitude) {
  std::uint64_t state = 1;
  std::vector<double> sum(count, 0);
  for (const int weight : weights) {
    for (double& x : sum) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x += weight * amplitude * (static_cast<double>(state >> 11) * 0x1p-52 - 1);
    }
  }
  return sum;
}

TEST_CASE("dbias: a rank's partial sum that is missing or added twice fails no_cp and oracle") {
  const int world_size = GENERATE(2, 4, 8);
  const double amplitude = GENERATE(3e-4, 1e-1);  // about that of one query over 8192 keys, and over few keys
  const std::vector<double> reference = Parts(std::vector<int>(world_size, 1), 4096, amplitude);
  for (const int weight : {0, 2}) {
    std::vector<int> weights(world_size, 1);
    weights.back() = weight;
    const std::vector<double> wrong = Parts(weights, 4096, amplitude);
    for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
      CAPTURE(world_size, amplitude, weight, static_cast<int>(dtype));
      CHECK_FALSE(NoCp(CheckedTensor::kDbias, dtype, false, wrong, reference).ok);
      const CompareStats plain =
          Stats(Parts(std::vector<int>(world_size, 1), 4096, amplitude * (1 + 0x1p-8)), reference);
      CHECK_FALSE(Oracle(CheckedTensor::kDbias, dtype, Stats(wrong, reference), plain).ok);
    }
  }
}

TEST_CASE("dbias: the noise allowed for a zero gradient grows with the number of terms in an element") {
  const std::vector<double> zero(kMany, 0.0);
  const auto ok = [&](double noise, double summed) {
    const CompareStats exact = Stats(zero, zero);
    const bool oracle =
        Oracle(CheckedTensor::kDbias, Dtype::kBf16, Stats(Wave(noise), zero), exact, summed).ok;
    CHECK(NoCp(CheckedTensor::kDbias, Dtype::kBf16, false, Wave(noise), zero, summed).ok == oracle);
    return oracle;
  };
  CHECK(ok(0.9e-5, 1));
  CHECK_FALSE(ok(3e-5, 1));
  CHECK(ok(9e-5, 100));
  CHECK_FALSE(ok(3e-4, 100));
}

constexpr double kNoNoise = 1e-20;  // each query sees so many keys that the offset has almost no weight

TEST_CASE(
    "d_softmax_offset: a partial sum that is missing or added twice fails, the rounding of `out` passes") {
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
    const double unit = dtype == Dtype::kFp16 ? 0x1p-11 : 0x1p-8;
    for (const std::size_t heads : {4, 16, 64}) {
      CAPTURE(static_cast<int>(dtype), heads);
      const std::vector<double> reference = Parts(std::vector<int>(8, 1), heads, 1e-4);
      const auto verdicts = [&](const std::vector<double>& got) {
        const CompareStats plain = Stats(Parts(std::vector<int>(8, 1), heads, 1e-4 * (1 + unit)), reference);
        return std::pair{
            NoCp(CheckedTensor::kDsoftmaxOffset, dtype, false, got, reference, kNoNoise).ok,
            Oracle(CheckedTensor::kDsoftmaxOffset, dtype, Stats(got, reference), plain, kNoNoise).ok};
      };
      for (const int weight : {0, 2}) {
        CHECK((verdicts(Parts({weight, 1, 1, 1, 1, 1, 1, 1}, heads, 1e-4)) == std::pair{false, false}));
      }
      CHECK((verdicts(std::vector<double>(heads, 0.0)) == std::pair{false, false}));
      // An error of one rounding of a term passes, independent of the sum of the head.
      std::vector<double> rounded = reference;
      for (std::size_t h = 0; h < heads; ++h) rounded[h] += (h % 2 ? 1 : -1) * unit / 2 * 1e-4;
      CHECK((verdicts(rounded) == std::pair{true, true}));
    }
  }
  CHECK_FALSE(NoCp(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, false, {0}, {1e-9}, kNoNoise).ok);
  // The sum of one head may cancel by chance, those of 64 heads do not all cancel.
  CHECK(NoCp(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, false, {0.0312}, {0.03}, kNoNoise).ok);
  const std::vector<double> many = Parts({1}, 64, 0.03);
  std::vector<double> off = many;
  for (double& x : off) x *= 1.04;
  CHECK_FALSE(NoCp(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, false, off, many, kNoNoise).ok);
  // If the sums of all heads cancel, the limit is plain attention's error.
  const std::vector<double> nothing = {1e-6};
  const CompareStats apart = Stats({1e-6 + 0.0047}, nothing), plain = Stats({1e-6 + 0.0028}, nothing),
                     lucky = Stats({1e-6 + 0.0017}, nothing);
  const auto no_cp = [&](const CompareStats& limit) {
    return JudgeNoCp(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, false, apart, limit, {kNoNoise}).ok;
  };
  CHECK(no_cp(plain));
  CHECK_FALSE(no_cp(lucky));
  CHECK_FALSE(no_cp({}));
  CHECK(Oracle(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, apart, lucky, kNoNoise).ok);
  // If plain attention has no error by chance, the limit is the error of the deltas of all queries.
  CHECK(JudgeNoCp(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, false, apart, {}, {0.1}).ok);
  CHECK_FALSE(JudgeNoCp(CheckedTensor::kDsoftmaxOffset, Dtype::kBf16, false, apart, {}, {0.05}).ok);
}

TEST_CASE("max_logit: only fp32 rounding errors pass, independent of plain attention's error") {
  const std::vector<double> exact{3.5, -kInfinity, -0.25, 60};
  const CompareStats plain = Stats({3.52, -kInfinity, -0.251, 60.25}, exact);
  const auto ok = [&](const std::vector<double>& got) {
    const bool oracle = Oracle(CheckedTensor::kMaxLogit, Dtype::kBf16, Stats(got, exact), plain).ok;
    CHECK(NoCp(CheckedTensor::kMaxLogit, Dtype::kBf16, false, got, exact).ok == oracle);
    return oracle;
  };
  CHECK(ok({3.500005, -kInfinity, -0.250005, 60.0003}));
  CHECK_FALSE(ok({3.502, -kInfinity, -0.25, 60}));
  CHECK_FALSE(ok({3.5, -kInfinity, -0.25, 59.998}));
  CHECK_FALSE(ok({3.5, -30, -0.25, 60}));
  CHECK_FALSE(ok({3.5, -kInfinity, -kInfinity, 60}));
}

TEST_CASE("fp8: the bound holds always, and statistics from kFp8Samples elements on, from both sides") {
  const auto off = [](double error, double gain, int count) {
    std::vector<double> exact = Wave(1, count), values = exact;
    for (int i = 0; i < count; ++i) values[i] = gain * exact[i] + error * ((i / 3) % 2 == 0 ? 1 : -1);
    CompareStats stats = Stats(values, exact);
    stats.max_of_bound = 0.5;
    return stats;
  };
  constexpr int kFew = 1000;
  const CompareStats plain = off(0.025, 1, kMany);
  const auto judge = [&](double error, double gain, int count = kMany) {
    return JudgeFp8(off(error, gain, count), plain).ok;
  };
  CHECK(judge(0.025, 1));
  CHECK(judge(0.031, 1));
  CHECK_FALSE(judge(0.036, 1));  // more than 1.25 times and the floor
  CHECK(judge(0.018, 1));
  CHECK_FALSE(judge(0.017, 1));  // a cast was left out
  CHECK(judge(0.022, 1.015));
  CHECK_FALSE(judge(0.005, 1.025));  // too large altogether
  CHECK_FALSE(judge(0.005, 0.975));
  for (const double error : {0.0, 0.017, 0.1}) CHECK(judge(error, 1, kFew));
  CompareStats beyond = off(0.025, 1, kFew);
  beyond.max_of_bound = 1.01;
  CHECK_FALSE(JudgeFp8(beyond, plain).ok);
  CompareStats nan = off(0.025, 1, kMany);
  nan.mismatches = 1;
  CHECK_FALSE(JudgeFp8(nan, plain).ok);
  CHECK_FALSE(JudgeFp8({}, plain).ok);
  // dq that is noise: no statistics, but nothing above the noise.
  CompareStats noise = off(4, 1, kMany), larger = noise;
  noise.max_abs_ref = noise.max_abs_err = 1e-6;
  larger.max_abs_ref = 1e-6, larger.max_abs_err = 2e-5;
  CHECK(JudgeFp8(noise, plain, {true, false}).ok);
  CHECK_FALSE(JudgeFp8(noise, plain).ok);
  CHECK_FALSE(JudgeFp8(larger, plain, {true, false}).ok);
  // Two keys in a block.
  CHECK(JudgeFp8(off(0.3 * 0.03, 1, kMany), plain, {false, true}).ok);
  CHECK_FALSE(JudgeFp8(off(0.3 * 0.03, 1, kMany), plain).ok);
  CHECK_FALSE(JudgeFp8(off(0.2 * 0.03, 1, kMany), plain, {false, true}).ok);

  // Against the run without CP, where the oracle has seen `ours`.
  CompareStats ours = off(0.025, 1, kMany);
  ours.largest_bound = 0.1;
  CHECK(JudgeFp8NoCp(off(0.048, 1, kMany), ours, plain, plain).ok);
  CHECK_FALSE(JudgeFp8NoCp(off(0.054, 1, kMany), ours, plain, plain).ok);
  ours.largest_bound = 0.009;
  CHECK_FALSE(JudgeFp8NoCp(off(0.02, 1, kMany), ours, plain, plain).ok);  // beyond twice the bound
  ours.count = kFew;                                                      // not all elements have a bound
  CHECK(JudgeFp8NoCp(off(0.02, 1, kMany), ours, plain, plain).ok);
  CHECK_FALSE(JudgeFp8NoCp(off(0.6, 1, kFew), ours, plain, plain).ok);
  // The heads of the sample are smaller than others.
  CompareStats small = plain;
  small.sum_sq_err /= 1e6;
  small.sum_sq_ref /= 1e6;
  CHECK(JudgeFp8NoCp(off(0.048, 1, kMany), ours, small, small).ok);
  CHECK_FALSE(JudgeFp8NoCp(off(0.054, 1, kMany), ours, small, small).ok);
  // This rank's rows have larger errors than all rows have.
  CompareStats exacter = plain;
  exacter.sum_sq_err /= 100;
  CHECK(JudgeFp8NoCp(off(0.048, 1, kMany), ours, plain, exacter).ok);
  CHECK_FALSE(JudgeFp8NoCp(off(0.048, 1, kMany), ours, exacter, exacter).ok);

  CHECK(JudgeBits(0, 10, 0).ok);
  CHECK_FALSE(JudgeBits(1, 10, 0).ok);
}

// A gradient of one head under a causal mask, whose rows become smaller towards the last key, and what a rank
// has of it.
struct Gradient {
  static constexpr std::int64_t kDim = 64;
  std::vector<double> exact, ours;
  explicit Gradient(std::int64_t keys) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal(0, 0.577);
    for (std::int64_t key = 0; key < keys; ++key) {
      const double size = std::sqrt(1 / (key + 1.0) - 1 / (keys + 1.0));
      for (std::int64_t d = 0; d < kDim; ++d) {
        exact.push_back(size * normal(random));
        ours.push_back(RoundTo(Dtype::kBf16, exact.back() * (1 + 1e-3 * normal(random))));
      }
    }
  }
  double* Row(std::int64_t from_end) {
    return &ours[ours.size() - static_cast<std::size_t>(from_end * kDim)];
  }
  void Zero(std::int64_t from_end, std::int64_t rows) { std::fill_n(Row(from_end), rows * kDim, 0.0); }

  struct Judged {
    bool whole;
    double last;
  };
  Judged Judge(const CheckRank& rank, CheckedTensor tensor) const {
    const Buffer a = rank.Upload(ours), b = rank.Upload(exact);
    CompareArgs args;
    args.a = {a.get(), Dtype::kFp64}, args.b = {b.get(), Dtype::kFp64};
    args.columns = args.a_stride = args.b_stride = kDim;
    args.rows = static_cast<std::int64_t>(exact.size()) / kDim;
    args.relative = ToleranceNoCp(tensor, Dtype::kBf16, false).relative;
    const HostArray<BlockStats> blocks(rank.rt(), static_cast<std::size_t>(args.RowBlocks()));
    args.blocks = blocks.begin();
    const CompareStats stats = rank.Compare(args);
    double worst = 0;
    for (const BlockStats& block : blocks)
      worst = std::max(worst, JudgeBlock(tensor, Dtype::kBf16, block, nullptr, nullptr, {}));
    const double last = JudgeBlock(tensor, Dtype::kBf16, *(blocks.end() - 1), nullptr, nullptr, {});
    CHECK(worst == last);
    return {JudgeNoCp(tensor, Dtype::kBf16, false, stats, {}).ok, last};
  }
};

TEST_CASE("rows that are missing at the end of a gradient fail their block, if not the tensor") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  for (const CheckedTensor tensor : {CheckedTensor::kDk, CheckedTensor::kDv}) {
    for (const std::int64_t keys : {512, 4096, 16384, 65536}) {
      if (cppool::test::kSanitized && keys > 4096) break;  // has several blocks; more take ten times as long
      for (const std::int64_t rows : {64, 8, 1}) {
        CAPTURE(NameOf(tensor), keys, rows);
        Gradient zero(keys), before(keys);
        zero.Zero(rows, rows);
        std::copy_n(before.Row(2 * rows), rows * Gradient::kDim, before.Row(rows));
        for (const Gradient& gradient : {zero, before}) {
          const Gradient::Judged judged = gradient.Judge(rank, tensor);
          CHECK(judged.last > 1.2);
          if (rows < 64 || keys > 512) CHECK(judged.whole);
        }
      }
    }
  }
}

BlockStats Block(double rms_error, double largest_error, double rms, double largest) {
  constexpr double kCount = 4096;
  return {largest_error, largest, rms_error * rms_error * kCount, rms * rms * kCount,
          static_cast<std::uint64_t>(kCount)};
}

TEST_CASE(
    "a block's limits are 8 roundings, 4 times plain attention's error, and 2 roundings of what cancels") {
  constexpr double kBf16 = 0x1p-8, kFp16 = 0x1p-11;
  const auto judge = [](const BlockStats& block, const BlockStats* plain = nullptr,
                        const BlockStats* values = nullptr, Dtype dtype = Dtype::kBf16) {
    GradientTerms terms;
    terms.of_values = 0.5;
    return JudgeBlock(CheckedTensor::kDq, dtype, block, plain, values, terms);
  };
  CHECK(judge(Block(0, 0, 0, 0)) == 0);
  CHECK(judge(Block(1e-9, 1e-9, 0, 0)) > 1e20);
  CHECK(judge(Block(8 * kBf16, 0, 1, 4)) == Approx(1));
  CHECK(judge(Block(0, 8 * kBf16, 1, 1)) == Approx(1));
  CHECK(judge(Block(8 * kFp16, 0, 1, 1), nullptr, nullptr, Dtype::kFp16) == Approx(1).epsilon(1e-3));
  // Terms that become zero.
  CHECK(judge(Block(0x1p-20, 0x1p-20, 0, 0), nullptr, nullptr, Dtype::kFp16) == Approx(1));
  CHECK(judge(Block(0x1p-116, 0x1p-116, 0, 0)) == Approx(1));
  const BlockStats plain = Block(0.1, 0.3, 0, 0), values = Block(0, 0, 1, 3);
  CHECK(judge(Block(0.4, 0.3, 0, 0), &plain) == Approx(1));
  CHECK(judge(Block(0.1, 1.2, 0, 0), &plain) == Approx(1));
  CHECK(judge(Block(2 * kBf16 * 0.5, 0, 0, 0), nullptr, &values) == Approx(1));
  CHECK(judge(Block(0, 4 * kBf16 * 1.5, 0, 0), nullptr, &values) == Approx(1));
  // lse is fp32, and plain attention rounds its logits.
  CHECK(JudgeBlock(CheckedTensor::kLse, Dtype::kBf16, Block(1e-4, 0, 9, 10), nullptr, nullptr, {}) ==
        Approx(1));
  CHECK(JudgeBlock(CheckedTensor::kLse, Dtype::kBf16, Block(0.025, 0, 0, 0), &plain, nullptr, {}) ==
        Approx(1).epsilon(1e-3));
  // Sums of products of payloads have fewer bits.
  GradientTerms payloads;
  payloads.of_payloads = true;
  CHECK(JudgeBlock(CheckedTensor::kLse, Dtype::kBf16, Block(0, 10 * 0x1p-11, 9, 10), nullptr, nullptr,
                   payloads) == Approx(1));
  for (const CheckedTensor tensor : {CheckedTensor::kLse, CheckedTensor::kMaxLogit}) {
    const std::vector<double> exact = {4, 3}, near = {4.0018, 3}, far = {4.0021, 3};
    const auto ok = [&](const std::vector<double>& got, const GradientTerms& terms) {
      const CompareStats plain = Stats(exact, exact);
      return JudgeOracle(tensor, Dtype::kBf16, Stats(got, exact), plain, plain, terms).ok;
    };
    CHECK(ok(near, payloads));
    CHECK_FALSE(ok(far, payloads));
    CHECK_FALSE(ok(near, {}));
  }
  // dbias sums terms of several heads or sequences.
  GradientTerms four;
  four.summed = 4;
  CHECK(JudgeBlock(CheckedTensor::kDbias, Dtype::kBf16, Block(2e-5, 0, 0, 0), nullptr, nullptr, four) ==
        Approx(1));
  const auto fp8 = [](const BlockStats& block, const BlockStats* plain, const BlockStats* values = nullptr) {
    GradientTerms terms;
    terms.of_values = 0.5;
    return JudgeBlockFp8(block, plain, values, terms);
  };
  CHECK(fp8(Block(0.15, 0, 0, 0), &plain) == Approx(1));
  CHECK(fp8(Block(0, 0.9, 0, 0), &plain) == Approx(1));
  CHECK(fp8(Block(0.15 + 0.02, 0, 1, 1), &plain) == Approx(1));
  CHECK(fp8(Block(0, 0.9 + 0.1, 1, 1), &plain) == Approx(1));
  CHECK(fp8(Block(0.2, 0.2, 1, 1), nullptr) == Approx(1));
  CHECK(fp8(Block(0.1, 0.4, 1, 1), nullptr) == Approx(1));
  CHECK(fp8(Block(0x1p-17, 0x1p-17, 0, 0), nullptr, &values) == Approx(1));
}

TEST_CASE("padding passes only if it is exactly 0") {
  const std::vector<double> zero(10, 0.0);
  CHECK(JudgePadding(Stats(zero, zero)).ok);
  CHECK(JudgePadding(Stats(std::vector<double>(10, -0.0), zero)).ok);
  for (const double wrong : {1e-300, -1.0, kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    std::vector<double> values = zero;
    values[9] = wrong;
    CHECK_FALSE(JudgePadding(Stats(values, zero)).ok);
  }
  CHECK_FALSE(JudgePadding({}).ok);
}

TEST_CASE("a second run passes only if it has the digest of the first") {
  CHECK(JudgeRerun(7, 7).ok);
  CHECK_FALSE(JudgeRerun(7, 8).ok);
  CHECK(JudgeRerun(7, 8).mismatches == 1);
  CHECK(std::isnan(JudgeRerun(7, 8).max_abs_err));
}

TEST_CASE("the ratio is our error divided by the larger of plain attention's error and the floor") {
  const std::vector<double> exact(100, 1.0);
  const auto off = [&](double error) { return Stats(std::vector<double>(100, 1 + error), exact); };
  const double floor = 0x1p-11;
  CHECK(Near(Oracle(CheckedTensor::kOut, Dtype::kFp16, off(0.1), off(0.05)).ratio, 2, 1e-12));
  CHECK(Near(Oracle(CheckedTensor::kOut, Dtype::kFp16, off(0.1), off(0)).ratio, 0.1 / floor, 1e-12));
  CHECK(Oracle(CheckedTensor::kDq, Dtype::kFp16, off(0), off(0)).ratio == 0);
  CHECK(Oracle(CheckedTensor::kOut, Dtype::kFp16, Stats({0}, {0}), Stats({0}, {0})).ratio == 0);
  CHECK(NoCp(CheckedTensor::kOut, Dtype::kFp16, false, {1.001}, {1}).ratio == 0);
}

}  // namespace
}  // namespace cppool::kernels::test
