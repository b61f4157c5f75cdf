// Comparisons with every kind of argument, checked against a naive loop.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention/checks/host_array.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/check_rank.h"

namespace cppool::kernels::test {

struct CompareCase {
  Dtype a = Dtype::kBf16;
  Dtype b = Dtype::kBf16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t offset = 0;  // first column of b; its rows have columns + 2 * offset elements
  bool maps = false;        // the rows of a and b are permuted, each by its own table
};

inline std::vector<CompareCase> CompareCases() {
  std::vector<CompareCase> cases;
  for (const Dtype a : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
    for (const Dtype b : {Dtype::kFp16, Dtype::kBf16, Dtype::kFp32, Dtype::kFp64}) {
      cases.push_back({a, b, 37, 24, 8, true});
    }
  }
  const Dtype half = Dtype::kBf16;
  for (const bool maps : {false, true}) {
    cases.push_back({half, half, 1, 1, 0, maps});
    cases.push_back({half, Dtype::kFp32, 65, 7, 3, maps});
    cases.push_back({half, half, 300, 1000, 0, maps});
    cases.push_back({half, half, 3, 100000, 4, maps});
    cases.push_back({Dtype::kFp32, Dtype::kFp64, 5000, 3, 1, maps});
  }
  return cases;
}

// Runs the comparison on `rank` and naively; `special`: with NaN and infinities in the data.
inline void CheckCompare(const CheckRank& rank, const CompareCase& c, bool special) {
  CAPTURE(static_cast<int>(c.a), static_cast<int>(c.b), c.rows, c.columns, c.offset, c.maps, special);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  std::uint64_t state = 42;
  const auto uniform = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) * 0x1p-53 * 2 - 1;
  };
  const std::int64_t pitch = c.columns + 2 * c.offset;
  std::vector<double> a(c.rows * c.columns);
  std::vector<double> b(c.rows * pitch);
  std::vector<std::int64_t> a_rows(c.rows);
  std::vector<std::int64_t> b_rows(c.rows);
  for (std::int64_t i = 0; i < c.rows; ++i) {
    a_rows[i] = c.maps ? c.rows - 1 - i : i;
    b_rows[i] = c.maps ? (i + c.rows / 2) % c.rows : i;
  }
  for (double& x : b) x = kNan;  // elements outside the compared columns must not be read
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.columns; ++j) {
      double& x = a[a_rows[i] * c.columns + j];
      double& y = b[b_rows[i] * pitch + c.offset + j];
      y = uniform() * 8;
      x = y + uniform() * 0.25;
      if (!special || (i + j) % 5 != 0) continue;
      const double kinds[][2] = {{kNan, 1},
                                 {1, kNan},
                                 {kNan, kNan},
                                 {kInfinity, kInfinity},
                                 {-kInfinity, -kInfinity},
                                 {kInfinity, 2},
                                 {3, -kInfinity},
                                 {kInfinity, -kInfinity},
                                 {kNan, kInfinity}};
      const auto& kind = kinds[(i * 7 + j) % 9];
      x = kind[0];
      y = kind[1];
    }
  }
  const std::vector<std::uint8_t> a_bytes = Bytes(c.a, a);
  const std::vector<std::uint8_t> b_bytes = Bytes(c.b, b);
  a = Doubles(c.a, a_bytes);
  b = Doubles(c.b, b_bytes);

  CompareStats expected;
  const double relative = 0.03;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.columns; ++j) {
      const double x = a[a_rows[i] * c.columns + j];
      const double y = b[b_rows[i] * pitch + c.offset + j];
      ++expected.count;
      if (std::isnan(x) || std::isnan(y) || std::isinf(x) || std::isinf(y)) {
        if (std::isnan(x) || std::isnan(y) || x != y) ++expected.mismatches;
        continue;
      }
      const double error = std::abs(x - y);
      expected.max_abs_err = std::max(expected.max_abs_err, error);
      expected.max_abs_ref = std::max(expected.max_abs_ref, std::abs(y));
      expected.max_excess = std::max(expected.max_excess, error - relative * std::abs(y));
      expected.sum_sq_err += error * error;
      expected.sum_sq_ref += y * y;
    }
  }

  const Buffer a_device = rank.Upload(a_bytes);
  const Buffer b_device = rank.Upload(b_bytes);
  const Buffer a_map = rank.Upload(a_rows);
  const Buffer b_map = rank.Upload(b_rows);
  CompareArgs args;
  args.a = {a_device.get(), c.a};
  args.a_rows = c.maps ? a_map.get<std::int64_t>() : nullptr;
  args.a_stride = c.columns;
  args.b = {b_device.get(), c.b};
  args.b_rows = c.maps ? b_map.get<std::int64_t>() : nullptr;
  args.b_stride = pitch;
  args.b_offset = c.offset;
  args.rows = c.rows;
  args.columns = c.columns;
  args.relative = relative;
  const CompareStats got = rank.Compare(args);
  CHECK(got.mismatches == expected.mismatches);
  CHECK(got.count == expected.count);
  CHECK(got.max_abs_err == expected.max_abs_err);
  CHECK(got.max_abs_ref == expected.max_abs_ref);
  CHECK(Near(got.max_excess, expected.max_excess, 1e-14));
  CHECK(Near(got.sum_sq_err, expected.sum_sq_err, 1e-12));
  CHECK(Near(got.sum_sq_ref, expected.sum_sq_ref, 1e-12));
  const CompareStats again = rank.Compare(args);
  CHECK((again.sum_sq_err == got.sum_sq_err && again.sum_sq_ref == got.sum_sq_ref));

  args.tolerance = expected.max_abs_err / 4;  // some elements are further off
  args.relative = 0.001;
  const auto same = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  // In blocks: every 64 rows, and of 1, 2, 3, ... rows, which the comparison reads on the device.
  std::vector<std::int64_t> begins = {0};
  for (std::int64_t length = 1; begins.back() < c.rows; ++length)
    begins.push_back(std::min(begins.back() + length, c.rows));
  const Buffer begins_device = rank.Upload(begins);
  for (const bool table : {false, true}) {
    for (const std::int64_t block_columns : {8, 7, 192}) {
      CAPTURE(table, block_columns);
      args.row_blocks = table ? begins_device.get<std::int64_t>() : nullptr;
      args.row_block_count = table ? static_cast<std::int64_t>(begins.size()) - 1 : 0;
      args.block_columns = block_columns;
      const std::int64_t across = args.ColumnBlocks(), all = args.RowBlocks() * across;
      if (all > 100000) continue;
      const HostArray<BlockStats> blocks(rank.rt(), static_cast<std::size_t>(all));
      args.blocks = blocks.begin();
      const CompareStats whole = rank.Compare(args);
      CHECK(whole.mismatches == expected.mismatches);
      CHECK(whole.max_abs_err == expected.max_abs_err);
      CHECK(Near(whole.sum_sq_err, expected.sum_sq_err, 1e-12));
      std::int64_t wrong = 0;
      std::uint64_t bad = 0;
      for (std::int64_t at = 0; at < all; ++at) {
        BlockStats block;
        const std::int64_t begin = table ? begins[at / across] : at / across * kBlockRows;
        const std::int64_t end = table ? begins[at / across + 1] : std::min(begin + kBlockRows, c.rows);
        const std::int64_t column = at % across * block_columns;
        for (std::int64_t i = begin; i < end; ++i) {
          for (std::int64_t j = column; j < std::min(column + block_columns, c.columns); ++j) {
            const double x = a[a_rows[i] * c.columns + j];
            const double y = b[b_rows[i] * pitch + c.offset + j];
            const bool finite = std::isfinite(x) && std::isfinite(y);
            const double off = finite   ? std::abs(x - y)
                               : x == y ? -1
                                        : std::numeric_limits<double>::infinity();
            if (off > block.worst_err) {
              block.worst_err = off;
              block.worst = (i - begin) * (std::min(column + block_columns, c.columns) - column) + j - column;
              block.worst_a = x;
              block.worst_b = y;
            }
            ++block.count;
            block.bad += off > args.tolerance + args.relative * (finite ? std::abs(y) : 0) ? 1 : 0;
            if (!finite) continue;
            block.max_abs_err = std::max(block.max_abs_err, std::abs(x - y));
            block.max_abs_ref = std::max(block.max_abs_ref, std::abs(y));
            block.sum_sq_err += (x - y) * (x - y);
            block.sum_sq_ref += y * y;
          }
        }
        const BlockStats& found = blocks.begin()[at];
        wrong += found.count != block.count || found.max_abs_err != block.max_abs_err ||
                 found.max_abs_ref != block.max_abs_ref || !Near(found.sum_sq_err, block.sum_sq_err, 1e-12) ||
                 !Near(found.sum_sq_ref, block.sum_sq_ref, 1e-12) || found.bad != block.bad ||
                 found.worst != block.worst || !same(found.worst_a, block.worst_a) ||
                 !same(found.worst_b, block.worst_b);
        bad += found.bad;
      }
      CHECK(bad >= expected.mismatches + (expected.max_abs_err > 0 ? 1 : 0));
      CHECK(wrong == 0);
    }
  }
}

}  // namespace cppool::kernels::test
