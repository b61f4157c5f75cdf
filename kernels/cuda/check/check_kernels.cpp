#include "check/check_kernels.h"

#include "check/launch.h"
#include "kernels/runtime.h"

namespace cppool::kernels::cuda {
namespace {

cudaStream_t Cuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

class CudaCheckKernels : public CheckKernels {
 public:
  explicit CudaCheckKernels(cppool_runtime* runtime) : runtime_(runtime) {}

  void Load() override {
    LoadGenerate();
    LoadCompare();
    LoadOracle();
  }

  void Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim, Dtype dtype,
                void* to, cppool_stream stream) override {
    LaunchGenerate(tensor, seed, layout, heads, dim, dtype, to, Cuda(stream));
  }

  void Compare(const CompareArgs& args, CompareStats* result, cppool_stream stream) override {
    const Buffer partials(runtime_, CompareBlocks(args) * sizeof(CompareStats), stream);
    LaunchCompare(args, partials.get<CompareStats>(), result, Cuda(stream));
  }

  std::size_t OracleWorkspace(const OracleArgs& args) const override { return OracleBytes(args); }

  void Oracle(const OracleArgs& args, cppool_stream stream) override {
    const Buffer workspace(runtime_, OracleBytes(args), stream);
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
