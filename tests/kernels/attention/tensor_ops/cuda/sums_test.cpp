// Tests of Fill, Accumulate, SumRows, MaxRows, AddStrided, AddOffset, OffsetGradient and Merge on a GPU.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"

namespace cppool::kernels::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("Fill and Accumulate write all elements and none beyond the last") {
  if (!HaveDevice()) return;
  const Device device;
  for (const std::size_t count : {0u, 1u, 255u, 1003u}) {
    CAPTURE(count);
    std::mt19937 random(1);
    const Values from = Random(random, count + 1, Dtype::kFp32);
    const Buffer source = ToDevice(device, from, Dtype::kFp32),
                 to = Poisoned(device, count + 1, Dtype::kFp32);
    device.ops().Fill(to.get<float>(), 0.5f, static_cast<std::int64_t>(count), device.stream());
    device.ops().Accumulate({source.get(), Dtype::kFp32}, to.get<float>(), static_cast<std::int64_t>(count),
                            false, device.stream());
    const Values got = ToHost(device, to, count + 1, Dtype::kFp32);
    for (std::size_t i = 0; i < count; ++i) CHECK(got[i] == 0.5f + from[i]);
    CHECK(std::isnan(got[count]));
  }
}

TEST_CASE("SumRows sums rows in order") {
  if (!HaveDevice()) return;
  const Device device;
  constexpr std::size_t kRows = 37, kColumns = 301;
  std::mt19937 random(2);
  const Values from = Random(random, kRows * kColumns, Dtype::kFp32);
  Values want(kColumns);
  for (std::size_t i = 0; i < from.size(); ++i) want[i % kColumns] += from[i];
  const Buffer source = ToDevice(device, from, Dtype::kFp32), to = Poisoned(device, kColumns, Dtype::kFp32);
  device.ops().SumRows(source.get<float>(), kRows, kColumns, to.get<float>(), device.stream());
  CHECK(ToHost(device, to, kColumns, Dtype::kFp32) == want);
  device.ops().SumRows(source.get<float>(), 0, kColumns, to.get<float>(), device.stream());
  CHECK(ToHost(device, to, kColumns, Dtype::kFp32) == Values(kColumns));
}

TEST_CASE("MaxRows raises each column to its largest value") {
  if (!HaveDevice()) return;
  const Device device;
  constexpr std::size_t kRows = 1500, kColumns = 7;
  std::mt19937 random(6);
  const Values from = Random(random, kRows * kColumns, Dtype::kFp32);
  Values want(kColumns, 0);
  want[2] = 1e6f;
  const Buffer source = ToDevice(device, from, Dtype::kFp32), to = ToDevice(device, want, Dtype::kFp32);
  for (std::size_t i = 0; i < from.size(); ++i) want[i % kColumns] = std::max(want[i % kColumns], from[i]);
  device.ops().MaxRows(source.get<float>(), kRows, kColumns, to.get<float>(), device.stream());
  CHECK(ToHost(device, to, kColumns, Dtype::kFp32) == want);
}

TEST_CASE("AddStrided adds where its strides say, and nowhere else") {
  if (!HaveDevice()) return;
  const Device device;
  const Dtype dtype = GENERATE(Dtype::kFp32, Dtype::kBf16);
  constexpr std::size_t kExtent[4] = {2, 3, 5, 41}, kStrides[4] = {4000, 1100, 130, 3};
  std::mt19937 random(8);
  const Values from = Random(random, 2 * 3 * 5 * 41, dtype);
  Values want(8000, 1);
  const Buffer source = ToDevice(device, from, dtype), to = ToDevice(device, want, Dtype::kFp32);
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t rest = i, at = 0;
    for (int axis = 3; axis >= 0; --axis) {
      at += rest % kExtent[axis] * kStrides[axis];
      rest /= kExtent[axis];
    }
    want[at] += from[i];
  }
  device.ops().AddStrided(
      {{2, 3, 5, 41}, {source.get(), dtype}, {615, 205, 41, 1}, to.get<float>(), {4000, 1100, 130, 3}},
      device.stream());
  CHECK(ToHost(device, to, 8000, Dtype::kFp32) == want);
}

TEST_CASE("AddOffset adds an offset to lse without overflow") {
  if (!HaveDevice()) return;
  const Device device;
  const Values offset{0, 120, -kInfinity};
  const Values lse{-kInfinity, -kInfinity, -kInfinity, 2.5f, 100, 7, -300, 300, -300, 0, 120, 0};
  Values want;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double a = std::max(lse[i], offset[i % 3]), b = std::min(lse[i], offset[i % 3]);
    want.push_back(static_cast<float>(std::isinf(a) ? a : a + std::log1p(std::exp(b - a))));
  }
  const Buffer to = Poisoned(device, lse.size(), Dtype::kFp32);
  device.ops().AddOffset(4, 3, ToDevice(device, lse, Dtype::kFp32).get<float>(),
                         ToDevice(device, offset, Dtype::kFp32).get<float>(), to.get<float>(),
                         device.stream());
  CHECK(Difference(ToHost(device, to, lse.size(), Dtype::kFp32), want, 1e-6) == "");
}

