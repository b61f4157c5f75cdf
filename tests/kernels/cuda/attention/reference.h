// Attention in fp64 on the host, token by token, and what the tests need around it: random tensors, device copies, comparisons.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/attention_kernels.h"
#include "kernels/backend.h"
#include "kernels/runtime.h"

namespace cppool::kernels::testing {

// One rank on the first GPU, for the length of a test.
class Device {
 public:
  Device();
  ~Device();
  cppool_runtime* rt() const { return rank_->seam(); }
  cppool_stream stream() const { return rt()->stream; }
  AttentionKernels& kernels() const { return *kernels_; }
  void Wait() const { Check(rt(), rt()->stream_synchronize(rt(), stream())); }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<RankRuntime> rank_;
  std::unique_ptr<AttentionKernels> kernels_;
};

// Whether there is a GPU; a test without one says so and ends.
bool HaveDevice();

// Values of a tensor [rows, heads, dim], in order; for 16-bit dtypes already rounded to them.
using Values = std::vector<float>;

Values Random(std::mt19937& random, std::size_t count, Dtype dtype);

// Device memory holding `values` in `dtype`.
Buffer ToDevice(const Device& device, const Values& values, Dtype dtype);
// Device memory for `count` values, all of them NaN.
Buffer Poisoned(const Device& device, std::size_t count, Dtype dtype);
Values ToHost(const Device& device, const Buffer& buffer, std::size_t count, Dtype dtype);

struct Problem {
  KernelShape shape;
  Layout query;
  Layout key;
  std::vector<Band> bands;
};

struct Inputs {
  Values q, k, v, dout;  // NaN in rows of no segment
};
Inputs MakeInputs(const Problem& problem, unsigned seed);

struct Outputs {
  Values out, lse, dq, dk, dv;  // NaN in rows of no segment
};
Outputs Reference(const Problem& problem, const Inputs& inputs);

// What is wrong with `got` against `want`, or nothing: NaN and infinities must be in the same places, the RMS of the error at most
// `relative` times the RMS of `want` (or 0.01, if that is more), each error at most 16 times that.
std::string Difference(const Values& got, const Values& want, double relative);

}  // namespace cppool::kernels::testing
