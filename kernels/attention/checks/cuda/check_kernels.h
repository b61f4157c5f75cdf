// CheckKernels on CUDA.
#pragma once

#include <cppool/runtime.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/check_kernels.h"

namespace cppool::kernels::cuda {

// Call it and its methods on the rank's thread, with the rank's device current. Holds no device memory
// between calls. `rt` must outlive it. A result is page-locked host memory, written by the device.
class CudaCheckKernels : public CheckKernels {
 public:
  explicit CudaCheckKernels(cppool_runtime* rt) : rt_(rt) {}

  void Load() override {
    LoadGenerate();
    LoadValues();
    LoadCompare();
    LoadBits();
    LoadOracle();
  }
  // generate.cu
  void Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim, Dtype dtype,
                void* to, cppool_stream stream, bool uneven) override;
  void GenerateBias(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                    std::int64_t seqlen_kv, Dtype dtype, void* to, cppool_stream stream) override;
  // values.cu
  void Digest(const void* data, std::size_t bytes, std::uint64_t* result, cppool_stream stream) override;
  void CopyRows(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay,
                cppool_stream stream) override;
  void RoundValues(Dtype dtype, double* values, std::int64_t count, cppool_stream stream) override;
  void FillValues(double* values, double value, std::int64_t count, cppool_stream stream) override;
  // compare.cu, bits.cu, oracle.cu
  void Compare(const CompareArgs& args, CompareStats* result, cppool_stream stream) override;
  void CheckBits(const BitsCheck& check, BitsTally* result, cppool_stream stream) override;
  void Oracle(const OracleArgs& args, cppool_stream stream) override;

 private:
  static void LoadGenerate();
  static void LoadValues();
  static void LoadCompare();
  static void LoadBits();
  static void LoadOracle();

  cppool_runtime* rt_;
};

inline cudaStream_t Cuda(cppool_stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace cppool::kernels::cuda
