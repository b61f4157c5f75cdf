// A line on the daemon's stdin, handled as far as possible without ranks.
#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include "protocol/request.h"
#include "protocol/response.h"
#include "tests/fuzz/attention.h"
#include "tests/fuzz/property.h"
#include "tests/protocol/records.h"

namespace cppool::fuzz {
namespace {

using protocol::Json;
using protocol::Request;

// The id of a line that is valid JSON.
std::optional<Json> IdOf(std::string_view line) {
  try {
    const Json json = protocol::ParseJson(line);
    if (json.is_object() && json.contains("id")) return json["id"];
  } catch (const protocol::InvalidRequest&) {  // not JSON: it has no id
  }
  return std::nullopt;
}

// Checks the answer to a line that is not a valid request.
void RequireAnswer(std::string_view line, const protocol::RequestError& error) {
  RequireErrorText(error.what());
  const protocol::Failure failure{protocol::FailureKind::kInvalidRequest, std::nullopt, "", error.what()};
  const Json answer =
      protocol::ParseJson(protocol::SerializeResponse(protocol::ErrorResponse(failure, error.id), ""));
  Require(protocol::RunResultFromJson(answer).error == error.what(),
          "a refusal's text is unchanged in the answer");
  if (const std::optional<Json> id = IdOf(line); id && line.size() <= protocol::kMaxRequestBytes) {
    const bool about_id = std::string_view(error.what()).starts_with("the id ");
    Require(about_id || error.id == id, "a refusal has the id of the line", error.what());
  }
  Require(answer.contains("id") == error.id.has_value() && (!error.id || answer["id"] == *error.id),
          "a refusal echoes the id");
}

const protocol::RunRequest* RunOf(const Request& request) {
  if (const auto* validate = std::get_if<protocol::ValidateRequest>(&request.operation))
    return &validate->run;
  return std::get_if<protocol::RunRequest>(&request.operation);
}

bool AreSame(const protocol::RunRequest& a, const protocol::RunRequest& b) {
  const RunOptions& options = a;
  return options == b && a.params == b.params && a.from_kwargs == b.from_kwargs;
}

void RequireSameOnTheLine(const Request& request) {
  const std::string line = protocol::SerializeRequest(request);
  // "1e22" is written as "1e+22": a line within the limit may exceed it when it is written again.
  if (line.size() > protocol::kMaxRequestBytes) return;
  const Request again = protocol::ParseRequest(line);
  Require(again.id == request.id, "a request that is written and read has the same id", line);
  Require(again.operation.index() == request.operation.index(),
          "a request that is written and read has the same operation", line);
  if (const protocol::RunRequest* run = RunOf(request))
    Require(AreSame(*RunOf(again), *run), "a request that is written and read has the same members", line);
}

void RequireSettled(const protocol::RunRequest& run) {
  for (const int world_size : {1, 2, 4, 8}) {
    const Prepared prepared = Prepare(run, world_size);
    if (!prepared.run) continue;
    protocol::RunRequest resolved = run;
    resolved.params = prepared.run->params;
    resolved.from_kwargs = false;
    const Prepared again = Prepare(resolved, world_size);
    Require(again.run != nullptr, "an accepted request is accepted with its resolved parameters",
            again.refusal);
    Require(again.run->params_json == prepared.run->params_json,
            "resolved parameters are resolved to the same",
            prepared.run->params_json + " " + again.run->params_json);
    Require(again.run->bytes_per_rank == prepared.run->bytes_per_rank,
            "a request with resolved parameters needs the same memory");
  }
}

}  // namespace
}  // namespace cppool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cppool::fuzz;
  using namespace cppool::protocol;
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  try {
    const Request request = ParseRequest(line);
    RequireSameOnTheLine(request);
    if (const RunRequest* run = RunOf(request)) RequireSettled(*run);
  } catch (const RequestError& error) {
    RequireAnswer(line, error);
  }
  return 0;
}
