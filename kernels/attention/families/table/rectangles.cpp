#include "kernels/attention/families/table/rectangles.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace cppool::kernels::table {
namespace {

using Segments = std::vector<Segment>;

constexpr std::int64_t kFar = std::int64_t{1} << 60;

// Leaves out the first ones.
void SkipQueries(Rectangle& from, std::int64_t count, std::int32_t step) {
  from.q_row += count * step;
  from.q_position += count;
}
void SkipKeys(Rectangle& from, std::int64_t count, std::int32_t step) {
  from.k_row += count * step;
  from.k_position += count;
}

std::int64_t LengthOf(const Segments& segments) {
  std::int64_t length = 0;
  for (const Segment& segment : segments) length += segment.length;
  return length;
}

bool Sees(const Segment& query, const Segment& key, const Band& band) {
  const std::int64_t least = std::int64_t{key.position} - (query.position + query.length - 1);
  const std::int64_t most = std::int64_t{key.position} + key.length - 1 - query.position;
  return band.low <= band.high && band.low <= most && band.high >= least;
}

// Without what sees nothing of the other side, or is not seen.
void DropIdle(Segments& queries, Segments& keys, const Band& band) {
  std::erase_if(queries, [&](const Segment& query) {
    return std::none_of(keys.begin(), keys.end(), [&](const Segment& key) { return Sees(query, key, band); });
  });
  std::erase_if(keys, [&](const Segment& key) {
    return std::none_of(queries.begin(), queries.end(),
                        [&](const Segment& query) { return Sees(query, key, band); });
  });
}

// The band in the indices of both sides' rows that says for every pair of segments what `band` says of their
// positions; nothing when there is none. Each pair limits where the band's ends may be.
struct LocalBand {
  std::int64_t low, high;
};
std::optional<LocalBand> JoinedBand(const Segments& queries, const Segments& keys, const Band& band) {
  std::int64_t low_min = -kFar, low_max = kFar, high_min = -kFar, high_max = kFar;
  std::int64_t query_at = 0;
  for (const Segment& query : queries) {
    std::int64_t key_at = 0;
    for (const Segment& key : keys) {
      const std::int64_t least = key_at - query_at - (query.length - 1);
      const std::int64_t most = key_at - query_at + (key.length - 1);
      const std::int64_t shift = key_at - query_at - (std::int64_t{key.position} - query.position);
      const std::int64_t low = band.low + shift, high = band.high + shift;
      if (high < least) {
        high_max = std::min(high_max, least - 1);
      } else if (low > most) {
        low_min = std::max(low_min, most + 1);
      } else {
        high_min = std::max(high_min, std::min(high, most));
        if (high < most) high_max = std::min(high_max, high);
        low_max = std::min(low_max, std::max(low, least));
        if (low > least) low_min = std::max(low_min, low);
      }
      key_at += key.length;
    }
    query_at += query.length;
  }
  if (low_min > low_max || high_min > high_max) return std::nullopt;
  return LocalBand{low_min == -kFar ? -kFar : low_max, high_max == kFar ? kFar : high_min};
}

// Cuts off queries that see no key and keys that no query sees, all of which are at the ends, and opens the
// sides of the band that do not cut. `from` sees something.
Rectangle Trim(Rectangle from, std::int64_t low, std::int64_t high, std::int32_t q_step,
               std::int32_t k_step) {
  const std::int64_t skip_q = std::max<std::int64_t>(0, -high);
  const std::int64_t skip_k = std::max<std::int64_t>(0, low);
  const std::int64_t end_q = std::min(from.queries, from.keys - low);
  const std::int64_t end_k = std::min(from.keys, from.queries + high);
  SkipQueries(from, skip_q, q_step);
  SkipKeys(from, skip_k, k_step);
  from.queries = end_q - skip_q;
  from.keys = end_k - skip_k;
  low += skip_q - skip_k;
  high += skip_q - skip_k;
  from.low = low <= -(from.queries - 1) ? -kOpen : static_cast<std::int32_t>(low);
  from.high = high >= from.keys - 1 ? kOpen : static_cast<std::int32_t>(high);
  return from;
}

class SequenceCutter {
 public:
  SequenceCutter(const Band& band, std::int32_t q_step, std::int32_t k_step, bool by_position)
      : band_(band), q_step_(q_step), k_step_(k_step), by_position_(by_position) {}

  // The segments of both sides are in the order of their rows.
  std::vector<Rectangle> Cut(Segments queries, Segments keys) {
    DropIdle(queries, keys, band_);
    if (queries.empty()) return {};
    const Sides sides{RowsOf(queries), RowsOf(keys)};
    if (const auto known = known_.find(sides); known != known_.end()) return known->second;
    return known_[sides] = CutSeeing(queries, keys);
  }

