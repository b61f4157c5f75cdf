#include "client/src/result.h"

#include <stdexcept>
#include <utility>

#include "protocol/json_text.h"
#include "protocol/response.h"

namespace cppool::client {

Result ResultFromJson(Json json) {
  protocol::RunResult read = protocol::RunResultFromJson(json);
  Result result;
  result.status = read.status;
  result.error = std::move(read.error);
  if (read.failure)
    result.failure = {std::string(protocol::KindOf(*read.failure)), read.failure->rank, read.failure->stage,
                      read.failure->detail};
  result.fatal = read.fatal;
  result.ranks = std::move(read.ranks);
  result.checks = std::move(read.checks);
  result.tflops = std::move(read.tflops);
  result.wall_ms = read.wall_ms;
  result.seed = read.seed;
  result.stopped = std::move(read.stopped);
  result.warnings = std::move(read.warnings);
  result.leaks = read.leaks;
  result.json = std::move(json);
  return result;
}

Result ValidationFromJson(Json json) {
  const auto runs = json.find("runs");
  if (runs == json.end()) return ResultFromJson(std::move(json));
  if (*runs != true || json.value("ok", Json()) != true)
    throw std::runtime_error("in the response, \"runs\" is not true where \"ok\" is: " +
                             protocol::EchoValue(json));
  Result result;
  result.status = Status::kPassed;
  result.json = std::move(json);
  return result;
}

std::vector<std::string> FeaturesFromJson(const Json& hello) {
  const auto features = hello.find("features");
  if (features == hello.end()) return {};
  std::vector<std::string> names;
  if (!features->is_array())
    throw std::runtime_error("in the response, \"features\" is not a list: " +
                             protocol::EchoValue(*features));
  for (const Json& name : *features) {
    if (!name.is_string())
      throw std::runtime_error("in the response, a feature is not a string: " + protocol::EchoValue(name));
    names.push_back(name.get<std::string>());
  }
  return names;
}

}  // namespace cppool::client
