// Rectangles of packed sequences that one call can take: sequences of different lengths under one mask. Host
// only.
#pragma once

#include <cppool/attention.h>

#include <cstdint>
#include <vector>

#include "kernels/attention/families/table/rectangles.h"

namespace cppool::kernels::table {

// A rectangle's band as windows from an anchor, as cppool_attention_call has them. A side that does not cut
// is -1, and any window of at least `left_from`, `right_from` says the same there.
struct Windows {
  std::int64_t left, right;
  std::int64_t left_from, right_from;
};
Windows WindowsOf(const Rectangle& rectangle, cppool_attention_anchor anchor);

struct PackedSequences {
  cppool_attention_anchor anchor;
  std::int64_t window_left, window_right;  // say of every sequence what its band says
  std::vector<Rectangle> each;  // with a batch of 1; rows ascend on both sides, and no two share any
};

// The rectangles (batches one by one) in few such groups; some may hold one rectangle. For layouts with a
// row_step of 1.
std::vector<PackedSequences> Pack(const std::vector<Rectangle>& rectangles, cppool_attention_anchor anchor);

// The int32 tables of a call with them: cu_seqlens of queries and keys, then the lengths of each side that
// has rows between its sequences.
struct PackedTables {
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_kv;
  std::vector<std::int32_t> seqlens_q, seqlens_kv;  // empty: each sequence ends where the next one begins
};
PackedTables TablesOf(const std::vector<Rectangle>& sequences);
// Returns how many bytes the tables of a block take at most.
std::size_t PackedTablesBytes(const Layout& query, const Layout& key);

}  // namespace cppool::kernels::table
