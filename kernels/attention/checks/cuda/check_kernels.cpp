#include "kernels/attention/checks/cuda/check_kernels.h"

#include "kernels/attention/checks/cuda/launch.h"
#include "kernels/attention/checks/fp8_bits.h"
#include "kernels/attention/checks/oracle_workspace.h"
#include "kernels/runtime.h"

namespace cppool::kernels::cuda {
namespace {

cudaStream_t Cuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

class CudaCheckKernels : public CheckKernels {
 public:
  explicit CudaCheckKernels(cppool_runtime* runtime) : runtime_(runtime) {}

  void Load() override {
    LoadGenerate();
    LoadValues();
    LoadCompare();
    LoadCheckBits();
    LoadOracle();
  }

  void Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim, Dtype dtype,
                void* to, cppool_stream stream, bool uneven) override {
    LaunchGenerate(tensor, seed, layout, heads, dim, dtype, uneven, to, Cuda(stream));
  }

  void GenerateBias(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                    std::int64_t seqlen_kv, Dtype dtype, void* to, cppool_stream stream) override {
    LaunchGenerateBias(seed, batch, heads, seqlen_q, seqlen_kv, dtype, to, Cuda(stream));
  }

  void Digest(const void* data, std::size_t bytes, std::uint64_t* result, cppool_stream stream) override {
    const Buffer partials(runtime_, DigestBlocks(bytes) * sizeof(std::uint64_t), stream);
    LaunchDigest(data, bytes, partials.get<std::uint64_t>(), result, Cuda(stream));
  }

  void CopyRows(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay,
                cppool_stream stream) override {
    LaunchCopyRows(copies, delay, Cuda(stream));
  }

  void RoundValues(Dtype dtype, double* values, std::int64_t count, cppool_stream stream) override {
    LaunchRoundValues(dtype, values, count, Cuda(stream));
  }

  void FillValues(double* values, double value, std::int64_t count, cppool_stream stream) override {
    LaunchFillValues(values, value, count, Cuda(stream));
  }

  void Compare(const CompareArgs& args, CompareStats* result, cppool_stream stream) override {
    const Buffer partials(runtime_, CompareBlocks(args) * sizeof(CompareStats), stream);
    LaunchCompare(args, partials.get<CompareStats>(), result, Cuda(stream));
  }

  void CheckBits(const BitsCheck& check, BitsTally* result, cppool_stream stream) override {
    const Buffer sum(runtime_, sizeof(BitsTally), stream);
    LaunchCheckBits(check, sum.get<BitsTally>(), result, Cuda(stream));
  }

  void Oracle(const OracleArgs& args, cppool_stream stream) override {
    const Buffer workspace(runtime_, OracleWorkspace(ShapeOf(args)), stream);
    LaunchOracle(args, workspace.get<std::byte>(), Cuda(stream));
  }

 private:
  cppool_runtime* runtime_;
};

}  // namespace

std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime) {
  return std::make_unique<CudaCheckKernels>(runtime);
}

}  // namespace cppool::kernels::cuda
