// Token rows in device memory, as the kernels of the tensor operations get them; and their owner.
#pragma once

#include <cuda_runtime.h>

#include <utility>
#include <vector>

#include "kernels/attention/problem/row_tiles.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/runtime.h"

namespace cppool::kernels::cuda {

struct RowView {
  const RowTile* tiles;
  int count;
  int step;  // distance between consecutive rows of a tile
};

inline cudaStream_t AsCuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

class CudaTokenRows : public TokenRows {
 public:
  CudaTokenRows(cppool_runtime* rt, std::vector<RowTile> tiles, int step, cppool_stream stream)
      : tiles_(std::move(tiles)), view_{nullptr, static_cast<int>(tiles_.size()), step} {
    if (tiles_.empty()) return;
    device_ = Buffer(rt, tiles_.size() * sizeof(RowTile), stream);
    Check(rt, rt->copy(rt, device_.get(), tiles_.data(), device_.bytes(), stream));
    view_.tiles = device_.get<const RowTile>();
  }
  const RowView& view() const { return view_; }

 private:
  std::vector<RowTile> tiles_;  // the copy may still read it when the constructor returns
  Buffer device_;
  RowView view_;
};

inline const RowView& ViewOf(const TokenRows& rows) { return static_cast<const CudaTokenRows&>(rows).view(); }

}  // namespace cppool::kernels::cuda