 private:
  using Sides = std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>;

  static std::vector<std::int64_t> RowsOf(const Segments& segments) {
    std::vector<std::int64_t> rows;
    for (const Segment& segment : segments) rows.push_back(segment.row);
    return rows;
  }

  std::vector<Rectangle> CutSeeing(const Segments& queries, const Segments& keys) {
    if (Continue(queries, q_step_) && Continue(keys, k_step_)) {
      if (const auto joined = JoinedBand(queries, keys, band_)) {
        Rectangle one;
        one.queries = LengthOf(queries);
        one.keys = LengthOf(keys);
        one.q_row = queries.front().row;
        one.k_row = keys.front().row;
        one.sequence = queries.front().sequence;
        one.q_position = queries.front().position;
        one.k_position = keys.front().position;
        one.diagonal = band_.diagonal;
        return {Trim(one, joined->low, joined->high, q_step_, k_step_)};
      }
    }
    // Cuts one side in two, whichever gives fewer rectangles; else the queries, whose parts need no merging.
    std::vector<Rectangle> by_query, by_key;
    if (queries.size() > 1) {
      const auto middle = MiddleOf(queries, q_step_);
      by_query = Joined(Cut({queries.begin(), middle}, keys), Cut({middle, queries.end()}, keys));
    }
    if (keys.size() > 1) {
      const auto middle = MiddleOf(keys, k_step_);
      by_key = Joined(Cut(queries, {keys.begin(), middle}), Cut(queries, {middle, keys.end()}));
    }
    if (by_query.empty()) return by_key;
    if (by_key.empty()) return by_query;
    return by_query.size() <= by_key.size() ? by_query : by_key;
  }

  static std::vector<Rectangle> Joined(std::vector<Rectangle> first, const std::vector<Rectangle>& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }

  // Whether the rows of the segments, which are in the order of their rows, continue each other; the
  // positions too where they count.
  bool Continue(const Segments& segments, std::int32_t step) const {
    for (std::size_t i = 1; i < segments.size(); ++i) {
      const Segment &last = segments[i - 1], &next = segments[i];
      if (next.row != last.row + std::int64_t{last.length} * step) return false;
      if (by_position_ && next.position != last.position + last.length) return false;
    }
    return true;
  }

  // Where to cut the segments in two: where they do not continue each other, as near to the middle as
  // possible; else between two ranks' parts, which are of two segments each.
  Segments::const_iterator MiddleOf(const Segments& segments, std::int32_t step) const {
    const auto half = static_cast<std::ptrdiff_t>(segments.size() / 2);
    std::ptrdiff_t best = half > 1 ? half / 2 * 2 : half;
    std::ptrdiff_t distance = -1;
    for (std::size_t i = 1; i < segments.size(); ++i) {
      if (Continue({segments[i - 1], segments[i]}, step)) continue;
      const std::ptrdiff_t off = std::abs(static_cast<std::ptrdiff_t>(i) - half);
      if (distance >= 0 && off >= distance) continue;
      best = static_cast<std::ptrdiff_t>(i);
      distance = off;
    }
    return segments.begin() + best;
  }

  const Band band_;
  const std::int32_t q_step_, k_step_;
  const bool by_position_;
  std::map<Sides, std::vector<Rectangle>> known_;
};

// Joins equal rectangles of different sequences whose rows are at equal distances.
class Batcher {
 public:
  explicit Batcher(bool by_position) : by_position_(by_position) {}

  // Rectangles of one sequence, in a fixed order.
  void Add(const std::vector<Rectangle>& rectangles) {
    std::map<Shape, int> seen;
    for (const Rectangle& rectangle : rectangles) {
      const Shape shape = ShapeOf(rectangle);
      Add(rectangle, {shape, seen[shape]++});
    }
  }
  std::vector<Rectangle> Take() { return std::move(batches_); }

 private:
  // What all entries of a batch share.
  using Shape = std::tuple<std::int64_t, std::int64_t, std::int32_t, std::int32_t, std::int64_t, std::int64_t,
                           std::int32_t>;

  Shape ShapeOf(const Rectangle& r) const {
    if (!by_position_) return {r.queries, r.keys, r.low, r.high, 0, 0, 0};
    return {r.queries, r.keys, r.low, r.high, r.q_position, r.k_position, r.diagonal};
  }

