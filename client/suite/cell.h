// How cells are named, selected, changed and ordered.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <cppool/suite.h>

namespace cppool::suite {

using cppool::Cell;

// So many cells, or points of a sweep, can be run in one go: a product that is larger was hardly meant, and
// would fill the memory.
inline constexpr std::size_t kMaxCells = 100'000;

// The name of a suite's cell has its first row or its case, the values that tell cells of one row apart, and
// the world size: "fused:cp_1_0 fp8 bshd p2p current dpa bwd f16_O W=2".
std::string NameOf(const Cell& cell);
// Returns the recipe of a cell with dtype fp8, "current dpa bwd f16_O": its scaling mode and the flags that
// are true, fp8_dpa where fp8_mha is not. Empty for another dtype.
std::string RecipeOf(const Cell& cell);
// Returns a cell's value on each axis that its parameters determine: {"schedule", "p2p"}, {"window", "left"},
// ...
std::vector<std::pair<std::string, std::string>> AxesOf(const Cell& cell);
// Numbers the cells that have the name of an earlier one: "small W=2 #2".
void MakeNamesUnique(std::vector<Cell>* cells);
// Sets `id` of each by its name.
void MakeIds(std::vector<Cell>* cells);

// key=value, or key!=value. A key is a parameter, `world_size`, `suite`, `row`, `model`, `kernel_backend`,
// `essential`, `name` or an axis of AxesOf. A value is text as ValueFromText reads it; in it `*` stands for
// any text and `?` for one character.
struct Filter {
  std::string key;
  std::string value;
  bool negated = false;
};
// Throws UsageError that names `option`.
Filter FilterFromText(const std::string& text, const std::string& option = "--filter");
// Returns the cells that match, for each key among the filters, at least one of its key=value and none of its
// key!=value. A cell without the parameter has no value. Throws UsageError for a key that no cell has.
std::vector<Cell> Select(const std::vector<Cell>& cells, const std::vector<Filter>& filters);
// Returns why filters match nothing: "no cell has dtype=fp8 (known: bf16, fp16)" for those with a value that
// no cell has; else what each key leaves out, "no cell has all of them; without dtype 12 cells match".
std::string DescribeNoMatch(const std::vector<Cell>& cells, const std::vector<Filter>& filters);

// Scales both lengths by one factor so that the longer one is at most `max_seqlen`, rounded down to multiples
// of 2 * world_size (with mxfp8 64 * world_size, for its blocks of tokens) and at least that. Windows are
// scaled as the keys' length is, to at least 1; -1 (open) and 0 stay.
void Shrink(Json* params, std::int64_t max_seqlen, int world_size);

// Returns the order to run in: by world size, so that each pool is started once; else as listed.
std::vector<std::size_t> RunOrder(const std::vector<Cell>& cells);

}  // namespace cppool::suite
