// Suites: files that name rows of parameters and say which cells are made of them.
//
//     {"rows": {"small": {"num_heads": 8}, ...},          beside those of the model tables, "flash:cp_1_0", ...
//      "axes": {"dtype": [{"set": {"dtype": "bf16"}},     an axis: its alternatives, each what it sets
//                         {"set": {"dtype": "fp16"}, "world_size": 4, "essential": true,
//                          "when": {"num_heads": [8, 16], "row": ["small"]}}]},
//      "cells": [{"rows": ["small", "flash:*"],           each of these rows; '*' at the end of a name stands for any rest
//                 "world_size": 2, "set": {"seed": 7}, "essential": false,
//                 "over": ["dtype"]}]}                    with each combination of these axes, the first varying slowest
//
// `when` holds where each of its keys, a parameter or `row`, has one of the values listed, as the axes before have left it. An axis of
// which no alternative holds is left out. Cells with the same parameters and world size are one cell, which has all their rows.
#pragma once

#include <string>
#include <vector>

#include "client/command/cell.h"

namespace cppool::command {

const std::vector<std::string>& SuiteNames();  // "smoke", "essential", "matrix"
// In the order of its files: "matrix" is Transformer Engine's cells, then our own. Throws UsageError for another name.
std::vector<Cell> LoadSuite(const std::string& name);

// The cells of a file, whose name becomes the name of their suite.
std::vector<Cell> CellsOfFile(const std::string& name, const Json& file);

}  // namespace cppool::command
