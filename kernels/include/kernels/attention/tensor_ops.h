// What schedules do with tensors beside attention itself: heads moved for an all-to-all, sums, rounding,
// parts of a softmax merged, the softmax offset. One implementation for each runtime, whatever the kernel
// family.
//
// Tensors, pointers, threads and errors as in attention_kernel.h. Every sum has one fixed order: the same
// bits on every run. No call allocates or waits after Load.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/tensor.h"

namespace cppool::kernels {

// The heads that one rank of an a2a group computes. Key/value heads may go to several
// ranks (GQA and MQA with fewer key/value heads than ranks): their gradients are then summed.
struct HeadRange {
  int begin = 0;
  int count = 0;
};

// The rows of a buffer that hold a token, in device memory. Destroy it only after the work that uses it is
// done.
class TokenRows {
 public:
  virtual ~TokenRows() = default;
};

// One block's out and lse, to be merged into what is there of the blocks before. All [rows, heads, ...].
struct MergeArgs {
  const TokenRows* rows = nullptr;  // other rows are neither read nor written
  int heads = 1;
  int dim = 0;                            // of out
  TensorRef part;                         // the block's normalised output
  const float* part_lse = nullptr;        // -inf: the part is not read
  float* accumulator = nullptr;           // normalised output so far, fp32; may be NULL when first and last
  float* lse = nullptr;                   // natural logarithm, over keys alone
  TensorOut out;                          // written when last
  const float* softmax_offset = nullptr;  // [heads], as in ForwardArgs; applied when last. NULL: none
  bool first = true;                      // there is nothing yet: accumulator and lse are not read
  bool last = true;                       // writes `out` instead of the accumulator
};

// fp32 elements copied between two places of different strides, which are in elements.
struct StridedCopy {
  std::int64_t extent[3] = {};
  const float* from = nullptr;
  std::int64_t from_strides[3] = {};
  float* to = nullptr;
  std::int64_t to_strides[3] = {};
  float factor = 1;  // to = factor * from
};

// Elements added to fp32 ones at a place of different strides, which are in elements.
struct StridedSum {
  std::int64_t extent[4] = {};
  TensorRef from;
  std::int64_t from_strides[4] = {};
  float* to = nullptr;  // no two elements go to the same one
  std::int64_t to_strides[4] = {};
};

class TensorOps {
 public:
  virtual ~TensorOps() = default;

  virtual Fp8Ops& fp8() = 0;  // quantization

  // Loads everything below, so that no call waits for the device.
  virtual void Load() = 0;

  // Host tables are copied before it returns; the rows can be used by work enqueued on `stream` afterwards.
  virtual std::unique_ptr<TokenRows> Rows(const Layout& layout, cppool_stream stream) = 0;

  // to[i][row][0 .. ranges[i].count][dim] = from[row][ranges[i].begin ..][dim]: what rank i gets, one after
  // another in `to`, in from's dtype. `from` is [rows, heads, dim].
  virtual void SplitHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                          TensorRef from, void* to, cppool_stream) = 0;
  // The reverse, to [rows, heads, dim]; a head that several ranks hold is their sum in fp32, in the order of
  // the ranks, rounded once. Every head must be in a range.
  virtual void MergeHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                          TensorRef from, TensorOut to, cppool_stream) = 0;

  virtual void Fill(float* to, float value, std::int64_t count, cppool_stream) = 0;
  // to = from, or to += from, element by element.
  virtual void Accumulate(TensorRef from, float* to, std::int64_t count, bool first, cppool_stream) = 0;
  // to[column] = sum over rows of from[row][column].
  virtual void SumRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                       cppool_stream) = 0;
  // to[column] = the largest of it and all from[row][column]; NaN if any is.
  virtual void MaxRows(const float* from, std::int64_t rows, std::int64_t columns, float* to,
                       cppool_stream) = 0;
  virtual void CopyStrided(const StridedCopy&, cppool_stream) = 0;
  virtual void AddStrided(const StridedSum&, cppool_stream) = 0;
  // to = the sum of all parts in their order, rounded once. `to` may be the first part; 1 to 64 parts.
  virtual void RoundSum(const std::vector<const float*>& parts, TensorOut to, std::int64_t count,
                        cppool_stream) = 0;

  // (accumulator, lse) := (accumulator, lse) merged with (part, part_lse), in fp32, shifted by the larger
  // lse.
  virtual void Merge(const MergeArgs&, cppool_stream) = 0;

  // delta[vector] = sum over dim of out * dout; `vectors` is rows * heads. On CUDA both have the
  // same dtype.
  virtual void Delta(std::int64_t vectors, int dim, TensorRef out, TensorRef dout, float* delta,
                     cppool_stream) = 0;
  // total[row, head] = log(exp(lse) + exp(offset[head])), of every row; offset [heads].
  virtual void AddOffset(std::int64_t rows, int heads, const float* lse, const float* offset, float* total,
                         cppool_stream) = 0;
  // gradient[head] = -sum over `rows` of exp(offset - total) * delta.
  virtual void OffsetGradient(const TokenRows& rows, int heads, const float* total, const float* delta,
                              const float* offset, float* gradient, cppool_stream) = 0;
};

// Makes those of the runtime's backend: the host's, or the CUDA module's. `runtime` outlives them.
std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime);

}  // namespace cppool::kernels
