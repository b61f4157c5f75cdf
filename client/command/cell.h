// Cells of suites: what to run, on how many ranks, and how to run it again by hand.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <cppool/pool.h>

namespace cppool::command {

struct Cell {
  std::string name;               // unique in its suite: "flash:cp_1_0 bf16 bshd p2p W=2"
  std::string suite;              // the file that it is from: "matrix", "own", "smoke"; empty: from none
  std::vector<std::string> rows;  // of that file, that the cell stands for
  bool essential = false;
  int world_size = 2;
  bool moved = false;  // to another world size than its suite's, which may not fit it
  std::string case_name = "attention";
  Json params = Json::object();
};

// Of a suite's cell: its row, what its row does not say, and its world size.
std::string NameOf(const Cell& cell);

// The cells for which, for each key, one of its filters holds. A key is a parameter, `world_size`, `suite`,
// `row`, `model`, `kernel_backend` or `essential`; a value is text as ValueFromText reads it. A cell that says
// nothing of a parameter is not found by it. Throws UsageError for a key that no cell has.
struct Filter {
  std::string key;
  std::string value;
};
std::vector<Cell> Select(const std::vector<Cell>& cells, const std::vector<Filter>& filters);
// "dtype is nowhere fp8, but bf16, fp16", of the filters whose value no cell has; else "".
std::string DescribeUnknown(const std::vector<Cell>& cells, const std::vector<Filter>& filters);

// When a length is above `max_seqlen`: both in one proportion, down to multiples of 2 * world_size and to no
// less than that; windows in the proportion of the keys' length, to at least 1. -1 (open) and 0 stay.
void Shrink(Json* params, std::int64_t max_seqlen, int world_size);

// The order to run in: by world size, so that a pool is not left waiting and another woken at every cell;
// else as listed.
std::vector<std::size_t> RunOrder(const std::vector<Cell>& cells);

// "cppool run --world-size 2 ... --param key=value ...", as words for a shell; `program` is how this one was called,
// `common` are the options that hold for all cells.
std::string RepeatCommand(const std::string& program, const Cell& cell,
                          const std::vector<std::string>& common);

}  // namespace cppool::command
