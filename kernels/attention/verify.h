// The comparison of a rank's outputs with the run without CP and with the oracle.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/oracle_sample.h"
#include "kernels/attention/run.h"
#include "kernels/attention/tensor_set.h"

namespace cppool::kernels {

// Page-locked results that checks write in stream order.
template <typename T>
class Results {
 public:
  Results(cppool_runtime* runtime, std::size_t count, const T& before) : rt_(runtime) {
    void* memory = nullptr;
    Check(rt_, rt_->alloc_host(rt_, count * sizeof(T), &memory));
    values_ = static_cast<T*>(memory);
    std::fill_n(values_, count, before);
  }
  ~Results() { rt_->free_host(rt_, values_); }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;
  T* Next() { return &values_[used_++]; }

 private:
  cppool_runtime* rt_;
  T* values_ = nullptr;
  std::size_t used_ = 0;
};

// On the rank's thread. Every method enqueues on the main stream and waits for it.
class Verifier {
 public:
  // All must outlive it. `local`: what the rank has computed; `global`: inputs of the whole.
  Verifier(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
           const RankTokens& tokens, const TensorSet& local, const TensorSet& global,
           AttentionReport& report);

  // With the outputs in `global`; and padding is zero.
  void AgainstNoCp();
  void AgainstOracle();

 private:
  struct Rows {  // device arrays of `count`
    const std::int64_t* rows;
    const std::int64_t* positions;
    std::int64_t count;
  };
  struct OracleOutputs;
  struct Stats {
    CompareStats *ours, *plain;
  };
  using StatsOf = std::map<CheckedTensor, std::vector<Stats>>;

  void RunOracle(const OraclePair& pair, bool rounded, const OracleOutputs& to, bool dbias);
  void ComparePair(const OraclePair& pair, const OracleOutputs& exact, const OracleOutputs& plain,
                   Results<CompareStats>& results, StatsOf& stats);
  void CompareBias(const BiasUnit& unit, const OracleOutputs& exact, const OracleOutputs& plain,
                   Results<CompareStats>& results, StatsOf& stats);
  void CompareHeads(const std::vector<int>& kv_heads, const OracleOutputs& exact, const OracleOutputs& plain,
                    Results<CompareStats>& results, StatsOf& stats);
  Rows RowsOf(const RankRows& rows, int sequence);
  const std::int64_t* Upload(std::vector<std::int64_t> table);
  std::int64_t group() const { return spec_.heads / spec_.kv_heads; }
  bool gqa() const { return group() != 1; }

  cppool_runtime* rt_;
  const AttentionSpec& spec_;
  CheckKernels& kernels_;
  const RankTokens& tokens_;
  const TensorSet& local_;
  const TensorSet& global_;
  AttentionReport& report_;
  std::vector<float> slopes_;  // of ALiBi
  Buffer device_slopes_;
  // Tables in device memory; both copies live as long as this.
  std::deque<std::vector<std::int64_t>> tables_;
  std::deque<Buffer> buffers_;
  std::map<std::pair<const RankRows*, int>, Rows> rows_;
};

// Most device bytes that the oracle's results and workspace take.
double OracleBytes(const AttentionSpec& spec);

}  // namespace cppool::kernels
