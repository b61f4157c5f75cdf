// The JSON texts that the C interface takes, as the library's types. All throw std::invalid_argument, or
// InvalidRequest of the protocol, that says what is wrong and what is allowed.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <cppool/compile.h>
#include <cppool/pool.h>
#include <cppool/suite.h>
#include "protocol/request.h"

namespace cppool::client {

PoolOptions ToPoolOptions(const char* text);  // null: the defaults
protocol::Operation ToOperation(const char* text);

// The cells of {"suite": ..., "filters": [...], "max_seqlen": ...}, in the order in which they run.
std::vector<Cell> ToCells(const char* text);

// The source and the options of {"source": ..., "include_folders": [...]}.
std::pair<std::string, CompileOptions> ToCompileOptions(const char* text);

// The answer of cppool_pool_ask, and its `command`, as Result::Describe has it.
std::string ToDescription(const char* text);

}  // namespace cppool::client