TEST_CASE("OffsetGradient sums over rows with a token") {
  if (!HaveDevice()) return;
  const Device device;
  constexpr std::int64_t kRows = 3000;
  const Layout layout{{{0, 0, 1, 3}, {1, 0, 2500, 17}, {3, 0, 130, 2600}}, kRows, 1};
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
  const auto rows = device.ops().Rows(layout, device.stream());
  const Buffer gradient = Poisoned(device, 3, Dtype::kFp32);
  device.ops().OffsetGradient(*rows, 3, ToDevice(device, total, Dtype::kFp32).get<float>(),
                              ToDevice(device, delta, Dtype::kFp32).get<float>(),
                              ToDevice(device, offset, Dtype::kFp32).get<float>(), gradient.get<float>(),
                              device.stream());
  CHECK(Difference(ToHost(device, gradient, 3, Dtype::kFp32), Values(sum.begin(), sum.end()), 1e-5) == "");

  const Layout empty{{}, kRows, 1};
  const auto nothing = device.ops().Rows(empty, device.stream());
  device.ops().OffsetGradient(*nothing, 3, gradient.get<float>(), gradient.get<float>(),
                              gradient.get<float>(), gradient.get<float>(), device.stream());
  CHECK(ToHost(device, gradient, 3, Dtype::kFp32) == Values(3));
}

TEST_CASE("Accumulate adds a gradient of any dtype to a sum, or starts the sum") {
  if (!HaveDevice()) return;
  const Device device;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    std::mt19937 random(5);
    const Values from = Random(random, 1003, dtype);
    const Buffer source = ToDevice(device, from, dtype), to = Poisoned(device, 1003, Dtype::kFp32);
    device.ops().Accumulate({source.get(), dtype}, to.get<float>(), 1003, true, device.stream());
    CHECK(ToHost(device, to, 1003, Dtype::kFp32) == from);
    device.ops().Accumulate({source.get(), dtype}, to.get<float>(), 1003, false, device.stream());
    Values twice = from;
    for (float& x : twice) x *= 2;
    CHECK(ToHost(device, to, 1003, Dtype::kFp32) == twice);
  }
}

// The parts have lse around 300, rows that see no key in one part or in all, and rows without a token.
TEST_CASE("Merge merges partial outputs by their lse") {
  if (!HaveDevice()) return;
  const Device device;
  constexpr std::int64_t kRows = 300;
  constexpr int kHeads = 3;
  const Layout layout{{{0, 0, 200, 1}, {1, 0, 70, 210}}, kRows, 1};
  const auto rows = device.ops().Rows(layout, device.stream());
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32}) {
    for (const int parts : {1, 3}) {
      for (const bool offset : {false, true}) {
        for (const int dim : {64, 192}) {
          CAPTURE(static_cast<int>(dtype), parts, offset, dim);
          std::mt19937 random(6);
          const std::size_t vectors = kRows * kHeads, elements = vectors * static_cast<std::size_t>(dim);
          const Values offsets{299, 303, 250};
          std::vector<double> sum(vectors), want_out(elements);
          const Buffer accumulator = Poisoned(device, elements, Dtype::kFp32),
                       lse = Poisoned(device, vectors, Dtype::kFp32),
                       out = Poisoned(device, elements, Dtype::kFp32),
                       on_device = ToDevice(device, offsets, Dtype::kFp32);
          std::vector<bool> is_token(kRows);
          for (const Segment& segment : layout.segments) {
            for (std::int64_t i = 0; i < segment.length; ++i)
              is_token[static_cast<std::size_t>(segment.row + i)] = true;
          }
          for (int p = 0; p < parts; ++p) {
            Values part = Random(random, elements, dtype), part_lse = Random(random, vectors, Dtype::kFp32);
            for (std::size_t v = 0; v < vectors; ++v) {
              const bool blind = v % 17 == 0 || (v % 5 == 0 && p == 0);
              part_lse[v] = blind ? -kInfinity : 300 + part_lse[v];
              if (!is_token[v / kHeads]) part_lse[v] = std::nanf("");
              const double weight = blind ? 0 : std::exp(part_lse[v] - 300.0);
              sum[v] += weight;
              for (std::size_t d = v * static_cast<std::size_t>(dim);
                   d < (v + 1) * static_cast<std::size_t>(dim); ++d) {
                want_out[d] += weight * part[d];
                if (blind) part[d] = std::nanf("");  // must not be read
              }
            }
            const Buffer source = ToDevice(device, part, dtype),
                         source_lse = ToDevice(device, part_lse, Dtype::kFp32);
            MergeArgs args;
            args.rows = rows.get();
            args.heads = kHeads;
            args.dim = dim;
            args.part = {source.get(), dtype};
            args.part_lse = source_lse.get<float>();
            args.accumulator = parts == 1 ? nullptr : accumulator.get<float>();
            args.lse = lse.get<float>();
            args.out = {out.get(), Dtype::kFp32};
            args.softmax_offset = offset ? on_device.get<float>() : nullptr;
            args.first = p == 0;
            args.last = p + 1 == parts;
            device.ops().Merge(args, device.stream());
            device.Wait();
          }
          Values want(elements, std::nanf("")), want_lse(vectors, std::nanf(""));
          for (std::size_t v = 0; v < vectors; ++v) {
            if (!is_token[v / kHeads]) continue;
            want_lse[v] = sum[v] > 0 ? static_cast<float>(300 + std::log(sum[v])) : -kInfinity;
            const double whole = sum[v] + (offset ? std::exp(double{offsets[v % kHeads]} - 300) : 0);
            for (std::size_t d = v * static_cast<std::size_t>(dim);
                 d < (v + 1) * static_cast<std::size_t>(dim); ++d)
              want[d] = sum[v] > 0 ? static_cast<float>(want_out[d] / whole) : 0;
          }
          CHECK(Difference(ToHost(device, out, elements, Dtype::kFp32), want, 1e-4) == "");
          CHECK(Difference(ToHost(device, lse, vectors, Dtype::kFp32), want_lse, 1e-6) == "");
        }
      }
    }
  }
}

}  // namespace cppool::kernels::test
