#include <algorithm>
#include <limits>
#include <set>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/numerics/rounding.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/values_case.h"

namespace cppool::kernels::test {
namespace {

TEST_CASE("a digest changes with every bit, every exchange of elements and every length") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const std::vector<std::uint16_t> values = SomeValues(41);  // not a whole number of words
  std::set<std::uint64_t> seen{DigestOf(rank, values)};
  std::size_t count = 1;
  const auto add = [&](const std::vector<std::uint16_t>& changed) {
    seen.insert(DigestOf(rank, changed));
    ++count;
  };
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (int bit = 0; bit < 16; ++bit) {
      auto changed = values;
      changed[i] = static_cast<std::uint16_t>(changed[i] ^ 1u << bit);
      add(changed);
    }
    for (std::size_t j = i + 1; j < values.size(); ++j) {
      auto changed = values;
      std::swap(changed[i], changed[j]);
      add(changed);
    }
  }
  for (std::size_t word = 1; word < 10; ++word) {  // of eight bytes
    auto changed = values;
    std::swap_ranges(changed.begin(), changed.begin() + 4,
                     changed.begin() + static_cast<std::ptrdiff_t>(word) * 4);
    add(changed);
  }
  for (std::size_t size = 0; size < 20; ++size) add(std::vector<std::uint16_t>(size, 0));
  CHECK(seen.size() == count);
}

TEST_CASE("a digest depends on the bits of the values, not on their address") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const std::vector<std::uint16_t> values = SomeValues(1000);
  for (const std::size_t offset : {1, 2, 3, 4}) {
    const std::vector<std::uint16_t> rest(values.begin() + static_cast<std::ptrdiff_t>(offset), values.end());
    CHECK(DigestOf(rank, values, offset) == DigestOf(rank, rest));
  }
  CHECK(DigestOf(rank, values) == DigestOf(rank, values));
  CHECK(DigestOf(rank, {0x8000}) != DigestOf(rank, {0}));  // -0 and 0
}

TEST_CASE("values are filled and rounded in place") {
  const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
  const std::vector<double> values{1.0 / 3, -1e-9, 1e30, 0, std::numeric_limits<double>::infinity(), 7.7};
  for (const Dtype dtype : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    const Buffer buffer = rank.Upload(values);
    rank.kernels().RoundValues(dtype, buffer.get<double>(), 5, rank.stream());
    const std::vector<double> rounded = rank.Download<double>(buffer);
    for (int i = 0; i < 5; ++i) CHECK(rounded[i] == RoundTo(dtype, values[i]));
    CHECK(rounded[5] == values[5]);
  }
  const Buffer buffer = rank.Upload(values);
  rank.kernels().FillValues(buffer.get<double>(), -2.5, 5, rank.stream());
  CHECK((rank.Download<double>(buffer) == std::vector<double>{-2.5, -2.5, -2.5, -2.5, -2.5, 7.7}));
}

}  // namespace
}  // namespace cppool::kernels::test
