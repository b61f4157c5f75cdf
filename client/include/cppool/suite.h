// The suites of cppool, and those of files, as cells for a loop or a test framework.
//
//     for (const cppool::Cell& cell : cppool::LoadSuite("smoke", {.filters = {"cp_comm_type=a2a"}}))
//       std::cout << cell << ": " << cppool::SharedPools().Run(cell) << "\n";
//
// With Catch2 a test case takes them from GENERATE(from_range(cppool::LoadSuite("smoke"))). With GoogleTest
// each is a test of its own:
//
//     INSTANTIATE_TEST_SUITE_P(Smoke, Attention, testing::ValuesIn(cppool::LoadSuite("smoke")),
//                              [](const auto& info) { return info.param.id; });
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include <cppool/result.h>

namespace cppool {

// A case with its parameters on a number of ranks, which Pools::Run takes.
struct Cell {
  Cell() = default;  // no braces make a Cell of what was meant as parameters

  std::string name;               // unique in its suite: "flash:cp_1_0 bf16 bshd p2p W=2"
  std::string id;                 // the same in letters, digits and "_" alone; of LoadSuite
  std::string suite;              // its file: "matrix", "fp8", "own", "smoke"; empty: a single case
  std::vector<std::string> rows;  // the rows of that file that have these parameters
  bool essential = false;
  int world_size = 2;
  std::string case_name = "attention";
  Json params = Json::object();
  std::vector<std::string> varied;  // parameters that a product of its suite varies: they are in its name
};
std::ostream& operator<<(std::ostream& out, const Cell& cell);  // its name

struct SuiteOptions {
  // "key=value", "key!=value", as --filter of `cppool run` (client/README.md).
  std::vector<std::string> filters = {};
  std::int64_t max_seqlen = 0;  // lengths are scaled to at most this; 0: they stay
};

// Returns the cells of a suite by world size: "smoke", "essential", "matrix", or the file with this path,
// whose format client/README.md has. Starts nothing. Throws std::invalid_argument for an unknown name or key,
// for a file that is not a suite, and when no cell matches.
std::vector<Cell> LoadSuite(const std::string& name_or_path, const SuiteOptions& options = {});

}  // namespace cppool
