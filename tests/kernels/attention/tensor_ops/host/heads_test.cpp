// Tests of the host's TensorOps: splitting and merging heads for an all-to-all, and the element-wise
// operations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/attention/tensor_ops/host/tensor_ops.h"
#include "kernels/numerics/half.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/host/host_rank.h"
#include "tests/kernels/load_element.h"

namespace {

using namespace cppool::kernels;
using cppool::test::HostRank;

// Different for every (row, head, dim), and exact in fp16.
std::uint16_t Element(std::int64_t row, int head, int dim) {
  return FloatToFP16(static_cast<float>(row * 64 + head * 8 + dim));
}

std::vector<std::uint16_t> Rows(std::int64_t rows, int heads, int dim) {
  std::vector<std::uint16_t> values;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int head = 0; head < heads; ++head) {
      for (int d = 0; d < dim; ++d) values.push_back(Element(row, head, d));
    }
  }
  return values;
}

std::size_t Elements(std::int64_t rows, int dim, const std::vector<HeadRange>& ranges) {
  std::size_t count = 0;
  for (const HeadRange& range : ranges) count += static_cast<std::size_t>(rows * range.count * dim);
  return count;
}

TEST_CASE("SplitHeads writes the parts of the ranks one after another") {
  const auto ranges = GENERATE(std::vector<HeadRange>{{0, 2}, {2, 2}, {4, 2}}, std::vector<HeadRange>{{0, 6}},
                               std::vector<HeadRange>{{0, 3}, {2, 2}, {2, 4}, {5, 1}},
                               std::vector<HeadRange>{{3, 0}, {1, 1}});
  const std::int64_t rows = 5;
  const int heads = 6, dim = 4;
  const auto from = Rows(rows, heads, dim);
  std::vector<std::uint16_t> to(Elements(rows, dim, ranges), 0x7fff), want;
  for (const HeadRange& range : ranges) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int head = 0; head < range.count; ++head) {
        for (int d = 0; d < dim; ++d) want.push_back(Element(row, range.begin + head, d));
      }
    }
  }
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->SplitHeads(rows, heads, dim, ranges, {from.data(), Dtype::kFp16}, to.data(), rank.stream());
  rank.Synchronize();
  CHECK(to == want);

  // Also in fp32, the type of lse and delta.
  std::vector<float> wide(from.size()), wide_to(to.size()), wide_want(to.size());
  for (std::size_t i = 0; i < from.size(); ++i) wide[i] = FP16ToFloat(from[i]);
  for (std::size_t i = 0; i < want.size(); ++i) wide_want[i] = FP16ToFloat(want[i]);
  ops->SplitHeads(rows, heads, dim, ranges, {wide.data(), Dtype::kFp32}, wide_to.data(), rank.stream());
  rank.Synchronize();
  CHECK(wide_to == wide_want);
}

