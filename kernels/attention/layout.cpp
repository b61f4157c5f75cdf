#include "kernels/attention/layout.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "kernels/error.h"

namespace cppool::kernels {
namespace {

// `count` tokens from `position`, which start `offset` tokens into each sequence's part of a buffer with
// `held` tokens per sequence.
void AddChunks(QkvFormat format, std::int64_t batch, std::int64_t held, std::int64_t offset,
               std::int64_t position, std::int64_t count, Layout& layout) {
  if (count == 0) return;
  for (std::int64_t b = 0; b < batch; ++b) {
    layout.segments.push_back({static_cast<std::int32_t>(b), static_cast<std::int32_t>(position),
                               static_cast<std::int32_t>(count),
                               format == QkvFormat::kSbhd ? offset * batch + b : b * held + offset});
  }
}

void SortSegments(std::vector<Segment>& segments) {
  const auto before = [](const Segment& a, const Segment& b) {
    return std::tie(a.sequence, a.position) < std::tie(b.sequence, b.position);
  };
  if (!std::is_sorted(segments.begin(), segments.end(), before)) {
    std::stable_sort(segments.begin(), segments.end(), before);
  }
}

}  // namespace

Layout GlobalLayout(QkvFormat format, std::int64_t batch, std::int64_t seqlen) {
  Layout layout;
  layout.rows = batch * seqlen;
  layout.row_step = format == QkvFormat::kSbhd ? static_cast<std::int32_t>(batch) : 1;
  layout.segments.reserve(static_cast<std::size_t>(batch));
  AddChunks(format, batch, seqlen, 0, 0, seqlen, layout);
  return layout;
}

Layout RankLayout(QkvFormat format, std::int64_t batch, std::int64_t seqlen, int world_size, int rank) {
  if (world_size == 1) return GlobalLayout(format, batch, seqlen);
  if (seqlen % (2 * std::int64_t{world_size}) != 0) {
    throw RuntimeError(CPPOOL_INVALID_REQUEST, "a sequence of " + std::to_string(seqlen) +
                                                   " tokens cannot be cut into 2 * " +
                                                   std::to_string(world_size) + " equal chunks");
  }
  const std::int64_t chunk = seqlen / (2 * std::int64_t{world_size});
  Layout layout;
  layout.rows = batch * 2 * chunk;
  layout.row_step = format == QkvFormat::kSbhd ? static_cast<std::int32_t>(batch) : 1;
  layout.segments.reserve(static_cast<std::size_t>(2 * batch));
  AddChunks(format, batch, 2 * chunk, 0, rank * chunk, chunk, layout);
  AddChunks(format, batch, 2 * chunk, chunk, (2 * world_size - 1 - rank) * chunk, chunk, layout);
  SortSegments(layout.segments);
  return layout;
}

Layout Concatenate(const std::vector<Layout>& parts) {
  Layout whole;
  if (parts.empty()) return whole;
  whole.row_step = parts.front().row_step;
  std::size_t count = 0;
  for (const Layout& part : parts) count += part.segments.size();
  whole.segments.reserve(count);
  for (const Layout& part : parts) {
    if (part.row_step != whole.row_step) {
      throw RuntimeError(CPPOOL_INTERNAL, "parts of a buffer with different row steps");
    }
    for (Segment segment : part.segments) {
      segment.row += whole.rows;
      whole.segments.push_back(segment);
    }
    whole.rows += part.rows;
  }
  SortSegments(whole.segments);
  return whole;
}

std::vector<std::int64_t> RowMap(const Layout& from, const Layout& to) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(from.rows), -1);
  auto target = to.segments.begin();
  for (const Segment& segment : from.segments) {
    for (std::int32_t done = 0; done < segment.length;) {
      const std::int32_t position = segment.position + done;
      while (target != to.segments.end() &&
             (target->sequence < segment.sequence ||
              (target->sequence == segment.sequence && target->position + target->length <= position))) {
        ++target;
      }
      if (target == to.segments.end() || target->sequence != segment.sequence ||
          target->position > position) {
        throw RuntimeError(CPPOOL_INTERNAL, "token " + std::to_string(position) + " of sequence " +
                                                std::to_string(segment.sequence) +
                                                " is not in the other layout");
      }
      const std::int32_t skip = position - target->position;
      const std::int32_t count = std::min(segment.length - done, target->length - skip);
      for (std::int64_t i = 0; i < count; ++i) {
        rows[static_cast<std::size_t>(segment.row + (done + i) * from.row_step)] =
            target->row + (skip + i) * to.row_step;
      }
      done += count;
    }
  }
  return rows;
}

}  // namespace cppool::kernels
