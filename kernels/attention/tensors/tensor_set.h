// The tensors of one side of a case, a rank's part or the whole, and how they are filled and handed out.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "kernels/memory_list.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// Where a rank's rows of one side, queries or keys, are.
struct RankRows {
  Layout layout;
  std::vector<std::int64_t> tokens;   // rows that hold one, ascending
  std::vector<std::int64_t> padding;  // the others
  std::vector<std::int64_t> whole;    // by row: which one it is of the whole buffer, padding included
};
RankRows RowsOfRank(QkvFormat format, const Sequences& sequences, int world_size, int rank);

// The tokens of a rank on both sides; a world of one has all of them.
struct RankTokens {
  RankTokens(const AttentionSpec& spec, int world_size, int rank);
  RankRows queries, keys;

  const RankRows& of(const TensorInfo& tensor) const {
    return tensor.rows_of == TensorRows::kKeys ? keys : queries;
  }
};

// Copies device memory to the host, and waits for the main stream.
template <typename T>
std::vector<T> ToHost(cppool_runtime* rt, const void* data, std::size_t count) {
  std::vector<T> values(count);
  Check(rt, rt->copy(rt, values.data(), data, count * sizeof(T), rt->stream));
  Check(rt, rt->stream_synchronize(rt, rt->stream));
  return values;
}

class TensorSet {
 public:
  struct Tensor {
    TensorInfo info;
    std::int64_t rows;  // here: info.rows, or the rank's part of them
    Buffer data;
  };

  TensorSet(cppool_runtime* runtime, const AttentionSpec& spec, int world_size);

  // Returns what a set of these tensors takes on a rank.
  static double Bytes(const AttentionSpec& spec, int world_size);

  AttentionTensors pointers() const;
  const std::vector<Tensor>& inputs() const { return inputs_; }
  const std::vector<Tensor>& outputs() const { return outputs_; }
  void* get(InputTensor kind) const;  // NULL: the case has none
  void* get(CheckedTensor kind) const;
  const float* softmax_offset() const;  // zeros for off-by-one, NULL for vanilla

  // Inputs from `source`, or from the seed when it is NULL; their padding is NaN. Enqueued on the main
  // stream.
  void Fill(CheckKernels& kernels, const AttentionSpec& spec, const RankTokens& tokens, TensorSource* source);
  void PoisonOutputs() const;  // NaN everywhere

  // Hands a rank's rows to `sink`; what is whole comes from rank 0. Waits for the main stream.
  void Save(const RankTokens& tokens, TensorSink& sink) const;
  // The rank's share of the outputs of a set that is the whole.
  void SaveReference(TensorSink& sink) const;

 private:
  TensorSet() = default;
  // Describes the tensors and declares their memory.
  void List(const AttentionSpec& spec, int world_size, MemoryList& list);
  template <typename Kind>
  static const Tensor* Find(const std::vector<Tensor>& tensors, Kind kind);
  void Read(const Tensor& tensor, const RankTokens& tokens, TensorSource& source) const;

  cppool_runtime* rt_ = nullptr;
  std::vector<Tensor> inputs_, outputs_;
  Buffer no_offset_;  // off-by-one: zeros
};

}  // namespace cppool::kernels
