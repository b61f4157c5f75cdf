// The lengths that are drawn from a seed, and ALiBi's slopes.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "kernels/attention/spec.h"
#include "tests/catch.h"

namespace {

using namespace cppool::kernels;

std::int64_t Sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

AttentionSpec Problem(QkvFormat format, AttnMaskType mask, std::int64_t batch, std::int64_t seqlen_q,
                      std::int64_t seqlen_kv) {
  AttentionSpec spec;
  spec.format = format;
  spec.mask = mask;
  spec.batch = batch;
  spec.seqlen_q = seqlen_q;
  spec.seqlen_kv = seqlen_kv;
  return spec;
}

TEST_CASE("In bshd and sbhd without a padding mask every sequence has the full length") {
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    AttentionSpec spec = Problem(format, AttnMaskType::kCausal, 3, 16, 48);
    DrawSequences(spec, 4);
    CHECK(spec.queries == UniformSequences(3, 16));
    CHECK(spec.keys == UniformSequences(3, 48));
    CHECK_FALSE(spec.queries.padded());
  }
}

TEST_CASE("Drawn lengths fit the buffers, vary with the seed and are reproducible") {
  const int world = GENERATE(1, 2, 3, 4, 6, 8);
  const auto format = GENERATE(QkvFormat::kBshd, QkvFormat::kSbhd, QkvFormat::kThd);
  const bool pads = GENERATE(false, true);
  const std::int64_t batch = GENERATE(1, 2, 4, 9);
  const std::int64_t unit = 2 * world, most = 5 * unit;
  INFO("world " << world << ", format " << static_cast<int>(format) << ", pads " << pads << ", batch "
                << batch);
  bool any_between = false;  // a length that is neither special nor a whole number of units
  std::set<std::vector<std::int64_t>> drawn;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    AttentionSpec spec = Problem(format, AttnMaskType::kPaddingCausal, batch, most, most);
    spec.pad_between_seqs = pads;
    spec.seed = seed;
    DrawSequences(spec, world);
    const Sequences& s = spec.queries;
    REQUIRE(spec.keys == s);
    REQUIRE(s.length.size() == static_cast<std::size_t>(batch));
    REQUIRE(s.room.size() == static_cast<std::size_t>(batch));
    REQUIRE(s.rows == batch * most);
    REQUIRE(Sum(s.room) <= s.rows);
    REQUIRE(s.padded() == (Sum(s.length) < s.rows));
    REQUIRE(*std::max_element(s.length.begin(), s.length.end()) > most / 2);
    const bool fills = format == QkvFormat::kThd && !pads;
    for (std::size_t i = 0; i < s.length.size(); ++i) {
      REQUIRE(s.length[i] >= 0);
      REQUIRE(s.length[i] <= s.room[i]);
      REQUIRE(s.room[i] <= most);
      REQUIRE(s.room[i] % unit == 0);
      if (format == QkvFormat::kThd) REQUIRE(s.room[i] - s.length[i] < unit);
      if (format != QkvFormat::kThd) REQUIRE(s.room[i] == most);
      if (fills) REQUIRE(s.length[i] == s.room[i]);
      any_between = any_between || s.length[i] % unit > 1;
    }
    if (batch >= 4) {
      REQUIRE(std::count(s.length.begin(), s.length.end(), 0) >= 1);
      REQUIRE(std::count(s.length.begin(), s.length.end(), fills ? unit : 1) >= 1);
    }
    drawn.insert(s.length);
    AttentionSpec again = spec;
    DrawSequences(again, world);
    REQUIRE(again.queries == s);
  }
  CHECK(drawn.size() > 2);
  if (!(format == QkvFormat::kThd && !pads) && world > 1) CHECK(any_between);
}

TEST_CASE("Queries and keys of unequal lengths are drawn independently") {
  AttentionSpec spec = Problem(QkvFormat::kThd, AttnMaskType::kPaddingCausalBottomRight, 6, 64, 96);
  spec.pad_between_seqs = true;
  DrawSequences(spec, 2);
  CHECK(spec.queries.rows == 6 * 64);
  CHECK(spec.keys.rows == 6 * 96);
  CHECK(spec.queries.length != spec.keys.length);
  CHECK(*std::max_element(spec.queries.length.begin(), spec.queries.length.end()) <= 64);
}

TEST_CASE("The lengths of a seed are those of earlier versions") {
  AttentionSpec spec = Problem(QkvFormat::kThd, AttnMaskType::kPadding, 5, 4096, 4096);
  spec.pad_between_seqs = true;
  DrawSequences(spec, 4);
  CHECK(spec.queries.length == std::vector<std::int64_t>{0, 3346, 2410, 2328, 1});
}

TEST_CASE("ALiBi's slopes have the published values") {
  CHECK(AlibiSlopes(1) == std::vector<float>{0x1p-8f});
  CHECK(AlibiSlopes(8) ==
        std::vector<float>{0x1p-1f, 0x1p-2f, 0x1p-3f, 0x1p-4f, 0x1p-5f, 0x1p-6f, 0x1p-7f, 0x1p-8f});
  // As in the authors' code for 12 heads: the slopes of 8 heads, then the first, third, ... of 16.
  const std::vector<float> twelve = AlibiSlopes(12);
  REQUIRE(twelve.size() == 12);
  CHECK(std::vector<float>(twelve.begin(), twelve.begin() + 8) == AlibiSlopes(8));
  CHECK(twelve[8] == 0.70710678f);
  CHECK(twelve[9] == 0.35355339f);
  CHECK(twelve[10] == 0.176776695f);
  CHECK(twelve[11] == 0.0883883476f);
}

}  // namespace
