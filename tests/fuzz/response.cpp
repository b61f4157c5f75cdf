// A daemon's stdout as a Pool reads it: the input follows the answer to `hello`. Its first byte chooses the
// sentinel and the request.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <cppool/pool.h>
#include "protocol/framing.h"
#include "protocol/response.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/scripted_process.h"

namespace cppool::fuzz {
namespace {

const char* const kHello = R"({"ok":true,"id":1,"protocol":1,"world_size":2})";

PoolOptions Options(bool sentinel) {
  PoolOptions options;
  options.daemon = "/proc/self/exe";  // any existing program: it is not started
  if (!sentinel) options.sentinel.clear();
  options.retries = 0;
  return options;
}

// Requires that lines do not depend on how the bytes are split, and that no line is longer than the limit.
void RequireSameLines(std::string_view bytes, std::size_t limit, std::size_t piece) {
  protocol::LineReader whole(limit), pieces(limit);
  whole.Append(bytes);
  for (std::string_view rest = bytes; !rest.empty(); rest.remove_prefix(std::min(piece, rest.size())))
    pieces.Append(rest.substr(0, piece));
  Require(whole.buffered() == pieces.buffered(),
          "the bytes in the buffer do not depend on how bytes are split");
  for (;;) {
    const auto one = whole.Finish(), other = pieces.Finish();
    Require(one.has_value() == other.has_value(),
            "the number of lines does not depend on how bytes are split");
    if (!one) break;
    Require(one->text == other->text && one->dropped == other->dropped,
            "lines do not depend on how bytes are split");
    Require(one->text.size() <= limit, "a line is within its limit");
    Require(one->overlong == (one->dropped > 0),
            "a line from which bytes were dropped is marked as overlong");
  }
  Require(whole.buffered() == 0, "the buffer is empty at the end");
}

// All members as JSON text, in which NaN equals itself. By structured binding: a member that is added is a
// compile error here until it is compared too.
Json Members(const protocol::Check& check) {
  const auto& [tensor, against, rank, max_abs_err, rel_err, tolerance, ok, ratio, worst, bad, where] = check;
  const Json place = worst ? Json{worst->index, worst->got, worst->wanted} : Json();
  return {tensor,      against,           rank,
          max_abs_err, rel_err,           tolerance,
          ok,          ratio.value_or(0), ratio.has_value(),
          place,       bad.value_or(0),   bad.has_value(),
          where};
}
Json Members(const protocol::Rank& result) {
  const auto& [rank, ok, error, gpu_ms, samples, extra, traceback, output] = result;
  return {rank, ok, error, gpu_ms, samples, extra, traceback, output};
}
Json Members(const protocol::Leaks& leaks) {
  const auto& [allocations, device_bytes, host_bytes, threads, fds, processes] = leaks;
  return {allocations, device_bytes, host_bytes, threads, fds, processes};
}
Json Members(const std::optional<protocol::Failure>& failure) {
  if (!failure) return {};
  const auto& [kind, rank, stage, detail, unknown_kind, node] = *failure;
  return {kind, rank.value_or(-1), rank.has_value(), stage, detail, unknown_kind, node};
}
template <typename Element>
Json Members(const std::vector<Element>& elements) {
  Json json = Json::array();
  for (const Element& element : elements) json.push_back(Members(element));
  return json;
}
std::string Members(const protocol::RunResult& result) {
  const auto& [status, error, failure, fatal, ranks, checks, tflops, wall_ms, seed, respawn, stopped, kernels,
               warnings, leaks, replaced, differed, left] = result;
  return Json{status,           error,
              Members(failure), fatal,
              Members(ranks),   Members(checks),
              tflops,           wall_ms,
              seed.has_value(), seed.value_or(0),
              respawn,          stopped,
              kernels,          warnings,
              Members(leaks),   replaced,
              differed,         left}
      .dump();
}

// Requires that an answer to `run` is unchanged when it is written and read again.
void RequireResult(const Result& result) {
  Require(result.ok() == !result.failure.has_value(), "a result that is not passed has a failure",
          result.json.dump());
  Require(!result.ok() || result.error.empty(), "a passed result has no error", result.error);
  Require(!result.json.contains("id") || result.json["id"] == 2, "the answer has the request's id",
          result.json.dump());
  if (result.json.contains("runs")) return;  // to `validate`
  const protocol::RunResult read = protocol::RunResultFromJson(result.json);
  const std::string line = protocol::SerializeResponse(protocol::ToJson(read, std::nullopt), "");
  const std::string again = Members(protocol::RunResultFromJson(protocol::ParseJson(line)));
  Require(Members(read) == again, "an answer that is written and read is the same",
          Members(read) + " " + again);
}

}  // namespace
}  // namespace cppool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cppool;
  using namespace cppool::fuzz;
  if (size == 0) return 0;
  const unsigned choice = data[0];
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  RequireSameLines(bytes, 1 + (choice >> 2), 1 + bytes.size() % 7);

  const PoolOptions options = Options((choice & 1) == 0);
  const std::string hello = options.sentinel + kHello + "\n";
  SetAnswers(hello, bytes);
  Pool pool(options);
  try {
    RequireResult((choice & 2) == 0 ? pool.Run() : pool.Validate());
  } catch (const PoolError& error) {
    Require(error.kind() == PoolError::Kind::kDied || error.kind() == PoolError::Kind::kProtocol,
            "an error is of kind kDied or kProtocol", error.what());
    Require(*error.what() != 0, "an error has a text");
    Require(std::string_view(error.what()).size() < 3000, "an error's text is short");
  }
  return 0;
}
