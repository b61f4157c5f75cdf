// Compares a rank's outputs with the run without CP and with the oracle.
#pragma once

#include <cppool/runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/checks/fp8_verify.h"
#include "kernels/attention/checks/host_array.h"
#include "kernels/attention/checks/oracle_results.h"
#include "kernels/attention/checks/oracle_sample.h"
#include "kernels/attention/checks/oracle_shares.h"
#include "kernels/attention/run.h"
#include "kernels/attention/tensors/tensor_set.h"

namespace cppool::kernels {

// Used on the rank's thread. Every method enqueues on the main stream and waits for it.
class Verifier {
 public:
  // All arguments must outlive the Verifier. `oracle` (may be NULL) receives what the oracle says. `local`:
  // the rank's outputs; `global`: the complete inputs, and the outputs without CP.
  Verifier(cppool_runtime* runtime, const AttentionSpec& spec, CheckKernels& kernels,
           const RankTokens& tokens, const TensorSet& local, const TensorSet& global, AttentionReport& report,
           TensorSink* oracle = nullptr);

  // Bytes of the oracle's results on a rank, exact and plain.
  static double OutputBytes(const AttentionSpec& spec, const OracleSample& sample, int world_size);

  // A case in fp8 sets its problem, and Capabilities::fp8_sum_keys, before the calls below; the problem
  // outlives them.
  void UseQuantized(const Fp8Problem& problem, int sum_keys) { fp8_ = &problem, fp8_sum_keys_ = sum_keys; }

  // In fp8 the ranks divide the calls of the oracle: every rank calls it at once.
  void AgainstOracle();
  // Compares with the outputs in `global`, and checks that padding is zero. Call it after AgainstOracle,
  // which measures the error of plain attention that the limits use.
  void AgainstNoCp();

 private:
  // Rows of one tensor that a comparison divides into blocks: of one sequence, or of one matrix of dbias.
  struct RowBlock {
    std::int64_t of, begin, end;  // positions
    BlockStats terms = {};        // of dbias: see AddTerms
  };
  struct RowBlocks {
    const std::int64_t* begins;  // device; see CompareArgs
    std::vector<RowBlock> each;
  };
  static void AddBlocks(std::int64_t of, std::int64_t begin, std::int64_t rows,
                        std::vector<RowBlock>& blocks);
  RowBlocks UploadBlocks(std::vector<RowBlock> blocks);
  struct Rows {  // device arrays of `count` elements
    const std::int64_t* rows;
    const std::int64_t* positions;
    std::int64_t count;
    RowBlocks blocks;
  };
  // Holds what a comparison found in its blocks.
  struct BlockResults {
    const BlockStats *ours = nullptr, *plain = nullptr;  // [rows][columns]; plain: NULL against no_cp
    const std::vector<RowBlock>* rows = nullptr;
    std::size_t columns = 0;
    std::int64_t width = 1;      // elements of a row in a block; of the last column maybe fewer
    std::size_t first_head = 0;  // that of column 0
    std::size_t count() const { return rows ? rows->size() * columns : 0; }
  };
  struct Stats {
    CompareStats *ours, *plain, *plain_here;  // see JudgeOracle
    BlockResults blocks = {};
    const OraclePair* pair = nullptr;  // NULL: of several
  };
  using StatsOf = std::map<CheckedTensor, std::vector<Stats>>;
  static Stats StatsOfWhole(Results<CompareStats>& results);
  // Runs the oracle on the sample and compares. Every rank calls it at once where they divide the work.
  StatsOf CompareSample(const OracleSample& sample, bool divided, Results<CompareStats>& results);
  // What CompareSample needs.
  Results<CompareStats> ResultsOf(const OracleSample& sample) const;
  // The part of the sample that has a block with an element further off than `tolerances_` says.
  OracleSample WithBadBlocks(const OracleSample& sample, const StatsOf& stats) const;
  // Where the elements of a failed check are: its worst one by what a comparison found in its blocks ...
  void FindWorst(CheckedTensor kind, const std::vector<BlockResults>& parts, Verdict& verdict) const;
  // ... and the bad ones by what the comparison found that had the check's tolerance.
  void FindBad(CheckedTensor kind, const std::vector<BlockResults>& parts, Verdict& verdict) const;
  // Makes room for what a comparison finds in blocks of these rows and of `columns` columns.
  BlockResults Divide(const RowBlocks& rows, std::int64_t columns, CompareArgs& args);
  // The rows of a tensor that has one value for each head.
  const RowBlocks& BlocksOfWhole();
  // Returns the blocks of `matrices` matrices of dbias, from number `first` on.
  const RowBlocks& BlocksOfBias(std::int64_t first, std::int64_t matrices);
  void AddTerms(RowBlock& block) const;
  using BlocksOf = std::map<CheckedTensor, std::vector<BlockResults>>;
  void JudgeBlocks(CheckedTensor kind, const char* against, const BlocksOf& blocks, Verdict& verdict);

