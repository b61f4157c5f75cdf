// What inputs are made with and results are judged with, on either runtime. Calls enqueue work as in
// attention_kernel.h.
//
// The oracle is written independently of the attention kernels, the schedules and the partition: plain matrix
// products and row softmax over whole sequences, in fp64.
#pragma once

#include <cppool/runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/attention/layout.h"
#include "kernels/attention/spec.h"
#include "kernels/attention/tensor.h"
#include "kernels/host_device.h"

namespace cppool::kernels {

enum class InputTensor : std::uint32_t { kQ = 1, kK = 2, kV = 3, kDout = 4, kBias = 5, kSoftmaxOffset = 6 };

// What a comparison found. NaN, or an infinity that the other side does not have, is a mismatch and takes no
// part in the errors.
struct CompareStats {
  double max_abs_err = 0;
  double max_abs_ref = 0;
  double max_excess = 0;  // of |a - b| - relative * |b|: holds when <= the absolute tolerance
  double sum_sq_err = 0;
  double sum_sq_ref = 0;
  double sum_err_ref =
      0;  // of (a - b) * b: over sum_sq_ref, by how much a is too large or too small altogether
  double max_of_bound = 0;  // of |a - b| over its bound
  double largest_bound = 0;
  std::uint64_t mismatches = 0;  // positions where NaN or infinity differ, or either is NaN
  std::uint64_t count = 0;
};

// What a comparison found in one of its blocks. The errors are of numbers that are finite on both sides.
struct BlockStats {
  double max_abs_err = 0, max_abs_ref = 0, sum_sq_err = 0, sum_sq_ref = 0;
  std::uint64_t count = 0;
  std::uint64_t bad = 0;  // elements that are further off than CompareArgs::tolerance, or a mismatch
  // The element that is furthest off, the first of several; a mismatch is further off than any number. Its
  // place is row * columns + column in the block; -1: there is no element.
  double worst_err = -1;
  std::int64_t worst = -1;
  double worst_a = 0, worst_b = 0;
};
inline constexpr std::int64_t kBlockRows = 64;

// Compares rows: for each i < rows, `columns` elements at a + a_rows[i] * a_stride + a_offset with those at b
// likewise.
struct CompareArgs {
  TensorRef a;
  const std::int64_t* a_rows = nullptr;  // device; NULL: 0, 1, 2, ...
  std::int64_t a_stride = 0;             // in elements
  std::int64_t a_offset = 0;
  TensorRef b;  // the reference
  const std::int64_t* b_rows = nullptr;
  std::int64_t b_stride = 0;
  std::int64_t b_offset = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  double relative = 0;            // relative tolerance for max_excess
  const double* bound = nullptr;  // of each |a - b|, where b's elements are. NULL: none
  // For BlockStats::bad: of |a - b| - relative * |b|; where there are bounds, a finite one says that these
  // count.
  double tolerance = std::numeric_limits<double>::infinity();
  // Blocks: rows row_blocks[i] up to row_blocks[i + 1] (device, of i <= row_block_count; NULL: every
  // kBlockRows rows) times block_columns columns; the last ones may be smaller.
  const std::int64_t* row_blocks = nullptr;
  std::int64_t row_block_count = 0;
  std::int64_t block_columns = 64;
  BlockStats* blocks = nullptr;  // [RowBlocks()][ColumnBlocks()], memory as of *result. NULL: not wanted

