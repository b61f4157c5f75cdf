#include "kernels/attention/families/table/trial_tensors.h"

#include <algorithm>

namespace cppool::kernels::table {
namespace {

// Which sequences' rows a tensor has.
enum class Of { kQueries, kKeys };

Of SideOf(CallTensor which) {
  return which == kK || which == kV || which == kDk || which == kDv ? Of::kKeys : Of::kQueries;
}

// [batch, rows, heads, dim] or, of one value per row, [batch, heads, rows]: there a row for each query, or
// for each head.
TrialRows RowsOf(const TensorForm& from) {
  const std::int64_t size = from.element_bytes();
  const auto& shape = from.shape;
  const bool per_query = from.ndim == 3 && from.strides[1] == 1;
  const std::size_t rows = per_query ? 2 : 1;
  const std::int64_t in_row = from.ndim == 4 ? shape[2] * shape[3] : per_query ? shape[1] : shape[2];
  return {0, shape[0], shape[rows], size * in_row, size * from.strides[0], size * from.strides[rows]};
}

// [batch, heads, queries, keys]: a part for each head.
std::vector<TrialRows> BiasRows(const TensorForm& from) {
  std::vector<TrialRows> parts;
  const std::int64_t size = from.element_bytes();
  for (std::int64_t head = 0; head < from.shape[1]; ++head) {
    parts.push_back({size * head * from.strides[1], from.shape[0], from.shape[2], size * from.shape[3],
                     size * from.strides[0], size * from.strides[2]});
  }
  return parts;
}

// Divides the rows of all sequences into those of each of them.
std::vector<TrialRows> SequenceRows(const TensorForm& from, const CallArea& area, Of side) {
  std::vector<TrialRows> parts;
  const TrialRows all = RowsOf(from);
  const bool row_per_head = from.ndim == 3 && from.strides[1] != 1;
  for (const Rectangle& sequence : area.sequences) {
    const std::int64_t first =
        side == Of::kQueries ? sequence.q_row - area.where.q_row : sequence.k_row - area.where.k_row;
    const std::int64_t length = side == Of::kQueries ? sequence.queries : sequence.keys;
    TrialRows part = all;
    if (row_per_head) {
      part.offset = first * from.element_bytes();
      part.row_bytes = length * from.element_bytes();
    } else {
      part.offset = first * all.row_stride;
      part.rows = length;
    }
    parts.push_back(part);
  }
  return parts;
}

}  // namespace

std::vector<TrialTensor> TrialTensors(const CallForm& form, const CallArea& area, const CallData& data) {
  std::vector<TrialTensor> tensors;
  for (std::size_t i = 0; i < kCallTensors; ++i) {
    const TensorForm& from = form.tensors[i];
    if (from.ndim == 0) continue;
    const auto which = static_cast<CallTensor>(i);
    TrialTensor to;
    to.name = NameOf(which);
    to.written = Writes(form.backward, which);
    to.data = data[i];
    if (from.ndim == 1) {
      to.parts = {{0, 1, 1, from.shape[0] * from.element_bytes(), 0, 0}};
    } else if (which == kBias || which == kDbias) {
      to.parts = BiasRows(from);
    } else if (area.sequences.empty()) {
      to.parts = {RowsOf(from)};
    } else {
      to.parts = SequenceRows(from, area, SideOf(which));
    }
    tensors.push_back(std::move(to));
  }
  return tensors;
}

}  // namespace cppool::kernels::table
