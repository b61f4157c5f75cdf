// A world of host ranks that runs attention cases one after another, as the daemon does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/run.h"
#include "kernels/backend.h"

namespace cppool::test {

struct Finding {
  int rank;
  kernels::CheckedTensor tensor;
  std::string against;
  kernels::Verdict verdict;
};

class HostWorld {
 public:
  static constexpr int kIterations = 2;

  explicit HostWorld(int size);

  // Changes the runtime interface of a rank's case, to inject faults or to count calls.
  using Alter = std::function<void(cppool_runtime&)>;
  // Runs the case on every rank with all checks. Throws the first exception of a rank. Draws the sequences if
  // `spec` has none. `source`: of the inputs, in place of the seed.
  std::vector<Finding> Run(const kernels::AttentionSpec& spec, const Alter& alter = {},
                           kernels::TensorSource* source = nullptr);
  // What the last run left, also when it has thrown.
  const std::vector<Finding>& findings() const { return findings_; }
  // Requires that every output of every rank was compared with the run without CP and, if the rank holds
  // tokens of the oracle's sample, with the oracle, and that all comparisons passed.
  void RequireAllHold(const kernels::AttentionSpec& spec);

  // Later cases delay their streams at every mark, for times drawn from the seed. They have one iteration,
  // because in a second one the buffers already contain the same blocks, which hides a missing wait.
  void Perturb(std::uint64_t seed) { delays_ = seed; }

  // Later cases use the kernels of this family, which must outlive the world. Default: the host's family.
  void UseFamily(const kernels::AttentionFamily& family) { family_ = &family; }

  int size() const { return backend_->place().world_size; }

 private:
  void OnEveryRank(const std::function<void(int)>& work);

  const kernels::AttentionFamily* family_;
  std::optional<std::uint64_t> delays_;
  std::vector<Finding> findings_;
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<kernels::RankRuntime>> ranks_;
};

inline constexpr kernels::CpCommType kComms[] = {kernels::CpCommType::kP2p, kernels::CpCommType::kAllGather,
                                                 kernels::CpCommType::kA2a, kernels::CpCommType::kA2aP2p};
bool Possible(kernels::CpCommType comm, int world);
// 2 sequences of 8 tokens per rank, 8 heads of dim 64.
kernels::AttentionSpec Small(int world, kernels::CpCommType comm);
std::string Describe(const kernels::AttentionSpec& spec);

}  // namespace cppool::test
