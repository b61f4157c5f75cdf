#include <algorithm>

#include "kernels/attention/fp8_ops.h"
#include "kernels/numerics/fp8.h"

namespace cppool::kernels {

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
