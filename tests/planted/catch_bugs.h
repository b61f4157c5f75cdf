// Checks shared by the tests on the host and on GPUs: the suite passes without a bug and fails with each bug.
#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "tests/planted/planted_cells.h"

namespace cppool::test {

// The cells that every bug is tested with: every schedule, format, kind of mask and gradient, on 2 and 4
// ranks.
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

// In code of a GPU that no daemon with bugs has: planted_native_test.cu.
inline bool IsNative(const cppool::kernels::PlantableBug& bug) {
  return std::string_view(bug.name).starts_with("native_");
}

inline bool IsOfLastTile(const cppool::kernels::PlantableBug& bug) {
  return std::string_view(bug.name).starts_with("last_tile_");
}

inline void PassesWithoutBug(const std::vector<std::string>& common) {
  const Caught none = RunCells(nullptr, kSmallSuite, common);
  CHECK(none.cells > 36);
  CHECK(none.failed == std::vector<std::string>{});
  CHECK(none.other == std::vector<std::string>{});
}

inline void CatchesBug(const cppool::kernels::PlantableBug& bug, std::vector<std::string> common,
                       const CellFilters& cells = kSmallSuite) {
  common.insert(common.end(), {"--fail-fast", "--perturb", ""});
  CAPTURE(bug.name);
  Caught caught;
  int runs = 0;
  while (caught.failed.empty() && runs < kMaxRuns) {
    common.back() = std::to_string(++runs);
    for (const auto& filters : cells) {
      if (!caught.failed.empty()) break;
      caught = RunCells(bug.name, {filters}, common);
      CHECK(caught.other == std::vector<std::string>{});  // no crash and no hang
    }
  }
  REQUIRE(caught.failed != std::vector<std::string>{});
  std::printf("%s: caught by run %d: %s\n", bug.name, runs, caught.failed.front().c_str());
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

// A failed check names its worst element. zero: that is 0, where it should not be.
inline void CheckLocation(const cppool::Json& check, bool zero) {
  const cppool::Json& worst = check.at("worst");
  const std::set<std::string> bias = {"sequence", "head", "query", "key"},
                              of_head = {"sequence", "head", "token"};
  std::set<std::string> names;
  for (const auto& [name, value] : worst.at("index").items()) names.insert(name);
  names.erase("dim");
  CHECK(names == (check.at("tensor") == "dbias" ? bias : of_head));
  CHECK(worst.at("index").contains("dim") == (check.at("tensor") != "dbias" && check.at("tensor") != "lse"));
  CHECK(std::abs(worst.at("got").get<double>() - worst.at("wanted").get<double>()) ==
        Catch::Approx(check.at("max_abs_err").get<double>()));
  if (zero) CHECK(worst.at("got") == 0);
  const bool all_within = check.at("max_abs_err") <= check.at("tolerance");
  if (!all_within && check.at("against") == "oracle") CHECK(check.at("bad") > 0);
  CHECK(check.contains("where") == (check.at("bad") > 0));
}

// The last rows of each output of every rank, of one causal sequence: both references see it. `fewer`: 8 rows
// of dk and dv, or one of out and dq. With a bias dbias is an output, too.
inline void CatchesLastTiles(const cppool::kernels::PlantableBug& bug, int world_size, int seqlen, bool bias,
                             bool fewer, const std::vector<std::string>& common) {
  CAPTURE(bug.name, world_size, seqlen);
  const bool gpu = std::count(common.begin(), common.end(), "cuda") > 0;
  std::string seeds = bias ? "0,1,2,3,4,5" : "0,1,2,3,4";
  if (fewer) seeds += seqlen <= 1024 ? ",19,20" : ",32,34";
  const std::string length = std::to_string(seqlen - seqlen % (2 * world_size));
  std::vector<std::string> words = {"run", "--json", "--world-size", std::to_string(world_size)};
  for (const std::string& parameter :
       {std::string("dtype=bf16"), "seed=" + seeds, "max_seqlen_q=" + length, "max_seqlen_kv=" + length,
        std::string("batch_size=1"), std::string("num_heads=2"), std::string("num_gqa_groups=2"),
        std::string("attn_mask_type=causal"), std::string("cp_comm_type=p2p"),
        std::string(bias ? "attn_bias_type=post_scale_bias" : "attn_bias_type=no_bias")})
    words.insert(words.end(), {"--param", parameter});
  words.insert(words.end(), common.begin(), common.end());
  setenv("CPPOOL_PLANTED_BUG", bug.name, 1);
  const Ran ran = Cppool(words, CPPOOL_TEST_DAEMON);
  unsetenv("CPPOOL_PLANTED_BUG");
  int cells = 0;
  for (const std::string& line : ran.lines) {
    const cppool::Json cell = cppool::Json::parse(line);
    if (!cell.contains("status")) continue;
    const std::string tensor = std::vector<std::string>{"out", "lse", "dq", "dk", "dv", "dbias"}.at(
        cell.at("params").at("seed").get<std::size_t>() % 16);
    ++cells;
    INFO(tensor << ": " << line);
    CHECK(cell.at("status") == "failed");
    // The oracle's sample has not every head of dbias, and its last rows are those of one.
    std::map<std::string, std::set<int>> seen;
    for (const cppool::Json& check : cell.at("answer").at("checks")) {
      if (!check.at("ok") && check.at("tensor") == tensor)
        seen[check.at("against")].insert(check.at("rank").get<int>());
      if (check.at("tensor") != tensor) CHECK(check.at("ok"));
      // On a GPU the largest error may be the rounding of larger gradients elsewhere.
      if (!check.at("ok")) CheckLocation(check, bug.bug == kernels::Bug::kLastTileZero && !gpu);
    }
    CHECK(seen["no_cp"].size() == static_cast<std::size_t>(world_size));
    if (tensor != "dbias") CHECK(seen["oracle"].size() == static_cast<std::size_t>(world_size));
  }
  CHECK(cells == static_cast<int>(std::count(seeds.begin(), seeds.end(), ',')) + 1);
}

}  // namespace cppool::test