  CPPOOL_HOST_DEVICE std::int64_t RowBlocks() const {
    return row_blocks ? row_block_count : (rows + kBlockRows - 1) / kBlockRows;
  }
  CPPOOL_HOST_DEVICE std::int64_t ColumnBlocks() const {
    return (columns + block_columns - 1) / block_columns;
  }
};

// fp8: what the oracle reads, casts and bounds beside the rest of OracleArgs. The products of the gradients
// may read other quantizations of q, k and dout.
struct OracleFp8 {
  TensorRef q_of_dk, k_of_dq, dout_of_dv;  // without data: q, k, dout
  const float* delta = nullptr;  // [rows of q, heads]: rowsum(dO * O) as it was given to the kernels
  // A backward pass in 16 bits has the operands of the forward pass rounded once more: its probabilities are
  // relative to the forward pass' lse [seqlen_q, group], as kernels have them. The exact calculation writes
  // to lse_shift by how much it differs from the lse of these operands, and plain attention after it reads
  // that. NULL: relative to the lse of the operands.
  const double* lse = nullptr;
  double* lse_shift = nullptr;
  // Plain fp8 attention (OracleArgs::rounded): P, whole rows of it, and dS are cast, all sums are fp64,
  // results are rounded to `stored`, and cast where they have a scale. p_scale, ds_scale as in ForwardArgs
  // and Fp8Casts. A p_scale of 0: a backward pass in 16 bits, whose plain attention is that of `rounded`
  // without fp8.
  double p_scale = 0, ds_scale = 0, out_scale = 0, gradient_scale = 0;
  bool ds_blocks = false;
  // The most that the casts may move each element of a right result, as out, dq, dk and dv; NULL: not wanted.
  double *out_bound = nullptr, *dq_bound = nullptr, *dk_bound = nullptr, *dv_bound = nullptr;
};

// One sequence and one group of query heads with their key/value head. Row i of the queries is q_row + i *
// q_step of [rows, heads, dim]. Outputs are dense fp64, or NULL when not wanted: out [seqlen_q, group,
// dim_v], lse [seqlen_q, group], dq [seqlen_q, group, dim_qk], dk [seqlen_kv, dim_qk], dv [seqlen_kv, dim_v].
struct OracleArgs {
  // q, k, v, dout and bias have one 16-bit dtype; or, in fp8, q, k and v are in E4M3, dout in E5M2 and the
  // bias in bf16.
  TensorRef q, k, v;
  TensorRef dout;  // data NULL: forward only
  std::int64_t q_row = 0, q_step = 1, kv_row = 0, kv_step = 1;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
  int heads = 1, head_begin = 0, group = 1;  // query heads head_begin .. head_begin + group of `heads`
  int kv_heads = 1, kv_head = 0;
  int dim_qk = 128, dim_v = 128;
  double scale = 1;
  AttnMaskType mask = AttnMaskType::kNoMask;  // seqlen_q and seqlen_kv are the sequence's own lengths
  std::int64_t window_left = -1, window_right = -1;
  // Added to the scaled logits: element (h of the group, query i, key j) is bias[h * bias_head_step + i *
  // bias_query_step + j]. Data NULL: none.
  TensorRef bias;
  std::int64_t bias_head_step = 0, bias_query_step = 0;
  const float* alibi_slopes =
      nullptr;  // [group]; distances count from the diagonal that the mask is anchored to
  const float* softmax_offset =
      nullptr;  // [group]: exp(offset) in the denominator of the probabilities, not in lse
  // false: exact, all in fp64. true: plain attention in `stored`: every intermediate that a framework would
  // store (logits after scaling and again after the bias, probabilities, out, dP, dS, the gradients) is
  // rounded to it; sums and ALiBi's own products are not.
  bool rounded = false;
  std::optional<OracleFp8> fp8;
  Dtype stored = Dtype::kBf16;
  double* out = nullptr;
  double* lse = nullptr;
  double* dq = nullptr;
  double* dk = nullptr;
  double* dv = nullptr;
  // What sums over sequences or heads is added to what is there, so that several calls make it whole; the
  // caller starts it at 0 and max_logit at -inf, and rounds (RoundValues) the sums of a plain attention
  // itself.
  double* dbias =
      nullptr;  // element (h, i, j) at h * dbias_head_step + i * dbias_query_step + j; steps of 0 sum
  std::int64_t dbias_head_step = 0, dbias_query_step = 0;
  double* d_softmax_offset = nullptr;  // [group]
  double* max_logit = nullptr;         // [group]: raised to the largest visible scaled and biased logit
};

// `batch` times `rows` stretches of `bytes` bytes, copied between places with strides of their own, in bytes.
// All are even.
struct RowsCopy {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t batch = 1, rows = 0, bytes = 0;
  std::int64_t from_batch = 0, from_row = 0, to_batch = 0, to_row = 0;
};

struct BitsCheck;  // kernels/attention/checks/fp8_bits.h
struct BitsTally;

class CheckKernels {
 public:
  virtual ~CheckKernels() = default;

  // Loads the kernels, as AttentionKernel::Load does.
  virtual void Load() = 0;

  // to[row, head, dim] for every row of the layout: Philox4x32-10 (Salmon et al. 2011) keyed by (seed;
  // tensor, sequence, position, head, dim) and mapped by integer arithmetic and one rounding to `dtype`, so
  // that a token's values are the same bits on every runtime, world size and layout. About a normal of
  // standard deviation 0.58 within [-2, 2]. Rows of no segment are left alone. `uneven`: times UnevenFactor
  // of philox.h.
  virtual void Generate(InputTensor tensor, std::uint64_t seed, const Layout& layout, int heads, int dim,
                        Dtype dtype, void* to, cppool_stream, bool uneven = false) = 0;

  // to[batch, heads, seqlen_q, seqlen_kv], dense, keyed by (seed; kBias, sequence, query, head, key) and
  // mapped likewise. At most 1024 heads.
  virtual void GenerateBias(std::uint64_t seed, std::int64_t batch, int heads, std::int64_t seqlen_q,
                            std::int64_t seqlen_kv, Dtype dtype, void* to, cppool_stream) = 0;

  // A hash of the bits of `bytes` bytes and their places, the same on either runtime; `data` is aligned to 2,
  // and `bytes` a multiple of it. *result as Compare's.
  virtual void Digest(const void* data, std::size_t bytes, std::uint64_t* result, cppool_stream) = 0;

  // All in one kernel, at most kMostCopies. With a `delay` each element is copied so much later, and on GPUs
  // that can start a kernel before the one in front of it has ended (programmatic dependent launch) the next
  // one may start at once.
  static constexpr std::size_t kMostCopies = 40;
  virtual void CopyRows(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay,
                        cppool_stream) = 0;

  // Rounds fp64 values to what `dtype` holds, in place.
  virtual void RoundValues(Dtype dtype, double* values, std::int64_t count, cppool_stream) = 0;
  virtual void FillValues(double* values, double value, std::int64_t count, cppool_stream) = 0;

  // *result is host memory from the runtime's alloc_host, valid after the stream is synchronised.
  virtual void Compare(const CompareArgs&, CompareStats* result, cppool_stream) = 0;

  // What a case in fp8 has quantized against the definitions of the formats. *result as Compare's.
  virtual void CheckBits(const BitsCheck&, BitsTally* result, cppool_stream) = 0;

  // Memory that it takes for itself: oracle_workspace.h.
  virtual void Oracle(const OracleArgs&, cppool_stream) = 0;
};

std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime);

}  // namespace cppool::kernels
