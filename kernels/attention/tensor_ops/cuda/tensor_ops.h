// TensorOps and Fp8Ops on CUDA: memory-bound kernels, the same for every kernel family.
#pragma once

#include <cppool/runtime.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/attention/tensor_ops/cuda/row_view.h"
#include "kernels/error.h"

namespace cppool::kernels::cuda {

// The number of blocks of `block_threads` threads for at least `threads` threads. Throws RuntimeError,
// CPPOOL_UNSUPPORTED, when it exceeds the limit of a grid.
inline unsigned BlocksFor(std::int64_t threads, int block_threads) {
  const std::int64_t blocks = (threads + block_threads - 1) / block_threads;
  if (blocks > 0x7fffffff) throw RuntimeError(CPPOOL_UNSUPPORTED, "a tensor is too large for one kernel");
  return static_cast<unsigned>(blocks);
}

inline bool Aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// fp8.cu. As CudaTensorOps.
std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime);
void LoadFp8Kernels();

// Call everything on the rank's thread, with the rank's device current.
class CudaTensorOps : public TensorOps {
 public:
  // `rt` is the rank's runtime of the CUDA backend and must outlive the result.
  explicit CudaTensorOps(cppool_runtime* rt) : rt_(rt), fp8_(MakeFp8Ops(rt)) {}

  Fp8Ops& fp8() override { return *fp8_; }
  void Load() override {
    if (std::exchange(loaded_, true)) return;
    LoadHeads();
    LoadSums();
    LoadFp8Kernels();
  }
  std::unique_ptr<TokenRows> Rows(const Layout& layout, cppool_stream stream) override {
    return std::make_unique<CudaTokenRows>(rt_, RowTilesOf(layout), layout.row_step, stream);
  }

  // heads.cu
  void SplitHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                  void* to, cppool_stream stream) override;
  void MergeHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                  TensorOut to, cppool_stream stream) override;
  void RoundSum(const std::vector<const float*>& parts, TensorOut to, std::int64_t count,
                cppool_stream stream) override;
  // dim is a multiple of 64, and out and dout are 16-byte aligned.
  void Delta(std::int64_t vectors, int dim, TensorRef out, TensorRef dout, float* delta,
             cppool_stream stream) override;

  // sums.cu: in fp32 with a fixed order of additions.
  void Fill(float* to, float value, std::int64_t count, cppool_stream stream) override;
  void Accumulate(TensorRef from, float* to, std::int64_t count, bool first, cppool_stream stream) override;
  void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override;
  void MaxRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override;
  void CopyStrided(const StridedCopy& copy, cppool_stream stream) override;
  void AddStrided(const StridedSum& sum, cppool_stream stream) override;
  void Merge(const MergeArgs& args, cppool_stream stream) override;
  void AddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                 cppool_stream stream) override;
  void OffsetGradient(const TokenRows& rows, int heads, const float* total, const float* delta,
                      const float* offset, float* gradient, cppool_stream stream) override;

 private:
  static void LoadHeads();
  static void LoadSums();

  cppool_runtime* rt_;
  std::unique_ptr<Fp8Ops> fp8_;
  bool loaded_ = false;
};

}  // namespace cppool::kernels::cuda
