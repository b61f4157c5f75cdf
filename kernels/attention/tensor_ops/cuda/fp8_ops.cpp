#include "kernels/attention/problem/transposed.h"
#include "kernels/attention/tensor_ops/cuda/launch.h"
#include "kernels/attention/tensor_ops/cuda/tensor_ops.h"

namespace cppool::kernels::cuda {
namespace {

class CudaFp8Ops : public Fp8Ops {
 public:
  explicit CudaFp8Ops(cppool_runtime* rt) : rt_(rt) {}

  void Amax(const TokenRows& rows, std::int64_t columns, TensorRef from, float* amax,
            cppool_stream stream) override {
    LaunchAmax(ViewOf(rows), columns, from, amax, AsCuda(stream));
  }

  void MakeScale(Dtype format, const float* amax, Fp8Scale* to, cppool_stream stream) override {
    LaunchMakeScale(format, amax, to, AsCuda(stream));
  }

  void Cast(const TokenRows& rows, std::int64_t columns, TensorRef from, const Fp8Scale* scale,
            TensorOut payload, cppool_stream stream) override {
    LaunchCast(ViewOf(rows), columns, from, scale, payload, AsCuda(stream));
  }

  void Dequantize(const TokenRows& rows, std::int64_t columns, TensorRef payload, TensorOut to,
                  cppool_stream stream) override {
    LaunchDequantize(ViewOf(rows), columns, payload, to, AsCuda(stream));
  }

  void Delta(const TokenRows& rows, int heads, int dim, TensorRef out, TensorRef dout, float* delta,
             cppool_stream stream) override {
    LaunchScaledDelta(ViewOf(rows), heads, dim, out, dout, delta, AsCuda(stream));
  }

  std::unique_ptr<TokenRows> Blocks(const Layout& layout, const std::vector<std::int64_t>& chunk,
                                    cppool_stream stream) override {
    std::vector<RowTile> tiles;
    for (const Segment& block : MxBlocks(layout, chunk)) tiles.push_back({block.row, block.length});
    return std::make_unique<CudaTokenRows>(rt_, std::move(tiles), layout.row_step, stream);
  }

  void CastBlocks(const TokenRows& blocks, MxAxis axis, int heads, int dim, TensorRef from,
                  const MxTensor& to, cppool_stream stream) override {
    LaunchCastBlocks(ViewOf(blocks), axis, heads, dim, from, to, AsCuda(stream));
  }

  void DequantizeBlocks(const TokenRows& blocks, MxAxis axis, int heads, int dim, const MxTensor& from,
                        TensorOut to, cppool_stream stream) override {
    LaunchDequantizeBlocks(ViewOf(blocks), axis, heads, dim, from, to, AsCuda(stream));
  }

  std::unique_ptr<TokenRows> Slots(const Layout& layout, cppool_stream stream) override {
    return std::make_unique<CudaTokenRows>(rt_, SlotTilesOf(layout), layout.row_step, stream);
  }

  void Transpose(const TokenRows& slots, int heads, int dim, TensorRef payload, std::uint8_t* to,
                 cppool_stream stream) override {
    LaunchTranspose(ViewOf(slots), heads, dim, payload, to, AsCuda(stream));
  }

 private:
  cppool_runtime* rt_;
};

}  // namespace

std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime) { return std::make_unique<CudaFp8Ops>(runtime); }

}  // namespace cppool::kernels::cuda
