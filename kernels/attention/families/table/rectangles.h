// A block of queries and keys, whose tokens lie anywhere, as rectangular calls: runs of rows with one band
// each, for a kernel that knows neither positions nor sequences. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/layout.h"

namespace cppool::kernels::table {

// `batch` times `queries` x `keys` rows. Query i of entry b is row q_row + b * q_stride + i * (row_step of
// the queries' layout), key j likewise. Query i sees key j exactly when low <= j - i <= high; every query
// sees a key, and every key is seen. Then low <= 0 <= high, and low <= keys - queries <= high. A band that
// does not cut on a side is open there: -kOpen, kOpen.
struct Rectangle {
  std::int64_t queries = 0, keys = 0;
  std::int32_t low = -kOpen, high = kOpen;
  std::int64_t q_row = 0, k_row = 0;
  std::int64_t batch = 1;
  std::int64_t q_stride = 0, k_stride = 0;  // 0 with a batch of 1
  // These are for rectangles that are cut by position: entry b is of sequence `sequence` + b *
  // `sequence_stride`; query i is at position q_position + i, key j at k_position + j; `diagonal` is that of
  // the sequences' bands. Other rectangles do not use them.
  std::int32_t sequence = 0, sequence_stride = 0;
  std::int64_t q_position = 0, k_position = 0;
  std::int32_t diagonal = 0;

  bool full() const { return low == -kOpen && high == kOpen; }
};

// Rectangles that hold every visible pair once and no other pair; few of them. Segments whose rows continue
// each other share one where a single band says what is visible, wherever their positions are: under a causal
// mask all of a rank's own block of DualChunkSwap is one, and so is each other block of a ring. Equal
// rectangles of different sequences at equal distances are one with a batch.
//
// `by_position`: for what is added to the logits, by position. The positions of a rectangle's rows then
// continue each other too, which takes more rectangles.
std::vector<Rectangle> CutIntoRectangles(const Layout& query, const Layout& key,
                                         const std::vector<Band>& bands, bool by_position = false);

// Equal rectangles at equal distances, in the order of their rows, joined as CutIntoRectangles does.
std::vector<Rectangle> Batched(const std::vector<Rectangle>& rectangles);
// Does the reverse: returns rectangles with a batch of 1.
std::vector<Rectangle> Unbatched(const std::vector<Rectangle>& rectangles);

// The same pairs as more rectangles, for kernels that do not take the one; empty where that changes nothing.
// The steps are those of the layouts.
//
// Cuts the queries of a band so that no part that is not full has more queries than keys.
std::vector<Rectangle> SplitTall(const Rectangle& from, std::int32_t q_step, std::int32_t k_step);
// Cuts what is open to the left into one causal square and full rectangles.
std::vector<Rectangle> SplitSquare(const Rectangle& from, std::int32_t q_step, std::int32_t k_step);

}  // namespace cppool::kernels::table