TEST_CASE("MergeHeads is the inverse of SplitHeads") {
  const auto ranges =
      GENERATE(std::vector<HeadRange>{{0, 2}, {2, 2}, {4, 2}}, std::vector<HeadRange>{{3, 3}, {0, 3}},
               std::vector<HeadRange>{{0, 1}, {1, 5}});
  const auto target = GENERATE(Dtype::kFp16, Dtype::kBf16, Dtype::kFp32);
  const std::int64_t rows = 7;
  const int heads = 6, dim = 3;
  const auto from = Rows(rows, heads, dim);
  std::vector<std::uint16_t> parts(Elements(rows, dim, ranges));
  std::vector<float> to(from.size(), std::numeric_limits<float>::quiet_NaN());
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->SplitHeads(rows, heads, dim, ranges, {from.data(), Dtype::kFp16}, parts.data(), rank.stream());
  ops->MergeHeads(rows, heads, dim, ranges, {parts.data(), Dtype::kFp16}, {to.data(), target}, rank.stream());
  rank.Synchronize();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    double want = FP16ToFloat(from[i]);
    if (target == Dtype::kBf16) want = BF16ToFloat(FloatToBF16(static_cast<float>(want)));
    wrong += LoadElement(target, to.data(), static_cast<std::int64_t>(i)) == want ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("MergeHeads sums replicated heads in fp32, in the order of the parts, and rounds once") {
  // Head 0 in one part, head 1 in three, head 2 in two.
  const std::vector<HeadRange> ranges{{0, 2}, {1, 1}, {1, 2}, {2, 1}};
  const std::int64_t rows = 40;
  const int heads = 3, dim = 16;
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-100, 100);
  std::vector<std::uint16_t> parts(Elements(rows, dim, ranges));
  for (auto& x : parts) x = FloatToBF16(uniform(random));
  std::vector<std::uint16_t> to(static_cast<std::size_t>(rows * heads * dim), 0x7fff);
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->MergeHeads(rows, heads, dim, ranges, {parts.data(), Dtype::kBf16}, {to.data(), Dtype::kBf16},
                  rank.stream());
  rank.Synchronize();
  std::size_t wrong = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int head = 0; head < heads; ++head) {
      for (int d = 0; d < dim; ++d) {
        float sum = 0;
        std::int64_t part = 0;
        for (const HeadRange& range : ranges) {
          const int local = head - range.begin;
          if (local >= 0 && local < range.count) {
            sum += BF16ToFloat(parts[static_cast<std::size_t>(part + (row * range.count + local) * dim + d)]);
          }
          part += rows * range.count * dim;
        }
        wrong += to[static_cast<std::size_t>((row * heads + head) * dim + d)] == FloatToBF16(sum) ? 0 : 1;
      }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("Parts with heads out of range or without every head are refused") {
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  std::vector<std::uint16_t> from(64), to(64);
  const auto merge = [&](const std::vector<HeadRange>& ranges) {
    ops->MergeHeads(1, 4, 4, ranges, {from.data(), Dtype::kFp16}, {to.data(), Dtype::kFp16}, rank.stream());
  };
  CHECK_THROWS_AS(merge({{0, 2}, {3, 1}}), RuntimeError);  // head 2 is in no part
  CHECK_THROWS_AS(merge({{0, 4}, {3, 2}}), RuntimeError);
  CHECK_THROWS_AS(ops->SplitHeads(1, 4, 4, {{-1, 2}}, {from.data(), Dtype::kFp16}, to.data(), rank.stream()),
                  RuntimeError);
  CHECK_NOTHROW(merge({{0, 2}, {2, 2}}));
  rank.Synchronize();
}

TEST_CASE("Round agrees with half.h") {
  std::vector<float> from;
  for (int i = 0; i < 1000; ++i)
    from.push_back(std::ldexp(1.0f + static_cast<float>(i) * 0.0007f, i % 40 - 30));
  from.push_back(std::numeric_limits<float>::quiet_NaN());
  std::vector<std::uint16_t> fp16(from.size()), bf16(from.size());
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  const auto count = static_cast<std::int64_t>(from.size());
  ops->RoundSum({from.data()}, {fp16.data(), Dtype::kFp16}, count, rank.stream());
  ops->RoundSum({from.data()}, {bf16.data(), Dtype::kBf16}, count, rank.stream());
  rank.Synchronize();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    wrong += fp16[i] == FloatToFP16(from[i]) ? 0 : 1;
    wrong += bf16[i] == FloatToBF16(from[i]) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("Delta is the dot product of out and dout, per row and head") {
  const auto dtype = GENERATE(Dtype::kFp16, Dtype::kBf16);
  std::mt19937 random(2);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const std::size_t count = 9 * 3 * 128;
  std::vector<std::uint16_t> out(count), dout(count);
  for (std::size_t i = 0; i < count; ++i) {
    StoreElement(dtype, out.data(), static_cast<std::int64_t>(i), uniform(random));
    StoreElement(dtype, dout.data(), static_cast<std::int64_t>(i), uniform(random));
  }
  std::vector<float> delta(27, std::numeric_limits<float>::quiet_NaN());
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->Delta(27, 128, {out.data(), dtype}, {dout.data(), dtype}, delta.data(), rank.stream());
  rank.Synchronize();
  for (std::int64_t i = 0; i < 27; ++i) {
    double want = 0;
    for (std::int64_t d = 0; d < 128; ++d) {
      want += LoadElement(dtype, out.data(), i * 128 + d) * LoadElement(dtype, dout.data(), i * 128 + d);
    }
    CHECK(std::abs(delta[static_cast<std::size_t>(i)] - want) < 1e-5);
  }
}

TEST_CASE("AddOffset returns log(exp(lse) + exp(offset))") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // Rows of two heads; the last row is padding, which may contain any value.
  const std::vector<float> lse{1, 2, -kInfinity, 500, -500, 0, std::numeric_limits<float>::quiet_NaN(), 0};
  const std::vector<float> offset{0.5f, -1};
  std::vector<float> total(lse.size(), -7);
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->AddOffset(4, 2, lse.data(), offset.data(), total.data(), rank.stream());
  rank.Synchronize();
  for (std::size_t i = 0; i < 6; ++i) {
    const double x = lse[i], y = offset[i % 2], top = std::max(x, y);
    CHECK(std::abs(total[i] - (top + std::log(std::exp(x - top) + std::exp(y - top)))) <=
          1e-6 * std::max(1.0, std::abs(top)));
  }
  CHECK(std::isnan(total[6]));

  const std::vector<float> none(2, -kInfinity);
  ops->AddOffset(1, 2, none.data(), none.data(), total.data(), rank.stream());
  rank.Synchronize();
  CHECK(total[1] == -kInfinity);
}

TEST_CASE(
    "Accumulate adds `count` elements of any dtype to a sum, or starts the sum, and Fill writes as many") {
  const auto dtype = GENERATE(Dtype::kFp16, Dtype::kBf16, Dtype::kFp32);
  std::vector<float> stored(4);
  for (std::int64_t i = 0; i < 4; ++i)
    StoreElement(dtype, stored.data(), i, 0.25 * static_cast<double>(i) - 0.5);
  std::vector<float> to{1, 2, std::numeric_limits<float>::quiet_NaN(), 4};
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->Accumulate({stored.data(), dtype}, to.data(), 3, true, rank.stream());
  rank.Synchronize();
  CHECK(to == std::vector<float>{-0.5f, -0.25f, 0, 4});
  ops->Accumulate({stored.data(), dtype}, to.data(), 3, false, rank.stream());
  rank.Synchronize();
  CHECK(to == std::vector<float>{-1, -0.5f, 0, 4});
  ops->Fill(to.data(), 7, 2, rank.stream());
  rank.Synchronize();
  CHECK(to == std::vector<float>{7, 7, 0, 4});
}

// Partial outputs of one softmax, each over other keys, are merged one after another.
TEST_CASE("Merge merges partial outputs by their lse") {
  const auto part_dtype = GENERATE(Dtype::kFp32, Dtype::kFp16);
  const auto parts = GENERATE(1, 2, 5);
  const bool offset = GENERATE(false, true);
  constexpr std::int64_t kRows = 6;
  constexpr int kHeads = 2, kDim = 3, kKeys = 4;
  constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  // Rows 1 .. 4 hold tokens, in two segments. A vector of row 2 sees no key in the first part, one of row 3
  // no key in any part. exp(lse) would overflow, because lse is around 300.
  const Layout layout{{{0, 0, 3, 1}, {1, 0, 1, 4}}, kRows, 1};
  const auto blind = [&](std::int64_t vector, int part) {
    return vector == 2 * kHeads ? part == 0 : vector == 3 * kHeads;
  };
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const auto vectors = static_cast<std::size_t>(kRows * kHeads);
  std::vector<float> accumulator(vectors * kDim, kNan), lse(vectors, kNan), offsets{299, 303};
  std::vector<float> out(vectors * kDim, kNan);
  std::vector<double> want_sum(vectors), want_out(vectors * kDim);
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  const auto rows = ops->Rows(layout, rank.stream());
  for (int p = 0; p < parts; ++p) {
    std::vector<float> part_lse(vectors, kNan), part(vectors * kDim, kNan);
    for (std::int64_t vector = kHeads; vector < 5 * kHeads; ++vector) {
      const auto at = static_cast<std::size_t>(vector);
      double sum = 0, value[kDim] = {};
      for (int key = 0; key < kKeys && !blind(vector, p); ++key) {
        const double weight = std::exp(3 * uniform(random));
        sum += weight;
        for (double& v : value) v += weight * uniform(random);
      }
      part_lse[at] = sum > 0 ? static_cast<float>(300 + std::log(sum)) : -kInfinity;
      for (std::size_t d = 0; d < kDim && sum > 0; ++d) {
        StoreElement(part_dtype, part.data(), vector * kDim + static_cast<std::int64_t>(d), value[d] / sum);
        want_out[at * kDim + d] +=
            sum * LoadElement(part_dtype, part.data(), vector * kDim + static_cast<std::int64_t>(d));
      }
      want_sum[at] += sum;
    }
    MergeArgs args;
    args.rows = rows.get();
    args.heads = kHeads;
    args.dim = kDim;
    args.part = {part.data(), part_dtype};
    args.part_lse = part_lse.data();
    args.accumulator = parts == 1 ? nullptr : accumulator.data();
    args.lse = lse.data();
    args.out = {out.data(), Dtype::kFp32};
    args.softmax_offset = offset ? offsets.data() : nullptr;
    args.first = p == 0;
    args.last = p + 1 == parts;
    ops->Merge(args, rank.stream());
    rank.Synchronize();
  }
  for (std::int64_t vector = 0; vector < kRows * kHeads; ++vector) {
    const auto at = static_cast<std::size_t>(vector);
    INFO("vector " << vector << " of " << parts << " parts");
    if (vector < kHeads || vector >= 5 * kHeads) {  // no token: not written
      CHECK(std::isnan(lse[at]));
      CHECK(std::isnan(out[at * kDim]));
      continue;
    }
    if (want_sum[at] == 0) {
      CHECK(lse[at] == -kInfinity);
      CHECK(out[at * kDim] == 0);
      continue;
    }
    CHECK(std::abs(lse[at] - (300 + std::log(want_sum[at]))) < 1e-4);
    const double whole = want_sum[at] + (offset ? std::exp(double{offsets[at % kHeads]} - 300) : 0);
    for (std::size_t d = 0; d < kDim; ++d)
      CHECK(std::abs(out[at * kDim + d] - want_out[at * kDim + d] / whole) < 1e-4);
  }
}

TEST_CASE("Merge propagates NaN in a part's lse") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> part{1, 1}, part_lse{nan, 0};
  std::vector<float> accumulator{2, 2}, lse{0, nan}, out{0, 0};
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  const auto rows = ops->Rows({{{0, 0, 2, 0}}, 2, 1}, rank.stream());
  MergeArgs args;
  args.rows = rows.get();
  args.dim = 1;
  args.part = {part.data(), Dtype::kFp32};
  args.part_lse = part_lse.data();
  args.accumulator = accumulator.data();
  args.lse = lse.data();
  args.out = {out.data(), Dtype::kFp32};
  args.first = false;
  ops->Merge(args, rank.stream());
  rank.Synchronize();
  for (const float x : {out[0], out[1], lse[0], lse[1]}) CHECK(std::isnan(x));
}