  void Add(const Rectangle& next, const std::pair<Shape, int>& key) {
    const auto found = open_.find(key);
    if (found != open_.end()) {
      Rectangle& batch = batches_[found->second];
      const std::int64_t q_stride = (next.q_row - batch.q_row) / batch.batch,
                         k_stride = (next.k_row - batch.k_row) / batch.batch;
      const auto sequences = static_cast<std::int32_t>((next.sequence - batch.sequence) / batch.batch);
      const bool even = batch.q_row + q_stride * batch.batch == next.q_row &&
                        batch.k_row + k_stride * batch.batch == next.k_row &&
                        (!by_position_ || batch.sequence + sequences * batch.batch == next.sequence);
      const bool as_before = batch.batch == 1 || (q_stride == batch.q_stride && k_stride == batch.k_stride &&
                                                  (!by_position_ || sequences == batch.sequence_stride));
      if (even && as_before && q_stride > 0 && k_stride > 0) {
        batch.q_stride = q_stride;
        batch.k_stride = k_stride;
        batch.sequence_stride = sequences;
        ++batch.batch;
        return;
      }
    }
    open_[key] = batches_.size();
    batches_.push_back(next);
  }

  const bool by_position_;
  std::vector<Rectangle> batches_;
  std::map<std::pair<Shape, int>, std::size_t> open_;  // the last batch of each shape
};

// Returns the next sequence's segments of a layout, in the order of their rows.
Segments Take(const Layout& layout, std::size_t& at, std::int32_t sequence) {
  while (at < layout.segments.size() && layout.segments[at].sequence < sequence) ++at;
  Segments taken;
  for (; at < layout.segments.size() && layout.segments[at].sequence == sequence; ++at)
    taken.push_back(layout.segments[at]);
  std::sort(taken.begin(), taken.end(), [](const Segment& a, const Segment& b) { return a.row < b.row; });
  return taken;
}

}  // namespace

std::vector<Rectangle> CutIntoRectangles(const Layout& query, const Layout& key,
                                         const std::vector<Band>& bands, bool by_position) {
  Batcher batcher(by_position);
  std::size_t query_at = 0, key_at = 0;
  while (query_at < query.segments.size()) {
    const std::int32_t sequence = query.segments[query_at].sequence;
    SequenceCutter cutter(bands.at(static_cast<std::size_t>(sequence)), query.row_step, key.row_step,
                          by_position);
    Segments queries = Take(query, query_at, sequence);
    batcher.Add(cutter.Cut(std::move(queries), Take(key, key_at, sequence)));
  }
  return batcher.Take();
}

std::vector<Rectangle> Batched(const std::vector<Rectangle>& rectangles) {
  Batcher batcher(false);
  for (const Rectangle& rectangle : rectangles) batcher.Add({rectangle});
  return batcher.Take();
}

std::vector<Rectangle> Unbatched(const std::vector<Rectangle>& rectangles) {
  std::vector<Rectangle> entries;
  for (const Rectangle& rectangle : rectangles) {
    Rectangle entry = rectangle;
    entry.batch = 1;
    entry.q_stride = entry.k_stride = 0;
    for (std::int64_t b = 0; b < rectangle.batch; ++b) {
      entries.push_back(entry);
      entry.q_row += rectangle.q_stride;
      entry.k_row += rectangle.k_stride;
    }
  }
  return entries;
}

std::vector<Rectangle> SplitTall(const Rectangle& from, std::int32_t q_step, std::int32_t k_step) {
  std::vector<Rectangle> parts;
  Rectangle rest = from;
  while (rest.queries > rest.keys && !rest.full()) {
    Rectangle first = rest;
    first.queries = rest.keys;
    parts.push_back(Trim(first, rest.low, rest.high, q_step, k_step));
    const std::int64_t cut = rest.keys;
    SkipQueries(rest, cut, q_step);
    rest.queries -= cut;
    rest = Trim(rest, rest.low == -kOpen ? -kFar : rest.low + cut,
                rest.high == kOpen ? kFar : rest.high + cut, q_step, k_step);
  }
  if (!parts.empty()) parts.push_back(rest);
  return parts;
}

std::vector<Rectangle> SplitSquare(const Rectangle& from, std::int32_t q_step, std::int32_t k_step) {
  if (from.low != -kOpen || from.high == kOpen || (from.high == 0 && from.queries == from.keys)) return {};
  const std::int64_t seen_by_all = from.high, side = from.keys - seen_by_all;
  std::vector<Rectangle> parts;
  const auto full = [&](std::int64_t row, std::int64_t queries, std::int64_t keys) {
    if (queries <= 0 || keys <= 0) return;
    Rectangle part = from;
    SkipQueries(part, row, q_step);
    part.queries = queries;
    part.keys = keys;
    part.high = kOpen;
    parts.push_back(part);
  };
  full(side, from.queries - side, from.keys);
  full(0, side, seen_by_all);
  Rectangle square = from;
  SkipKeys(square, seen_by_all, k_step);
  square.queries = square.keys = side;
  parts.push_back(Trim(square, -kFar, 0, q_step, k_step));
  return parts;
}

}  // namespace cppool::kernels::table
