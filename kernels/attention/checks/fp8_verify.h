// What fp8 adds to the checks of a case: the bits of what was quantized, and what the oracle needs of the
// quantized problem.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/checks/fp8_bits.h"
#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "kernels/attention/tensors/tensor_set.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// The quantized problem over all ranks; the tensors are device memory.
struct Fp8Problem {
  bool backward = false;  // in fp8
  TensorRef q, k, v;      // of the forward pass
  // The backward pass reads these.
  TensorRef q_of_p, k_of_p, v_of_dp, dout, q_of_dk, k_of_dq, dout_of_dv;
  const float* delta = nullptr;  // [all rows of q, heads]
  double p_scale = 0, ds_scale = 0, out_scale = 0, gradient_scale = 0;
  bool ds_blocks = false;
};

// The delta of all ranks' rows, [all rows of q, heads], 0 where a row has no token. Every rank calls it at
// once.
Buffer GatherDelta(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
                   const Fp8Step& step);

// Used on the rank's thread; every rank calls the same methods in the same order.
class Fp8Verifier {
 public:
  // `step`: of this rank's run; `reference`: of the run without CP, whose inputs are `global`; `delta`: from
  // GatherDelta, NULL without a backward pass. All outlive it.
  Fp8Verifier(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
              const TensorSet& local, const TensorSet& global, const Fp8Step& step, const Fp8Step& reference,
              const float* delta, AttentionReport& report);

  // Payloads, scales and exponents of q, k, v and dout as this rank's kernels read them are those that the
  // whole inputs give, bit for bit; every rank has the same scales; O was cast as its scale says; delta is
  // rowsum(dO * O).
  void CheckBits();
  // The problem is valid while this and the arguments live.
  const Fp8Problem& problem() const { return problem_; }

  // Returns what it and GatherDelta allocate on a rank, but for numbers of rows, which AttentionBytes counts.
  static double Bytes(const AttentionSpec& spec, int world_size);
  // The most host memory that CheckBits takes at a time beside that: numbers of rows.
  static double HostBytes(const AttentionSpec& spec, int world_size);

 private:
  using Tally = BitsTally;
  // Rows in device memory, for a check.
  struct DeviceRows {
    fp8_bits::Rows view;
    Buffer rows, whole;
  };
  template <typename T>
  Buffer ToDevice(const std::vector<T>& values) const;
  // `whole`: empty where the check has no use for it.
  DeviceRows RowsToDevice(const std::vector<std::int64_t>& rows,
                          const std::vector<std::int64_t>& whole) const;
  DeviceRows RowsOf(const QuantizedOperand& operand) const;
  Tally Run(const BitsCheck& check) const;
  TensorRef Input(InputTensor tensor) const { return {global_.get(tensor), Dtype::kBf16}; }
  // Returns the scale that all of these whole inputs give together.
  float ExpectedScale(Dtype format, std::initializer_list<InputTensor> tensors) const;
  Tally CheckScale(const Fp8Scale* stored, float expected) const;
  fp8_bits::Operand OperandOf(const QuantizedOperand& operand, const fp8_bits::Rows& rows) const;
  Tally CheckOperand(const QuantizedOperand& operand, float scale) const;
  Tally CheckBlocks(const QuantizedOperand& operand) const;
  Tally CheckSameScales() const;
  Tally CheckOut() const;
  Tally CheckDelta() const;
  void Report(CheckedTensor tensor, const char* against, const Tally& tally);

  cppool_runtime* rt_;
  const AttentionSpec& spec_;
  CheckKernels& kernels_;
  const TensorSet& local_;
  const TensorSet& global_;
  const Fp8Step& step_;
  const Fp8Step& reference_;
  AttentionReport& report_;
  Group world_;
  RankTokens all_, mine_;
  Fp8Problem problem_;
};

}  // namespace cppool::kernels
