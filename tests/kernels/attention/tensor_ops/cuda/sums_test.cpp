// Fill, Add, SumRows, AddOffset and OffsetGradient on a GPU.
#include <cmath>
#include <limits>

#include "tests/catch.h"
#include "tests/kernels/attention/families/sm80/reference.h"

namespace cppool::kernels::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("fp32 is filled and added up to the last element, and not beyond") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  for (const std::size_t count : {0u, 1u, 255u, 1003u}) {
    CAPTURE(count);
    std::mt19937 random(1);
    const Values from = Random(random, count + 1, Dtype::kFp32);
    const Buffer source = ToDevice(device, from, Dtype::kFp32),
                 to = Poisoned(device, count + 1, Dtype::kFp32);
    device.kernels().Fill(to.get<float>(), 0.5f, static_cast<std::int64_t>(count), device.stream());
    device.kernels().Add(source.get<float>(), to.get<float>(), static_cast<std::int64_t>(count),
                         device.stream());
    const Values got = ToHost(device, to, count + 1, Dtype::kFp32);
    for (std::size_t i = 0; i < count; ++i) CHECK(got[i] == 0.5f + from[i]);
    CHECK(std::isnan(got[count]));
  }
}

TEST_CASE("rows are summed in order") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  constexpr std::size_t kRows = 37, kColumns = 301;
  std::mt19937 random(2);
  const Values from = Random(random, kRows * kColumns, Dtype::kFp32);
  Values want(kColumns);
  for (std::size_t i = 0; i < from.size(); ++i) want[i % kColumns] += from[i];
  const Buffer source = ToDevice(device, from, Dtype::kFp32), to = Poisoned(device, kColumns, Dtype::kFp32);
  device.kernels().SumRows(source.get<float>(), kRows, kColumns, to.get<float>(), device.stream());
  CHECK(ToHost(device, to, kColumns, Dtype::kFp32) == want);
  device.kernels().SumRows(source.get<float>(), 0, kColumns, to.get<float>(), device.stream());
  CHECK(ToHost(device, to, kColumns, Dtype::kFp32) == Values(kColumns));
}

TEST_CASE("an offset is added to the logarithm of a sum without overflow") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  KernelShape shape;
  shape.heads = 3;
  const Values offset{0, 120, -kInfinity};
  const Values lse{-kInfinity, -kInfinity, -kInfinity, 2.5f, 100, 7, -300, 300, -300, 0, 120, 0};
  Values want;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double a = std::max(lse[i], offset[i % 3]), b = std::min(lse[i], offset[i % 3]);
    want.push_back(static_cast<float>(std::isinf(a) ? a : a + std::log1p(std::exp(b - a))));
  }
  const Buffer to = Poisoned(device, lse.size(), Dtype::kFp32);
  device.kernels().AddOffset(shape, 4, ToDevice(device, lse, Dtype::kFp32).get<float>(),
                             ToDevice(device, offset, Dtype::kFp32).get<float>(), to.get<float>(),
                             device.stream());
  CHECK(Difference(ToHost(device, to, lse.size(), Dtype::kFp32), want, 1e-6) == "");
}

TEST_CASE("an offset's gradient is summed over the tokens of a plan") {
  if (!HaveDevice()) {
    WARN("skipped: no GPU");
    return;
  }
  const Device device;
  KernelShape shape;
  shape.heads = 3;
  constexpr std::int64_t kRows = 3000;
  const Layout layout{{{0, 0, 1, 3}, {1, 0, 2500, 17}, {3, 0, 130, 2600}}, kRows, 1};
  const std::vector<Band> bands(4, Band{-kOpen, kOpen});
  std::mt19937 random(4);
  Values total = Random(random, kRows * 3, Dtype::kFp32), delta = Random(random, kRows * 3, Dtype::kFp32);
  const Values offset = Random(random, 3, Dtype::kFp32);
  std::vector<double> sum(3);
  std::vector<bool> is_token(kRows);
  for (const Segment& segment : layout.segments)
    for (std::int64_t i = 0; i < segment.length; ++i)
      is_token[static_cast<std::size_t>(segment.row + i)] = true;
  for (std::size_t i = 0; i < total.size(); ++i) {
    if (is_token[i / 3]) {
      sum[i % 3] -= std::exp(static_cast<double>(offset[i % 3]) - total[i]) * delta[i];
    } else {
      total[i] = delta[i] = std::nanf("");
    }
  }
  const auto plan = device.kernels().Plan(shape, layout, layout, bands, false, device.stream());
  const Buffer gradient = Poisoned(device, 3, Dtype::kFp32);
  device.kernels().OffsetGradient(shape, plan.get(), ToDevice(device, total, Dtype::kFp32).get<float>(),
                                  ToDevice(device, delta, Dtype::kFp32).get<float>(),
                                  ToDevice(device, offset, Dtype::kFp32).get<float>(), gradient.get<float>(),
                                  device.stream());
  CHECK(Difference(ToHost(device, gradient, 3, Dtype::kFp32), Values(sum.begin(), sum.end()), 1e-5) == "");

  const Layout empty{{}, kRows, 1};
  const auto nothing = device.kernels().Plan(shape, empty, layout, bands, false, device.stream());
  device.kernels().OffsetGradient(shape, nothing.get(), gradient.get<float>(), gradient.get<float>(),
                                  gradient.get<float>(), gradient.get<float>(), device.stream());
  CHECK(ToHost(device, gradient, 3, Dtype::kFp32) == Values(3));
}

}  // namespace cppool::kernels::test
