// Runs one fixed, small part of the suite with a bug planted, and says what came of it.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "command_support.h"
#include "kernels/planted_bug.h"

namespace cppool_test {

struct Caught {
  int cells = 0;
  std::vector<std::string> failed;  // cells in which a check does not hold, with the check
  std::vector<std::string> other;   // cells that neither passed nor failed, with what they said
};

// `bug` NULL: none. `common`: further words for `cppool run`.
inline Caught RunCells(const char* bug, const std::vector<std::string>& common) {
  // Every schedule, format, kind of mask and gradient, on 2 and 4 ranks; then max_logit without a backward pass, which
  // would wait for it.
  static const std::vector<std::vector<std::string>> kCells = {
      {"row=padding_causal", "row=learnable_window", "row=six_sequences_bottom_right",
       "row=deterministic_learnable", "row=gqa_two_kv_heads", "row=bias_111s_gqa_192_128", "row=mqa_causal",
       "row=unequal_window"},
      {"row=fused:cp_2_4", "qkv_format=bshd"}};
  setenv("CPPOOL_PLANTED_BUG", bug ? bug : "", 1);
  Caught result;
  for (const auto& filters : kCells) {
    std::vector<std::string> words = {"run", "--suite", "matrix", "--json"};
    for (const std::string& filter : filters) words.insert(words.end(), {"--filter", filter});
    words.insert(words.end(), common.begin(), common.end());
    const Ran ran = Cppool(words);
    for (const std::string& line : ran.lines) {
      const cppool::Json cell = cppool::Json::parse(line);
      if (!cell.contains("status")) continue;
      ++result.cells;
      const std::string name = cell.at("name");
      if (cell.at("status") == "failed") {
        result.failed.push_back(name + ": " + cell.at("error").get<std::string>());
      } else if (cell.at("status") != "passed") {
        result.other.push_back(name + ": " + cell.at("error").dump());
      }
    }
  }
  unsetenv("CPPOOL_PLANTED_BUG");
  return result;
}

// The seeds of random delays that a bug gets: one that leaves out a wait may need more than one.
inline constexpr int kMostRuns = 5;

// Runs with and then, if need be, with other random delays until a check fails.
inline Caught CatchBug(const cppool::kernels::PlantableBug& bug, std::vector<std::string> common, int* runs) {
  Caught result;
  common.insert(common.end(), {"--perturb", ""});
  for (*runs = 1; *runs <= kMostRuns; ++*runs) {
    common.back() = std::to_string(*runs);
    result = RunCells(bug.name, common);
    if (!result.failed.empty()) return result;
  }
  return result;
}

}  // namespace cppool_test
