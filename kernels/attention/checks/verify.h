// Compares a rank's outputs with the run without CP and with the oracle.
#pragma once

#include <cppool/runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/checks/fp8_verify.h"
#include "kernels/attention/checks/host_array.h"
#include "kernels/attention/checks/oracle_results.h"
#include "kernels/attention/checks/oracle_sample.h"
#include "kernels/attention/checks/oracle_shares.h"
#include "kernels/attention/run.h"
#include "kernels/attention/run/tensor_set.h"

namespace cppool::kernels {

// Used on the rank's thread. Every method enqueues on the main stream and waits for it.
class Verifier {
 public:
  // All arguments must outlive the Verifier. `local`: the rank's outputs; `global`: the complete inputs, and the outputs without CP.
  Verifier(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
           const RankTokens& tokens, const TensorSet& local, const TensorSet& global,
           AttentionReport& report);

  // Bytes of the oracle's results on a rank, exact and plain.
  static double OutputBytes(const AttentionSpec& spec, const OracleSample& sample, int world_size);

  // Of a case in fp8, before the calls below; outlives them.
  void UseQuantised(const Fp8Problem& problem) { fp8_ = &problem; }

  // In fp8 the ranks divide the calls of the oracle: every rank calls it at once.
  void AgainstOracle();
  // Compares with the outputs in `global`, and checks that padding is zero. Call it after AgainstOracle, which measures the error of
  // plain attention that the limits use.
  void AgainstNoCp();

 private:
  struct Rows {  // device arrays of `count` elements
    const std::int64_t* rows;
    const std::int64_t* positions;
    std::int64_t count;
  };
  struct Stats {
    CompareStats *ours, *plain, *plain_here;  // see JudgeOracle
  };
  using StatsOf = std::map<CheckedTensor, std::vector<Stats>>;
  static Stats StatsOfWhole(Results<CompareStats>& results);

  void RunOracle(const OraclePair& pair, bool rounded, const OracleOutputs& to, const OracleOutputs& bounds,
                 bool dbias);
  // What the comparisons of a pair read.
  std::vector<OracleShares::Piece> PiecesOf(const OraclePair& pair, const OracleResults& mine,
                                            const OracleResults& others) const;
  void ComparePair(const OraclePair& pair, const OracleOutputs& exact, const OracleOutputs& plain,
                   const OracleOutputs& bounds, Results<CompareStats>& results, StatsOf& stats);
  // Whether the errors of the tensor are those of casts to fp8.
  bool IsCast(CheckedTensor kind) const;
  Verdict JudgeCasts(const std::vector<Stats>& parts) const;
  void CompareBias(const BiasUnit& unit, const OracleOutputs& exact, const OracleOutputs& plain,
                   Results<CompareStats>& results, StatsOf& stats);
  void CompareHeads(const std::vector<int>& kv_heads, const OracleOutputs& exact, const OracleOutputs& plain,
                    Results<CompareStats>& results, StatsOf& stats);
  Rows RowsOf(const RankRows& rows, int sequence);
  // Copies to device memory that lives as long as the Verifier.
  template <typename T>
  const T* Upload(const std::vector<T>& values);
  std::int64_t group() const { return spec_.heads / spec_.kv_heads; }
  Dtype DtypeOf(CheckedTensor kind) const { return JudgedDtype(kind, spec_.dtypes); }
  bool gqa() const { return group() != 1; }

  cppool_runtime* rt_;
  const AttentionSpec& spec_;
  CheckKernels& kernels_;
  const RankTokens& tokens_;
  const TensorSet& local_;
  const TensorSet& global_;
  AttentionReport& report_;
  std::deque<HostArray<std::byte>> staged_;
  std::deque<Buffer> uploaded_;
  const float* slopes_ = nullptr;  // of ALiBi, by head; device
  std::map<std::pair<const RankRows*, int>, Rows> rows_;
  std::map<CheckedTensor, CompareStats> plain_;  // plain attention's error on all rows of the sample
  // fp8: this rank's and plain attention's errors on this rank's rows of the sample.
  std::map<CheckedTensor, std::pair<CompareStats, CompareStats>> sampled_;
  const Fp8Problem* fp8_ = nullptr;
};

// The maximum number of bytes of the oracle's results and workspace on a rank, on the host or on a GPU.
double OracleBytes(const AttentionSpec& spec, bool host, int world_size);

}  // namespace cppool::kernels
