// The bands of all masks and windows, as a table.
#include <cstdint>

#include "kernels/attention/spec.h"
#include "tests/catch.h"

namespace {

using namespace cppool::kernels;

struct Row {
  AttnMaskType mask;
  std::int64_t left, right;
  std::int64_t seqlen_q, seqlen_kv;
  Band band;
};

constexpr AttnMaskType kAll = AttnMaskType::kNoMask;
constexpr AttnMaskType kCausal = AttnMaskType::kCausal;
constexpr AttnMaskType kBottomRight = AttnMaskType::kCausalBottomRight;
constexpr AttnMaskType kPadding = AttnMaskType::kPadding;
constexpr AttnMaskType kPaddingCausal = AttnMaskType::kPaddingCausal;
constexpr AttnMaskType kPaddingBottomRight = AttnMaskType::kPaddingCausalBottomRight;
constexpr std::int64_t kFar = std::int64_t{1} << 40;

TEST_CASE("Masks and windows give the bands of the table") {
  const Row rows[] = {
      // No mask: open, and (-1, 0) is open too.
      {kAll, -1, -1, 8, 8, {-kOpen, kOpen}},
      {kAll, -1, 0, 8, 8, {-kOpen, kOpen}},
      {kAll, -1, -1, 8, 20, {-kOpen, kOpen}},
      {kAll, -1, 0, 20, 8, {-kOpen, kOpen}},
      // Windows without a causal mask are aligned bottom-right.
      {kAll, 3, 2, 8, 8, {-3, 2}},
      {kAll, 3, 2, 8, 20, {9, 14}},
      {kAll, 3, 2, 20, 8, {-15, -10}},
      {kAll, 0, 0, 8, 8, {0, 0}},
      {kAll, 0, 0, 8, 11, {3, 3}},
      {kAll, 4, -1, 8, 10, {-2, kOpen}},
      {kAll, -1, 4, 8, 10, {-kOpen, 6}},
      {kAll, 4, 0, 8, 10, {-2, 2}},
      // Causal: aligned top-left; the right side of the window is ignored.
      {kCausal, -1, -1, 8, 8, {-kOpen, 0}},
      {kCausal, -1, 0, 8, 8, {-kOpen, 0}},
      {kCausal, -1, 5, 8, 20, {-kOpen, 0}},
      {kCausal, 3, 5, 8, 20, {-3, 0}},
      {kCausal, 3, -1, 20, 8, {-3, 0}},
      {kCausal, 0, 0, 8, 20, {0, 0}},
      // Causal, bottom right: the last query sees the last key.
      {kBottomRight, -1, -1, 8, 8, {-kOpen, 0}},
      {kBottomRight, -1, 0, 8, 20, {-kOpen, 12}},
      {kBottomRight, -1, 7, 20, 8, {-kOpen, -12}},
      {kBottomRight, 3, 7, 8, 20, {9, 12}},
      {kBottomRight, 3, 0, 20, 8, {-15, -12}},
      // A padding mask gives the band of the mask without padding, with the lengths of the sequence.
      {kPadding, -1, -1, 5, 7, {-kOpen, kOpen}},
      {kPadding, -1, 0, 5, 7, {-kOpen, kOpen}},
      {kPadding, 3, 2, 5, 7, {-1, 4}},
      {kPaddingCausal, 3, 5, 8, 20, {-3, 0}},
      {kPaddingBottomRight, 3, 7, 8, 20, {9, 12}},
      {kPaddingBottomRight, -1, 0, 8, 0, {-kOpen, -8}},
      // Windows wider than any sequence are no limit.
      {kAll, kFar, kFar, 8, 8, {-kOpen, kOpen}},
      {kCausal, kFar, kFar, 1 << 24, 1, {-kOpen, 0}},
      {kBottomRight, INT64_MAX, 0, 1, 1 << 24, {-kOpen, (1 << 24) - 1}},
      {kAll, INT64_MAX, INT64_MAX, 1 << 24, 1, {-kOpen, kOpen}},
  };
  for (const Row& row : rows) {
    INFO("mask " << static_cast<int>(row.mask) << ", window " << row.left << " " << row.right << ", "
                 << row.seqlen_q << " queries, " << row.seqlen_kv << " keys");
    AttentionSpec spec;
    spec.mask = row.mask;
    spec.window_left = row.left;
    spec.window_right = row.right;
    const Band band = BandOf(spec, row.seqlen_q, row.seqlen_kv);
    CHECK(band.diagonal ==
          (row.mask == kCausal || row.mask == kPaddingCausal ? 0 : row.seqlen_kv - row.seqlen_q));
    CHECK(band.low == row.band.low);
    CHECK(band.high == row.band.high);
  }
}

TEST_CASE("Each sequence has the band of its own lengths") {
  AttentionSpec spec;
  spec.mask = kPaddingBottomRight;
  spec.queries = {{8, 0, 5}, {8, 0, 8}, 24};
  spec.keys = {{4, 3, 5}, {4, 4, 8}, 24};
  CHECK(BandsOf(spec) == std::vector<Band>{{-kOpen, -4, -4}, {-kOpen, 3, 3}, {-kOpen, 0, 0}});
}

TEST_CASE("kOpen is larger than any distance between two positions") {
  constexpr std::int64_t longest = std::int64_t{1} << 24;
  CHECK(kOpen > 2 * longest);
}

}  // namespace