TEST_CASE("OffsetGradient sums over rows with a token") {
  const Layout layout{{{0, 0, 70, 2}, {1, 0, 1, 90}}, 100, 1};
  std::vector<float> total(200, std::numeric_limits<float>::quiet_NaN()), delta = total;
  const std::vector<float> offset{0.5f, -1};
  std::vector<double> want(2);
  std::mt19937 random(4);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const Segment& segment : layout.segments) {
    for (std::int64_t row = segment.row; row < segment.row + segment.length; ++row) {
      for (std::size_t h = 0; h < 2; ++h) {
        const std::size_t at = static_cast<std::size_t>(row) * 2 + h;
        total[at] = uniform(random);
        delta[at] = uniform(random);
        want[h] -= std::exp(double{offset[h]} - total[at]) * delta[at];
      }
    }
  }
  std::vector<float> gradient(2);
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  const auto rows = ops->Rows(layout, rank.stream());
  ops->OffsetGradient(*rows, 2, total.data(), delta.data(), offset.data(), gradient.data(), rank.stream());
  rank.Synchronize();
  for (std::size_t h = 0; h < 2; ++h) CHECK(std::abs(gradient[h] - want[h]) < 1e-4);
}

TEST_CASE("SumRows sums rows in order") {
  // In fp32 1e8 + 1 is 1e8, so any other order gives another sum.
  const std::vector<float> from{1, 1e8f, 0, 2, 1e8f, -1e8f, 1, 3, -1e8f, 1, 1, 4};
  std::vector<float> to(5, std::numeric_limits<float>::quiet_NaN());
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->SumRows(from.data(), 3, 4, to.data(), rank.stream());
  rank.Synchronize();
  CHECK(std::vector<float>(to.begin(), to.end() - 1) == std::vector<float>{0, 1, 2, 9});
  CHECK(std::isnan(to[4]));
  ops->SumRows(from.data(), 0, 4, to.data(), rank.stream());
  rank.Synchronize();
  CHECK(to[1] == 0);
}

}  // namespace

