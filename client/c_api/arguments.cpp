#include "client/c_api/arguments.h"

#include <stdexcept>
#include <utility>

#include "client/src/describe.h"
#include "client/src/members.h"
#include "client/src/pool_options.h"
#include "protocol/json_text.h"
#include "protocol/start.h"

namespace cppool::client {
namespace {

Json Parsed(const char* text, int max_nesting = protocol::kMaxNesting) {
  return text == nullptr ? Json::object() : protocol::ParseJson(text, max_nesting);
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

std::string ToDescription(const char* text) {
  Json json = Parsed(text, protocol::kMaxNesting + 1);  // around an answer
  if (!json.is_object() || !json.contains("answer"))
    throw std::invalid_argument("a result is what cppool_pool_ask gives: an object with \"answer\"");
  try {
    Result result = ValidationFromJson(std::move(json.at("answer")));
    result.flaky = json.value("flaky", "");
    for (const Json& lost : json.value("lost", Json::array()))
      result.lost.push_back({PoolErrorKind::kDied, lost.at("error"), std::nullopt, ""});
    return DescribeResult(result, json.value("command", ""));
  } catch (const std::runtime_error& error) {  // of the answer
    throw std::invalid_argument(error.what());
  } catch (const Json::exception& error) {
    throw std::invalid_argument(std::string("a result is what cppool_pool_ask gives: ") + error.what());
  }
}

std::vector<Cell> ToCells(const char* text) {
  std::string name;
  SuiteOptions options;
  std::int64_t max_seqlen = 0;
  Members members(Parsed(text), "the selection of cells");
  members.Take("suite", &name);
  members.Take("filters", &options.filters);
  members.Take("max_seqlen", 1, INT64_MAX, &max_seqlen);
  members.End();
  options.max_seqlen = max_seqlen;
  return LoadSuite(name, options);
}

}  // namespace cppool::client
