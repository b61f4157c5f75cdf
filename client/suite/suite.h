// Suites: files that name rows of parameters and say which cells are made of them. client/README.md explains
// the format to users.
//
//     {"about": "any text, or a list of texts",
//      "case": "attention",                              the default
//      "rows": {"small": {"num_heads": 8}, ...},          beside the model tables' ("flash:cp_1_0")
//      "axes": {"dtype": [{"set": {"dtype": "bf16"}},     an axis: its alternatives, each what it sets
//                         {"set": {"dtype": "fp16"}, "world_size": 4, "essential": true,
//                          "when": {"num_heads": [8, 16], "row": ["small"]}}]},
//      "cells": [{"rows": ["small", "flash:*"],           each of these rows; '*' at a name's end: any rest
//                 "case": "attention", "world_size": [2, 4], "set": {"seed": 7}, "essential": false,
//                 "product": {"num_heads": [8, 16]},      with each combination of these values
//                 "over": ["dtype"]}]}                    and of these axes; the first varies slowest
//
// Only `cells` is required. `when` holds where each of its keys, a parameter or `row`, has one of the values
// listed, as the axes before have left it. An axis of which no alternative holds is left out. Without `rows`
// a cell has only what is set. Cells with the same case, parameters and world size are one cell, which has
// all their rows.
#pragma once

#include <string>
#include <vector>

#include "client/suite/cell.h"

namespace cppool::suite {

const std::vector<std::string>& SuiteNames();  // "smoke", "essential", "matrix"
// Returns a built-in suite in the order of its files ("matrix" is Transformer Engine's 16-bit cells, its fp8
// cells, then our own; "essential" is those 16-bit cells that are marked so), else the file with this path.
// Throws UsageError when there is neither, and for a file that is not a suite.
std::vector<Cell> LoadSuite(const std::string& name_or_path);

// Returns the cells of a file, whose name becomes the name of their suite. Throws UsageError that says where
// the file is wrong.
std::vector<Cell> CellsOfFile(const std::string& name, const Json& file);

}  // namespace cppool::suite
