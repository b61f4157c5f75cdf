#include "kernels/attention/families/table/packed_sequences.h"

#include <algorithm>
#include <map>
#include <utility>

namespace cppool::kernels::table {
namespace {

// One side of the window of a group, as its members agree on it.
struct Side {
  std::int64_t window = -1;  // -1: none of them is cut
  std::int64_t from = 0;     // the least window that cuts none of those that are not cut

  // With another rectangle's; nothing where they do not agree.
  bool Join(std::int64_t other, std::int64_t other_from) {
    if (other == -1) {
      if (window != -1 && window < other_from) return false;
      from = std::max(from, other_from);
      return true;
    }
    if (window == -1 ? other < from : other != window) return false;
    window = other;
    return true;
  }
};

struct Group {
  Side left, right;
  std::int64_t q_end = 0, k_end = 0;  // rows before these are in use
  std::vector<Rectangle> each;

  bool Join(const Rectangle& next, const Windows& windows) {
    if (next.q_row < q_end || next.k_row < k_end) return false;
    Side joined_left = left, joined_right = right;
    if (!joined_left.Join(windows.left, windows.left_from) ||
        !joined_right.Join(windows.right, windows.right_from))
      return false;
    left = joined_left;
    right = joined_right;
    q_end = next.q_row + next.queries;
    k_end = next.k_row + next.keys;
    each.push_back(next);
    return true;
  }
};

}  // namespace

Windows WindowsOf(const Rectangle& r, cppool_attention_anchor anchor) {
  const std::int64_t diagonal = anchor == CPPOOL_TOP_LEFT ? 0 : r.keys - r.queries;
  return {.left = r.low == -kOpen ? -1 : diagonal - r.low,
          .right = r.high == kOpen ? -1 : r.high - diagonal,
          .left_from = std::max<std::int64_t>(0, diagonal + r.queries - 1),
          .right_from = std::max<std::int64_t>(0, r.keys - 1 - diagonal)};
}

std::vector<PackedSequences> Pack(const std::vector<Rectangle>& rectangles, cppool_attention_anchor anchor) {
  std::vector<Rectangle> entries = Unbatched(rectangles);
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Rectangle& a, const Rectangle& b) { return a.q_row < b.q_row; });
  std::vector<Group> groups;
  for (const Rectangle& entry : entries) {
    const Windows windows = WindowsOf(entry, anchor);
    if (std::any_of(groups.begin(), groups.end(), [&](Group& group) { return group.Join(entry, windows); }))
      continue;
    groups.emplace_back();
    groups.back().Join(entry, windows);
  }
  std::vector<PackedSequences> packed;
  for (Group& group : groups)
    packed.push_back({anchor, group.left.window, group.right.window, std::move(group.each)});
  return packed;
}

PackedTables TablesOf(const std::vector<Rectangle>& sequences) {
  PackedTables tables;
  const auto side = [&](std::int64_t Rectangle::*row, std::int64_t Rectangle::*length,
                        std::vector<std::int32_t>& starts, std::vector<std::int32_t>& lengths) {
    bool gaps = false;
    const std::int64_t first = sequences.front().*row;
    for (const Rectangle& sequence : sequences) {
      const auto start = static_cast<std::int32_t>(sequence.*row - first);
      gaps = gaps || (!starts.empty() && starts.back() + lengths.back() != start);
      starts.push_back(start);
      lengths.push_back(static_cast<std::int32_t>(sequence.*length));
    }
    starts.push_back(starts.back() + lengths.back());
    if (!gaps) lengths.clear();
  };
  side(&Rectangle::q_row, &Rectangle::queries, tables.cu_seqlens_q, tables.seqlens_q);
  side(&Rectangle::k_row, &Rectangle::keys, tables.cu_seqlens_kv, tables.seqlens_kv);
  return tables;
}

std::size_t PackedTablesBytes(const Layout& query, const Layout& key) {
  // A block has at most a rectangle for each pair of segments of a sequence, in each of two passes; a packed
  // one has at most four numbers of its own, and its call two more.
  std::map<std::int32_t, std::size_t> queries;
  for (const Segment& segment : query.segments) ++queries[segment.sequence];
  std::size_t rectangles = 0;
  for (const Segment& segment : key.segments) {
    const auto found = queries.find(segment.sequence);
    if (found != queries.end()) rectangles += found->second;
  }
  return rectangles * 2 * 6 * sizeof(std::int32_t);
}

}  // namespace cppool::kernels::table
