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

  // Alters the seam that a rank's case is given; for faults, and to count.
  using Alter = std::function<void(cppool_runtime&)>;
  // Runs the case on every rank, checked, and throws what the first one threw. Sequences that `spec` lacks are drawn.
  std::vector<Finding> Run(const kernels::AttentionSpec& spec, const Alter& alter = {});
  // Every output of every rank is compared with the run without CP, and wherever the rank holds tokens that the
  // oracle takes, with the oracle; and all of that holds.
  void RequireAllHold(const kernels::AttentionSpec& spec);

  // Cases from here on hold their streams up at every mark, for times that the seed picks. They have one iteration:
  // a second one finds the first one's blocks where it looks for its own, and so hides a missing wait.
  void Perturb(std::uint64_t seed) { delays_ = seed; }

  // Cases from here on run on this family's kernels, which outlive the world. Else on the host's.
  void UseFamily(const kernels::AttentionFamily& family) { family_ = &family; }

  int size() const { return backend_->world_size(); }

 private:
  void OnEveryRank(const std::function<void(int)>& work);

  const kernels::AttentionFamily* family_;
  std::optional<std::uint64_t> delays_;
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<kernels::RankRuntime>> ranks_;
};

inline constexpr kernels::CpCommType kComms[] = {kernels::CpCommType::kP2p, kernels::CpCommType::kAllGather,
                                                 kernels::CpCommType::kA2a, kernels::CpCommType::kA2aP2p};
bool Possible(kernels::CpCommType comm, int world);
// 8 tokens a rank, 2 sequences of 8 heads of 64.
kernels::AttentionSpec Small(int world, kernels::CpCommType comm);
std::string Describe(const kernels::AttentionSpec& spec);

}  // namespace cppool::test
