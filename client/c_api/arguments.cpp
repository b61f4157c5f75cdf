#include "client/c_api/arguments.h"

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>
#include <variant>

#include "client/src/members.h"
#include "client/src/pool_options.h"
#include "client/suite/repeat.h"
#include "client/suite/suite.h"
#include "protocol/json_text.h"
#include "protocol/start.h"

namespace cppool::client {
namespace {

Json Parsed(const char* text) { return text == nullptr ? Json::object() : protocol::ParseJson(text); }

using Words = std::vector<std::string>;

// The libraries that may hold the case; attention is built in.
Words LibrariesFor(const PoolOptions& options, const protocol::RunRequest& request) {
  if (request.case_name == suite::Cell().case_name) return {};
  Words files = options.case_files;
  files.insert(files.end(), request.load.begin(), request.load.end());
  return files;
}

}  // namespace

PoolOptions ToPoolOptions(const char* text) { return PoolOptionsFromJson(Parsed(text)); }

protocol::Operation ToOperation(const char* text) {
  if (text == nullptr) throw std::invalid_argument("there is no request");
  protocol::Request request = protocol::ParseRequest(text);
  if (request.id) throw std::invalid_argument("a request to a pool has no \"id\": the pool gives it one");
  return std::move(request.operation);
}

std::pair<std::string, CompileOptions> ToCompileOptions(const char* text) {
  std::pair<std::string, CompileOptions> result;
  Members members(Parsed(text), "what is to be compiled");
  members.Take("source", &result.first);
  members.Take("include_folders", &result.second.include_folders);
  members.End();
  if (result.first.empty())
    throw std::invalid_argument("\"source\" is missing: the path of a .cu, .cpp or .c file");
  return result;
}

std::vector<suite::Cell> ToCells(const char* text) {
  std::string name;
  Words filters;
  std::int64_t max_seqlen = 0;
  Members members(Parsed(text), "the selection of cells");
  members.Take("suite", &name);
  members.Take("filters", &filters);
  members.Take("max_seqlen", 1, INT64_MAX, &max_seqlen);
  members.End();
  std::vector<suite::Filter> parsed;
  for (const std::string& filter : filters) parsed.push_back(suite::FilterFromText(filter, "a filter"));
  const std::vector<suite::Cell> suite = suite::LoadSuite(name);
  const std::vector<suite::Cell> selected = suite::Select(suite, parsed);
  if (selected.empty())
    throw std::invalid_argument("no cell of the suite matches the filters: " +
                                suite::DescribeNoMatch(suite, parsed));
  std::vector<suite::Cell> cells;
  for (const std::size_t index : suite::RunOrder(selected)) {
    cells.push_back(selected[index]);
    if (max_seqlen > 0) suite::Shrink(&cells.back().params, max_seqlen, cells.back().world_size);
  }
  return cells;
}

std::string ToCommand(const PoolOptions& options, const protocol::RunRequest& request) {
  const Words libraries = LibrariesFor(options, request);
  // `cppool run` takes no string form, and refuses a library that the case is not in; which one that is only
  // a daemon can tell.
  if (request.from_kwargs || libraries.size() > 1 || !suite::HasOptions(options, request))
    return suite::PipeCommand(options, {{std::nullopt, request}});
  suite::Cell cell;
  cell.world_size = options.world_size;
  cell.case_name = request.case_name;
  cell.params = request.params;
  return suite::Assignments(options) +
         suite::RepeatCommand("cppool", cell, suite::OptionWords(options, libraries, request));
}

}  // namespace cppool::client
