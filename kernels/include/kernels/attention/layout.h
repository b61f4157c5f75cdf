// Who holds which tokens. A buffer of tokens is rows [rows, heads, dim]; a layout says which token of which
// sequence each row holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/spec.h"

namespace cppool::kernels {

// `length` tokens of one sequence: positions position, position + 1, ... in rows row, row + row_step, ... of
// the buffer.
struct Segment {
  std::int32_t sequence;
  std::int32_t position;
  std::int32_t length;
  std::int64_t row;
  bool operator==(const Segment&) const = default;
};

struct Layout {
  std::vector<Segment> segments;  // sorted by sequence, then position
  std::int64_t rows = 0;          // of the whole buffer
  std::int32_t row_step = 1;      // 1 for bshd; the batch size for sbhd
  // Of keys: the rows of a block, where those behind the first block arrive while the kernel runs
  // (ForwardArgs::arriving); 0: all are there.
  std::int64_t block_rows = 0;
};

// Every token: what attention without CP sees. bshd and sbhd: sequence b's room is [b] of [batch, room]; thd:
// rooms lie one after another. Segments are tokens only: rows of padding are in none.
Layout GlobalLayout(QkvFormat format, const Sequences& sequences);

// DualChunkSwap: each sequence's room is cut into 2W chunks and rank r holds chunks r and 2W-1-r, which
// balances a causal mask (Megatron and Transformer Engine; thd: per packed sequence, the rank's chunks one
// after another, then what is left of the buffer). Rooms must be divisible by 2W. For W = 1 it is the global
// layout.
Layout RankLayout(QkvFormat format, const Sequences& sequences, int world_size, int rank);

// Rows that hold no token, ascending.
std::vector<std::int64_t> PaddingRows(const Layout& layout);

// Joins neighbouring segments that continue each other in rows and positions: runs of tokens.
std::vector<Segment> Joined(const Layout& layout);

// Counts the visible (query, key) pairs per head.
std::int64_t CountPairs(const Layout& query, const Layout& key, const std::vector<Band>& bands);

// Whether there are any.
bool SeesAny(const Layout& query, const Layout& key, const std::vector<Band>& bands);

// The layout of buffers laid end to end: what an all-gather or an all-to-all of the parts leaves. Parts have
// the same row_step.
Layout Concatenate(const std::vector<Layout>& parts);

// For each row of `from`, the row of `to` that holds the same token. Every token of `from` must be in `to`.
std::vector<std::int64_t> RowMap(const Layout& from, const Layout& to);

// The work of one kernel call, by tiles of at most `tile_rows` tokens of one segment ("self") and, for each,
// the ranges of tokens of the other side that a tile's tokens see (or are seen by). Ranges are cut to the
// band; within one, single pairs may still be masked.
struct Range {
  std::int64_t row;
  std::int32_t position;
  std::int32_t length;
  bool operator==(const Range&) const = default;
};

struct Tile {
  std::int64_t row;
  std::int32_t sequence;
  std::int32_t position;
  std::int32_t length;
  std::int32_t range_begin;  // into WorkList::ranges
  std::int32_t range_end;
  Band band;  // of the tile's sequence, always as key position minus query position
};

struct WorkList {
  std::vector<Tile> tiles;  // most work first, so that the last tiles to run are short ones
  std::vector<Range> ranges;
  std::int32_t self_step = 1;
  std::int32_t other_step = 1;
  std::int64_t pairs = 0;  // visible (query, key) pairs per head
};

enum class Side { kQuery, kKey };

// bands[sequence]. Tiles without work are left out unless `keep_empty` (a first or a last call must write
// every row). Neighbouring ranges that continue each other in rows and positions are merged. With `rest_step`
// a segment that is not divided into whole tiles begins with the short one, which under a causal mask sees
// least there, rounded up to a multiple of `rest_step` rows, at most a whole tile; without (0) it ends with
// the short one.
WorkList BuildWorkList(Side self, const Layout& query, const Layout& key, const std::vector<Band>& bands,
                       int tile_rows, bool keep_empty, int rest_step = 0);
// Reorders the ranges of each tile of queries by the blocks of `key` that they are in: in their order, or the
// last one first.
void OrderByBlock(WorkList& list, const Layout& key, bool last_first);
// Returns the most that its tiles and ranges take, whatever the bands.
std::size_t WorkListBytes(Side self, const Layout& query, const Layout& key, int tile_rows);

}  // namespace cppool::kernels
