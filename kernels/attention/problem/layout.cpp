#include "kernels/attention/layout.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "kernels/attention/fp8_ops.h"
#include "kernels/error.h"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels {
namespace {

// Where each sequence's part begins in a buffer that holds 1/`share` of every room: in tokens for bshd and
// thd, whose parts lie one after another, and in rows for sbhd, whose parts are interleaved.
std::vector<std::int64_t> PartRows(QkvFormat format, const Sequences& sequences, std::int64_t share) {
  std::vector<std::int64_t> rows;
  rows.reserve(sequences.room.size());
  std::int64_t row = 0;
  for (const std::int64_t room : sequences.room) {
    rows.push_back(row);
    row += format == QkvFormat::kSbhd ? 1 : room / share;
  }
  return rows;
}

Layout EmptyLayout(QkvFormat format, const Sequences& sequences, std::int64_t share) {
  Layout layout;
  layout.rows = sequences.rows / share;
  layout.row_step = format == QkvFormat::kSbhd ? static_cast<std::int32_t>(sequences.room.size()) : 1;
  return layout;
}

// The tokens at places [begin, end) of a sequence, which are at `row` of the buffer; places behind the
// sequence's end hold none.
void AddPlaces(std::size_t sequence, std::int64_t length, std::int64_t begin, std::int64_t end,
               std::int64_t row, Layout& layout) {
  end = std::min(end, length);
  if (begin >= end) return;
  layout.segments.push_back({static_cast<std::int32_t>(sequence), static_cast<std::int32_t>(begin),
                             static_cast<std::int32_t>(end - begin), row});
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

Layout GlobalLayout(QkvFormat format, const Sequences& sequences) {
  Layout layout = EmptyLayout(format, sequences, 1);
  const std::vector<std::int64_t> rows = PartRows(format, sequences, 1);
  layout.segments.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    AddPlaces(i, sequences.length[i], 0, sequences.room[i], rows[i], layout);
  }
  return layout;
}

Layout RankLayout(QkvFormat format, const Sequences& sequences, int world_size, int rank) {
  if (world_size == 1) return GlobalLayout(format, sequences);
  const std::int64_t chunks = 2 * std::int64_t{world_size};
  Layout layout = EmptyLayout(format, sequences, world_size);
  const std::vector<std::int64_t> rows = PartRows(format, sequences, world_size);
  layout.segments.reserve(2 * rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t room = sequences.room[i], length = sequences.length[i];
    if (room % chunks != 0) {
      throw RuntimeError(CPPOOL_INVALID_REQUEST, "a sequence of " + std::to_string(room) +
                                                     " places cannot be cut into 2 * " +
                                                     std::to_string(world_size) + " equal chunks");
    }
    const std::int64_t chunk = room / chunks, low = rank * chunk, high = (chunks - 1 - rank) * chunk;
    AddPlaces(i, length, low, low + chunk, rows[i], layout);
    AddPlaces(i, length, high, high + chunk, rows[i] + chunk * layout.row_step, layout);
  }
  return layout;
}

std::vector<std::int64_t> PaddingRows(const Layout& layout) {
  std::vector<bool> held(static_cast<std::size_t>(layout.rows), false);
  for (const Segment& segment : layout.segments) {
    for (std::int64_t i = 0; i < segment.length; ++i) {
      held[static_cast<std::size_t>(segment.row + i * layout.row_step)] = true;
    }
  }
  std::vector<std::int64_t> rows;
  for (std::int64_t row = 0; row < layout.rows; ++row) {
    if (!held[static_cast<std::size_t>(row)]) rows.push_back(row);
  }
  return rows;
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

std::vector<std::int64_t> MxChunks(const Sequences& sequences, int world_size) {
  std::vector<std::int64_t> chunks;
  for (const std::int64_t room : sequences.room) chunks.push_back(room / (2 * std::int64_t{world_size}));
  return chunks;
}

std::vector<Segment> MxBlocks(const Layout& layout, const std::vector<std::int64_t>& chunk) {
  std::vector<Segment> blocks;
  for (const Segment& segment : layout.segments) {
    const std::int64_t room = chunk[static_cast<std::size_t>(segment.sequence)];
    std::int32_t length = 0;
    for (std::int32_t done = 0; done < segment.length; done += length) {
      const std::int32_t position = segment.position + done;
      const std::int64_t in_chunk = position % room;
      const std::int64_t most = std::min(room - in_chunk, kMxBlock - in_chunk % kMxBlock);
      length = static_cast<std::int32_t>(std::min<std::int64_t>(segment.length - done, most));
      blocks.push_back(
          {segment.sequence, position, length, segment.row + std::int64_t{done} * layout.row_step});
    }
  }
  return blocks;
}

std::int64_t MxExponents(MxAxis axis, std::int64_t rows, std::int64_t blocks, int heads, int dim) {
  return axis == MxAxis::kDim ? rows * heads * (dim / kMxBlock) : blocks * heads * dim;
}

}  // namespace cppool::kernels
