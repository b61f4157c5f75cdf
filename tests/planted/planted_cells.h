// Runs a small part of the suite with a bug planted, and returns the outcome of its cells.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/client/command_support.h"
#include "tests/planted/planted_bug.h"

namespace cppool::test {

using CellFilters = std::vector<std::vector<std::string>>;  // filters of several runs, one after another

// Cells of max_logit without a backward pass: its waits would hide a missing wait for max_logit.
inline const std::vector<std::string> kInferenceCells = {"row=fused:cp_2_4", "qkv_format=bshd",
                                                         "suite=matrix"};

// Cells and parameters of one launch.
inline const CellFilters kOneLaunchCells = {{"row=padding_causal", "row=gqa_two_kv_heads",
                                             "row=unequal_window", "row=max_logit_bias_thd",
                                             "cp_comm_type=p2p", "cp_comm_type=all_gather"}};
inline const std::vector<std::string> kOneLaunch = {"--param", "launches=one"};

inline std::vector<std::string> operator+(std::vector<std::string> words,
                                          const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// Cases of fp8, by their parameters, on two ranks. The last two have enough elements for statistics.
using CaseParameters = std::vector<std::vector<std::string>>;
inline const CaseParameters kFp8Cases = [] {
  const auto parameters = [](const char* mode, const char* comm, const char* mha, const char* seqlen,
                             const char* heads, const char* batch) {
    return std::vector<std::string>{"dtype=fp8",
                                    std::string("scaling_mode=") + mode,
                                    std::string("cp_comm_type=") + comm,
                                    "fp8_dpa=true",
                                    std::string("fp8_mha=") + mha,
                                    std::string("max_seqlen_q=") + seqlen,
                                    std::string("num_heads=") + heads,
                                    std::string("batch_size=") + batch,
                                    "attn_mask_type=no_mask"};
  };
  return CaseParameters{parameters("delayed", "p2p", "true", "128", "4", "1"),
                        parameters("current", "a2a", "false", "128", "4", "1"),
                        parameters("mxfp8", "all_gather", "false", "128", "4", "1"),
                        parameters("current", "p2p", "false", "128", "16", "4"),
                        parameters("mxfp8", "p2p", "false", "128", "16", "4")};
}();

// Those leave out what orders two threads. ThreadSanitizer sees them.
inline bool IsRace(const cppool::kernels::PlantableBug& bug) {
  const std::string_view name = bug.name;
  return name.ends_with("_wait") || name.ends_with("_fence");
}

// Those are caught by cases with `launches=one`.
inline bool IsOfOneLaunch(const cppool::kernels::PlantableBug& bug) {
  return std::string_view(bug.name).starts_with("one_launch_");
}

struct Caught {
  int cells = 0;
  std::vector<std::string> failed;  // cells with a failed check, with their error
  std::vector<std::string> other;   // cells that neither passed nor failed, with their error
};

inline void Count(const std::string& line, Caught& result) {
  const cppool::Json cell = cppool::Json::parse(line);
  if (!cell.contains("status")) return;
  ++result.cells;
  const std::string name = cell.at("name"), status = cell.at("status");
  if (status == "failed") result.failed.push_back(name + ": " + cell.at("error").get<std::string>());
  if (status != "failed" && status != "passed") result.other.push_back(name + ": " + cell.at("error").dump());
}

// `bug` NULL: none. `common`: further arguments of `cppool run`.
inline Caught RunCells(const char* bug, const CellFilters& cells, const std::vector<std::string>& common,
                       const std::string& daemon = CPPOOL_TEST_DAEMON) {
  setenv("CPPOOL_PLANTED_BUG", bug ? bug : "", 1);
  Caught result;
  for (const auto& filters : cells) {
    std::vector<std::string> words = {"run", "--suite", "matrix", "--json"};
    for (const std::string& filter : filters) words.insert(words.end(), {"--filter", filter});
    words.insert(words.end(), common.begin(), common.end());
    for (const std::string& line : Cppool(words, daemon).lines) Count(line, result);
  }
  unsetenv("CPPOOL_PLANTED_BUG");
  return result;
}

// The cases of fp8, until one fails.
inline Caught RunFp8(const char* bug, const std::vector<std::string>& common) {
  setenv("CPPOOL_PLANTED_BUG", bug ? bug : "", 1);
  Caught result;
  for (const auto& parameters : kFp8Cases) {
    if (!result.failed.empty()) break;
    std::vector<std::string> words = {"run", "--json"};
    for (const std::string& parameter : parameters) words.insert(words.end(), {"--param", parameter});
    words.insert(words.end(), common.begin(), common.end());
    for (const std::string& line : Cppool(words, CPPOOL_TEST_DAEMON).lines) Count(line, result);
  }
  unsetenv("CPPOOL_PLANTED_BUG");
  return result;
}

}  // namespace cppool::test
