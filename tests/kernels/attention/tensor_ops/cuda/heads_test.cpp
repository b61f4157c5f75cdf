// Tests that SplitHeads, MergeHeads and Round are exact on a GPU.
#include <cmath>

#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"

namespace cppool::kernels::test {
namespace {

std::size_t At(std::int64_t row, int head, int d, int heads, int dim) {
  return static_cast<std::size_t>((row * heads + head) * dim + d);
}

Values RoundOnHost(const Device& device, const Values& values, Dtype dtype) {
  return ToHost(device, ToDevice(device, values, dtype), values.size(), dtype);
}

}  // namespace

TEST_CASE("SplitHeads copies the heads of every part") {
  if (!HaveDevice()) return;
  const Device device;
  const std::vector<HeadRange> ranges{{0, 3}, {2, 2}, {4, 0}, {4, 1}};  // parts overlap and may be empty
  constexpr int kHeads = 5, kRows = 37;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    for (const int dim : {1, 6, 64, 192}) {
      CAPTURE(static_cast<int>(dtype), dim);
      std::mt19937 random(5);
      const Values from = Random(random, static_cast<std::size_t>(kRows * kHeads * dim), dtype);
      Values want;
      for (const HeadRange& range : ranges) {
        for (int row = 0; row < kRows; ++row) {
          for (int head = range.begin; head < range.begin + range.count; ++head) {
            for (int d = 0; d < dim; ++d) want.push_back(from[At(row, head, d, kHeads, dim)]);
          }
        }
      }
      const Buffer source = ToDevice(device, from, dtype), target = Poisoned(device, want.size(), dtype);
      device.ops().SplitHeads(kRows, kHeads, dim, ranges, {source.get(), dtype}, target.get(),
                              device.stream());
      CHECK(ToHost(device, target, want.size(), dtype) == want);
    }
  }
}

TEST_CASE("MergeHeads merges parts, and sums overlapping heads in fp32") {
  if (!HaveDevice()) return;
  const Device device;
  const std::vector<HeadRange> ranges{{0, 3}, {2, 2}, {2, 3}};
  constexpr int kHeads = 5, kRows = 41;
  for (const Dtype from_dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    for (const Dtype to_dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      for (const int dim : {1, 6, 64}) {
        CAPTURE(static_cast<int>(from_dtype), static_cast<int>(to_dtype), dim);
        std::mt19937 random(6);
        const Values from = Random(random, static_cast<std::size_t>(kRows * 8 * dim), from_dtype);
        Values want(static_cast<std::size_t>(kRows * kHeads * dim));
        std::size_t next = 0;
        for (const HeadRange& range : ranges) {
          for (int row = 0; row < kRows; ++row) {
            for (int head = range.begin; head < range.begin + range.count; ++head) {
              for (int d = 0; d < dim; ++d) want[At(row, head, d, kHeads, dim)] += from[next++];
            }
          }
        }
        const Buffer source = ToDevice(device, from, from_dtype),
                     target = Poisoned(device, want.size(), to_dtype);
        device.ops().MergeHeads(kRows, kHeads, dim, ranges, {source.get(), from_dtype},
                                {target.get(), to_dtype}, device.stream());
        CHECK(ToHost(device, target, want.size(), to_dtype) == RoundOnHost(device, want, to_dtype));
      }
    }
  }
}

TEST_CASE("Round rounds fp32 to nearest for every count and alignment") {
  if (!HaveDevice()) return;
  const Device device;
  for (const std::size_t count : {1u, 8u, 1003u, 4096u}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
      CAPTURE(count, static_cast<int>(dtype));
      std::mt19937 random(7);
      const Values from = Random(random, count + 1, Dtype::kFp32);
      const Buffer source = ToDevice(device, from, Dtype::kFp32);
      const Values want = RoundOnHost(device, from, dtype);
      for (const std::size_t skip : {0u, 1u}) {
        const Buffer target = Poisoned(device, count, dtype);
        device.ops().RoundSum({source.get<float>() + skip}, {target.get(), dtype},
                              static_cast<std::int64_t>(count), device.stream());
        const auto begin = want.begin() + static_cast<std::ptrdiff_t>(skip);
        CHECK(ToHost(device, target, count, dtype) ==
              Values(begin, begin + static_cast<std::ptrdiff_t>(count)));
      }
    }
  }
}

}  // namespace cppool::kernels::test