  void RunOracle(const OraclePair& pair, bool rounded, const OracleOutputs& to, const OracleOutputs& bounds,
                 bool dbias);
  // Returns what the comparisons of a pair read.
  std::vector<OracleShares::Piece> PiecesOf(const OraclePair& pair, const OracleResults& mine,
                                            const OracleResults& others) const;
  void ComparePair(const OraclePair& pair, const OracleOutputs& exact, const OracleOutputs& plain,
                   const OracleOutputs& bounds, Results<CompareStats>& results, StatsOf& stats);
  // Hands `rows` rows of `values`, dense and on the device, to the sink: each is elements from `first` on of
  // row begin + i * step of the tensor.
  void Save(const TensorSet::Tensor& tensor, const Buffer& values, std::int64_t rows, std::int64_t begin,
            std::int64_t step, std::int64_t first, std::int64_t columns);
  // Whether the errors of the tensor are those of casts to fp8.
  bool IsCast(CheckedTensor kind) const;
  GradientTerms Terms(CheckedTensor kind) const;
  Verdict JudgeCasts(CheckedTensor kind, const std::vector<Stats>& parts) const;
  bool TwoKeysInBlocks() const;
  void CompareBias(const BiasUnit& unit, const OracleOutputs& exact, const OracleOutputs& plain,
                   Results<CompareStats>& results, StatsOf& stats);
  void CompareHeads(const std::vector<int>& kv_heads, const OracleOutputs& exact, const OracleOutputs& plain,
                    Results<CompareStats>& results, StatsOf& stats);
  // Returns the rows of the sequence; with kAll those of all, whose `positions` are rows of the whole buffer.
  static constexpr int kAll = -1;
  const Rows& RowsOf(const RankRows& rows, int sequence);
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
  TensorSink* sink_;
  std::deque<HostArray<std::byte>> staged_;
  std::deque<Buffer> uploaded_;
  const float* slopes_ = nullptr;  // of ALiBi, by head; device
  std::map<std::pair<const RankRows*, int>, Rows> rows_;
  std::map<CheckedTensor, CompareStats> plain_;  // plain attention's error on all rows of the sample
  // fp8: this rank's and plain attention's errors on this rank's rows of the sample.
  std::map<CheckedTensor, std::pair<CompareStats, CompareStats>> sampled_;
  const Fp8Problem* fp8_ = nullptr;
  int fp8_sum_keys_ = 0;
  std::map<CheckedTensor, double> tolerances_;  // of the oracle's checks that have failed
  std::deque<HostArray<BlockStats>> block_stats_;
  std::deque<RowBlocks> bias_blocks_;
  std::optional<RowBlocks> whole_blocks_;
};

// The maximum number of bytes of the oracle's results and workspace on a rank, on the host or on a GPU.
double OracleBytes(const AttentionSpec& spec, bool host, int world_size);

}  // namespace cppool::kernels