TEST_CASE("MaxRows raises each column to its largest value") {
  const float none = -std::numeric_limits<float>::infinity();
  const std::vector<float> from{1, none, -3, 0, 5, none, -1, 0, 2, none, -2, 7};
  std::vector<float> to{none, none, 4, 6, 9};
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  ops->MaxRows(from.data(), 3, 4, to.data(), rank.stream());
  rank.Synchronize();
  CHECK(to == std::vector<float>{5, none, 4, 7, 9});
  const std::vector<float> unknown{1, std::numeric_limits<float>::quiet_NaN(), 2};
  ops->MaxRows(unknown.data(), 3, 1, to.data(), rank.stream());
  rank.Synchronize();
  CHECK(std::isnan(to[0]));
}

TEST_CASE("AddStrided adds where its strides say, and nowhere else") {
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  std::vector<float> from(2 * 3 * 2 * 2), to(100, 1);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  StridedSum sum{{2, 3, 2, 2}, {from.data(), Dtype::kFp32}, {12, 4, 2, 1}, to.data(), {50, 13, 5, 2}};
  ops->AddStrided(sum, rank.stream());
  rank.Synchronize();
  std::vector<float> want(100, 1);
  for (int a = 0; a < 2; ++a)
    for (int b = 0; b < 3; ++b)
      for (int c = 0; c < 2; ++c)
        for (int d = 0; d < 2; ++d)
          want[static_cast<std::size_t>(a * 50 + b * 13 + c * 5 + d * 2)] +=
              static_cast<float>(a * 12 + b * 4 + c * 2 + d);
  CHECK(to == want);
}
