// The attention case: inputs, context-parallel forward and backward, and the comparison of every output with
// the same kernels without CP and with the fp64 oracle. What it reports goes to whoever runs it; it knows no
// requests and no files.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/attention/judge.h"
#include "kernels/attention/spec.h"

namespace cppool::kernels {

// All methods are called on the rank's thread.
class AttentionReport {
 public:
  virtual ~AttentionReport() = default;
  // True for each warm-up and each counted iteration, then false. False at the first call: another rank
  // cannot begin, and none does.
  virtual bool NextIteration() = 0;
  // Gets this rank's floating-point operations in a stage ("forward", "backward") of one iteration.
  virtual void Work(const std::string& stage, double flops) = 0;
  // `against`: "no_cp", "oracle", with spec.deterministic "rerun"; and "later", only of a tensor that changed
  // after the run was over. In fp8 also "bits", of quantized inputs, out and delta.
  virtual void Check(CheckedTensor tensor, const std::string& against, const Verdict& verdict) = 0;
  // Gets how tensors go from rank to rank, kComm or kPeer, and whether the forward pass is kSteps or kOne.
  // Not called in a world of one rank.
  virtual void Moves(Transfers, Launches) {}
  // Gets a hash of the bits of all of this rank's outputs, with spec.deterministic.
  virtual void Digest(std::uint64_t) {}
};

enum class TensorRows {
  kQueries,  // of tokens, in the order of GlobalLayout; a rank has its part
  kKeys,
  kWhole  // of no token: every rank has all of them
};

// What a dump of a case in fp8 holds of a quantized tensor beside its values.
enum class StoredPart {
  kPayload,          // bytes in the tensor's shape
  kScaleInverse,     // one number: a value is the payload's times it
  kRowPayload,       // quantized in blocks of 32 along the head dimension
  kRowExponents,     // E8M0: the tensor's shape with the head dimension divided by 32
  kColumnPayload,    // in blocks of 32 tokens
  kColumnExponents,  // the tensor's shape with blocks for tokens: of each sequence, of each of its 2 * world
                     // size chunks
  kF16,              // 16-bit, of what leaves as a payload
};
struct StoredTensor {
  std::variant<InputTensor, CheckedTensor> of;
  StoredPart part;
};

// A tensor of a case over all ranks, row-major.
struct TensorInfo {
  std::variant<InputTensor, CheckedTensor, StoredTensor> kind;
  TensorRows rows_of = TensorRows::kQueries;
  std::int64_t rows = 0;
  std::int64_t columns = 0;    // elements of a row
  Dtype dtype = Dtype::kBf16;  // exponents: that of their payload
  std::vector<std::int64_t>
      shape;  // of rows * columns elements: [batch, seqlen, heads, dim], thd: [rows, heads, dim]
  std::vector<std::string> axes;  // of shape: "batch", "query", "key", "token", "head", "kv_head", "dim"

  std::string name() const;  // "q", "softmax_offset", "out", "d_softmax_offset", ...
};

// What a case is given and what it gives: with and without a backward pass, a bias, a softmax offset,
// max_logit.
std::vector<TensorInfo> InputTensors(const AttentionSpec& spec);
std::vector<TensorInfo> OutputTensors(const AttentionSpec& spec);
// In fp8: what is stored of q, k, v, dout and of results that leave as payloads.
std::vector<TensorInfo> StoredTensors(const AttentionSpec& spec, int world_size);

// Where inputs come from instead of the seed. Called by several ranks' threads at once, for rows with a token
// and for every row of what is whole. What it throws ends the case.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual void ReadRow(const TensorInfo& tensor, std::int64_t row,
                       double* to) = 0;  // rounded to the dtype later
};

// Where tensors go after the run. Called by several ranks' threads at once; each row comes once, those of the
// inputs only where they hold a token.
class TensorSink {
 public:
  virtual ~TensorSink() = default;
  // Is called on rank 0, before the first iteration and before any rank's first row.
  virtual void Begin() = 0;
  // Writes a row: elements in the tensor's dtype. `reference`: it is of the run without CP.
  virtual void WriteRow(const TensorInfo& tensor, bool reference, std::int64_t row, const void* elements) = 0;
  // Writes elements of a row, from `first` on, of what the oracle says; each comes once, and some never.
  virtual void WriteOracle(const TensorInfo& tensor, std::int64_t row, std::int64_t first,
                           const std::vector<double>& elements) = 0;
  // Is called on rank 0, after all ranks' last row.
  virtual void End() = 0;
};

// Called by every rank at once, each with its own runtime. The spec has been validated: divisible lengths and
// heads, and `family`, of the runtime's backend, does not refuse it. `source` and `sink` may be NULL, and the
// reference is only made for checks. Stages: "inputs", "forward/...", "backward/...", "reference", "checks".
// Throws RuntimeError.
void RunAttention(cppool_runtime* runtime, const AttentionFamily& family, const AttentionSpec& spec,
                  bool checks, AttentionReport& report, TensorSource* source = nullptr,
                  TensorSink* sink = nullptr);

// Most device bytes that RunAttention holds on a rank, checks included, whatever launches kAuto turns out to
// be; `host`: on the host runtime.
double AttentionBytes(const AttentionFamily& family, const AttentionSpec& spec, int world_size, bool host);

}  // namespace cppool::kernels
