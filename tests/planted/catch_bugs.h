// Checks shared by the tests on the host and on GPUs: the suite passes without a bug and fails with each bug.
#pragma once

#include <cstdio>
#include <string_view>

#include "tests/planted/planted_cells.h"

namespace cppool::test {

// The cells that every bug is tested with: every schedule, format, kind of mask and gradient, on 2 and 4 ranks.
inline const CellFilters kSmallSuite = {
    {"row=padding_causal", "row=learnable_window", "row=six_sequences_bottom_right",
     "row=deterministic_learnable", "row=gqa_two_kv_heads", "row=bias_111s_gqa_192_128", "row=mqa_causal",
     "row=unequal_window"},
    kInferenceCells};

// A missing wait causes a wrong result only with some random delays, so up to this many seeds are tried.
inline constexpr int kMaxRuns = 5;

// Those are caught by cases of fp8.
inline bool IsOfFp8(const cppool::kernels::PlantableBug& bug) {
  return std::string_view(bug.name).starts_with("fp8_");
}

inline void PassesWithoutBug(const std::vector<std::string>& common) {
  const Caught none = RunCells(nullptr, kSmallSuite, common);
  CHECK(none.cells > 36);
  CHECK(none.failed == std::vector<std::string>{});
  CHECK(none.other == std::vector<std::string>{});
}

inline void CatchesBug(const cppool::kernels::PlantableBug& bug, std::vector<std::string> common) {
  common.insert(common.end(), {"--perturb", ""});
  Caught caught;
  int runs = 0;
  while (caught.failed.empty() && runs < kMaxRuns) {
    common.back() = std::to_string(++runs);
    caught = RunCells(bug.name, kSmallSuite, common);
  }
  CAPTURE(bug.name);
  REQUIRE(caught.failed != std::vector<std::string>{});
  CHECK(caught.other == std::vector<std::string>{});  // no crash and no hang
  std::printf("%s: caught by run %d, in %zu of %d cells, such as %s\n", bug.name, runs, caught.failed.size(),
              caught.cells, caught.failed.front().c_str());
}

inline void PassesFp8WithoutBug(const std::vector<std::string>& common) {
  const Caught none = RunFp8(nullptr, common);
  CHECK(none.cells == static_cast<int>(kFp8Cases.size()));
  CHECK(none.failed == std::vector<std::string>{});
  CHECK(none.other == std::vector<std::string>{});
}

inline void CatchesFp8Bug(const cppool::kernels::PlantableBug& bug, const std::vector<std::string>& common) {
  CAPTURE(bug.name);
  const Caught caught = RunFp8(bug.name, common);
  CHECK(caught.failed != std::vector<std::string>{});
  CHECK(caught.other == std::vector<std::string>{});
  std::printf("%s: caught by case %d: %s\n", bug.name, caught.cells,
              caught.failed.empty() ? "" : caught.failed.front().c_str());
}

}  // namespace cppool::test
