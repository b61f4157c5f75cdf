#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"

#include <utility>

#include "kernels/attention/tensor_ops/cuda/launch.h"
#include "kernels/runtime.h"

namespace cppool::kernels::cuda {
namespace {

class CudaTensorOps : public TensorOps {
 public:
  explicit CudaTensorOps(cppool_runtime* rt) : rt_(rt), fp8_(MakeFp8Ops(rt)) {}

  Fp8Ops& fp8() override { return *fp8_; }

  void Load() override {
    if (std::exchange(loaded_, true)) return;
    LoadHeadKernels();
    LoadSums();
    LoadFp8Kernels();
  }

  std::unique_ptr<TokenRows> Rows(const Layout& layout, cppool_stream stream) override {
    return std::make_unique<CudaTokenRows>(rt_, RowTilesOf(layout), layout.row_step, stream);
  }

  void SplitHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                  void* to, cppool_stream stream) override {
    LaunchSplitHeads(from.dtype, rows, heads, dim, ranges, from.data, to, AsCuda(stream));
  }

  void MergeHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                  TensorOut to, cppool_stream stream) override {
    LaunchMergeHeads(from.dtype, to.dtype, rows, heads, dim, ranges, from.data, to.data, AsCuda(stream));
  }

  void Fill(float* to, float value, std::int64_t count, cppool_stream stream) override {
    LaunchFill(to, value, count, AsCuda(stream));
  }

  void Accumulate(TensorRef from, float* to, std::int64_t count, bool first, cppool_stream stream) override {
    LaunchAccumulate(from.dtype, from.data, to, count, first, AsCuda(stream));
  }

  void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override {
    LaunchSumRows(from, rows, columns, to, AsCuda(stream));
  }

  void MaxRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
               cppool_stream stream) override {
    LaunchMaxRows(from, rows, columns, to, AsCuda(stream));
  }

  void CopyStrided(const StridedCopy& copy, cppool_stream stream) override {
    LaunchCopyStrided(copy, AsCuda(stream));
  }

  void AddStrided(const StridedSum& sum, cppool_stream stream) override {
    LaunchAddStrided(sum, AsCuda(stream));
  }

  void RoundSum(const std::vector<const float*>& parts, TensorOut to, std::int64_t count,
                cppool_stream stream) override {
    LaunchRoundSum(parts, to.dtype, to.data, count, AsCuda(stream));
  }

  void Merge(const MergeArgs& args, cppool_stream stream) override {
    LaunchMerge(ViewOf(*args.rows), args, AsCuda(stream));
  }

  void Delta(std::int64_t vectors, int dim, TensorRef out, TensorRef dout, float* delta,
             cppool_stream stream) override {
    if (out.dtype != dout.dtype)
      throw RuntimeError(CPPOOL_INTERNAL, "tensor operations: delta of out and dout of different dtypes");
    LaunchDelta(out.dtype, vectors, dim, out.data, dout.data, delta, AsCuda(stream));
  }

  void AddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                 cppool_stream stream) override {
    LaunchAddOffset(rows, heads, lse, offset, total, AsCuda(stream));
  }

  void OffsetGradient(const TokenRows& rows, int heads, const float* total, const float* delta,
                      const float* offset, float* gradient, cppool_stream stream) override {
    LaunchOffsetGradient(ViewOf(rows), heads, total, delta, offset, gradient, AsCuda(stream));
  }

 private:
  cppool_runtime* rt_;
  std::unique_ptr<Fp8Ops> fp8_;
  bool loaded_ = false;
};

}  // namespace

std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime) {
  return std::make_unique<CudaTensorOps>(runtime);
}

}  // namespace cppool::kernels::cuda
