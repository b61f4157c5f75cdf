// Attention in fp64 on the host, token by token, with random tensors, device copies and comparisons for the
// tests.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/backend.h"
#include "kernels/runtime.h"

namespace cppool::kernels::test {

// One rank on the first GPU with a family's kernels, the preferred one's by default; for the length of a
// test.
class Device {
 public:
  explicit Device(const AttentionFamily& family = *AttentionFamilies("cuda").front());
  ~Device();
  cppool_runtime* rt() const { return rank_->seam(); }
  cppool_stream stream() const { return rt()->stream; }
  AttentionKernel& kernel() const { return *kernels_->attention; }
  TensorOps& ops() const { return *kernels_->ops; }
  const AttentionFamily& family() const { return kernels_->family; }
  void Wait() const { Check(rt(), rt()->stream_synchronize(rt(), stream())); }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<RankRuntime> rank_;
  std::unique_ptr<RankKernels> kernels_;
};

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
  BiasType bias = BiasType::kNone;
  BiasShape bias_shape{};
  bool softmax_offset = false;
  bool max_logit = false;
  bool deterministic = false;  // the same bits on every run
};

// A bias of the problem's shape: [batch or 1, heads of the call or 1, queries or 1, keys].
struct BiasDims {
  explicit BiasDims(const Problem& problem);
  std::size_t count() const { return static_cast<std::size_t>(batch * heads * queries * keys); }
  std::int64_t batch, heads, queries, keys;
  std::int64_t batch_stride, head_stride, query_stride;  // in elements, 0 where broadcast
};

// The dtype of all tensors; the kernels support only one for all.
inline Dtype DtypeOf(const KernelShape& shape) { return shape.dtypes.q; }

struct Inputs {
  Values q, k, v, dout;     // NaN in rows outside segments
  Values bias{};            // NaN for pairs that are not visible; or empty
  Values alibi_slopes{};    // [heads], or empty
  Values softmax_offset{};  // [heads], or empty
};
Inputs MakeInputs(const Problem& problem, unsigned seed);

struct Outputs {
  Values out, lse, dq, dk, dv;  // NaN in rows outside segments
  Values max_logit{};           // [heads], or empty
  Values dbias{}, doffset{};    // of a bias tensor and a softmax offset, or empty

  bool operator==(const Outputs&) const;  // bit by bit
};
// A request for training, with the bias and max_logit of the problem.
KernelRequest RequestOf(const Problem& problem);

Outputs Reference(const Problem& problem, const Inputs& inputs);

// Describes the difference of `got` from `want`, or returns "" if they agree: NaN and infinities must be at
// the same indices, the RMS of the error at most `relative` times the RMS of `want` (or 0.01, if that is
// more), each error at most `outlier` times that. Both RMS are of the elements where `want` is not 0: many
// rows may see nothing.
std::string Difference(const Values& got, const Values& want, double relative, double outlier = 16);

}  // namespace cppool::kernels::test
