// Runs a small part of the suite with a bug planted, and returns the outcome of its cells.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/client/command_support.h"
#include "tests/planted/planted_bug.h"

namespace cppool::test {

using CellFilters = std::vector<std::vector<std::string>>;  // filters of several runs, one after another

// Cells of max_logit without a backward pass: its waits would hide a missing wait for max_logit.
inline const std::vector<std::string> kInferenceCells = {"row=fused:cp_2_4", "qkv_format=bshd"};

struct Caught {
  int cells = 0;
  std::vector<std::string> failed;  // cells with a failed check, with their error
  std::vector<std::string> other;   // cells that neither passed nor failed, with their error
};

// `bug` NULL: none. `common`: further arguments of `cppool run`.
inline Caught RunCells(const char* bug, const CellFilters& cells, const std::vector<std::string>& common,
                       const std::string& daemon = CPPOOL_TEST_DAEMON) {
  setenv("CPPOOL_PLANTED_BUG", bug ? bug : "", 1);
  Caught result;
  for (const auto& filters : cells) {
    std::vector<std::string> words = {"run", "--suite", "matrix", "--json"};
    for (const std::string& filter : filters) words.insert(words.end(), {"--filter", filter});
    words.insert(words.end(), common.begin(), common.end());
    for (const std::string& line : Cppool(words, daemon).lines) {
      const cppool::Json cell = cppool::Json::parse(line);
      if (!cell.contains("status")) continue;
      ++result.cells;
      const std::string name = cell.at("name"), status = cell.at("status");
      if (status == "failed") result.failed.push_back(name + ": " + cell.at("error").get<std::string>());
      if (status != "failed" && status != "passed")
        result.other.push_back(name + ": " + cell.at("error").dump());
    }
  }
  unsetenv("CPPOOL_PLANTED_BUG");
  return result;
}

}  // namespace cppool::test
