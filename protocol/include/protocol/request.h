// Requests as types. ParseRequest takes one line of any bytes; SerializeRequest makes one.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <cppool/run_options.h>

#include "protocol/failure.h"
#include "protocol/kernel_choice.h"
#include "protocol/parameters.h"

namespace cppool::protocol {

// Another version is refused. Additions, which old clients and daemons can ignore, raise the minor alone: 1
// brought `features`, 2 libraries named in requests, 3 traces and the recipes of fp8, 4 digests in requests,
// 5 requests that overtake.
inline constexpr int kProtocolVersion = 1;
inline constexpr int kProtocolMinor = 5;
inline constexpr std::size_t kMaxLibraries = 16;  // that one request names

struct HelloRequest {};
struct ListRequest {
  std::vector<std::string> load;  // as RunOptions has it: the cases of these libraries are listed, too
};
struct StatsRequest {};
struct ShutdownRequest {};

// These two overtake: they are answered at once, whatever runs or waits.
struct CancelRequest {
  Json cancels;  // the id of a `run` or `validate` that waits or runs
};
struct StatusRequest {};  // where every rank is now

// Throws InvalidRequest for what is no `python` of a run.
void CheckPythonCase(const Json& python);
// One that is, as it was sent, with an absolute path: a relative one is from its cwd, else from `folder`
// (empty: this process's).
Json ParsePythonCase(const std::string& text, const std::string& folder = "");
// How texts call the case, "file.py:name".
std::string NameOfPythonCase(const Json& python);

// Which case is to run on which parameters, and how.
struct RunRequest : RunOptions {
  Json params = Json::object();  // as given; or the string form when `from_kwargs`
  bool from_kwargs = false;  // {"op": "run", "kwargs": {...}}: ParametersFromKwargs comes before validation
  KernelChoice choice;       // what `kernels` names; nothing named: the daemon's default
};
// The libraries that the request names, as often as it does: those of `load` in their order, then that of
// `kernels`.
std::vector<std::string> NamedLibraries(const RunRequest& request);
// What would come of the run, without running it: ok, or the answer (`skipped`, `error`) that the run would
// get.
struct ValidateRequest {
  RunRequest run;
};

using Operation = std::variant<HelloRequest, ListRequest, RunRequest, ValidateRequest, StatsRequest,
                               ShutdownRequest, CancelRequest, StatusRequest>;
const std::string& NameOf(const Operation& operation);  // "hello", ...
const RunRequest* RunOf(const Operation& operation);    // of `run` and `validate`; else null

struct Request {
  std::optional<Json> id;  // any JSON value, echoed; absent: the request had none
  Operation operation;
};

// What ParseRequest throws: keeps the id when the line could be parsed that far.
class RequestError : public InvalidRequest {
 public:
  RequestError(const std::string& what, std::optional<Json> request_id)
      : InvalidRequest(what), id(std::move(request_id)) {}
  std::optional<Json> id;
};

// At most kMaxRequestBytes, nesting at most kMaxNesting (never by recursion deeper than that), UTF-8, a JSON
// object, known keys, right types and ranges. Throws RequestError that names what is wrong and what is
// allowed. `defaults` has the members that a `run` or `validate` does not have, and `load` that of a `list`.
Request ParseRequest(std::string_view line, const RunOptions& defaults = {});

// The request of a client. Throws InvalidRequest, as ParseRequest does, for options that are out of range.
RunRequest MakeRun(const RunOptions& options, Json params);

// One line, no newline. Throws InvalidRequest for what JSON cannot say: NaN, infinities, text that is not
// UTF-8.
std::string SerializeRequest(const Request& request);

}  // namespace cppool::protocol
