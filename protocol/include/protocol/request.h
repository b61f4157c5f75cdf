// Requests as types. ParseRequest takes one line of any bytes; SerializeRequest makes one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "protocol/failure.h"
#include "protocol/parameters.h"

namespace cppool::protocol {

// Another version is refused. Additions, which old clients and daemons can ignore, raise the minor alone: 1 brought `features`, 2
// libraries named in requests, 3 traces and the recipes of fp8, 4 digests in requests.
inline constexpr int kProtocolVersion = 1;
inline constexpr int kProtocolMinor = 4;
inline constexpr std::int64_t kDefaultDeadlineMs = 90000;
inline constexpr std::size_t kMaxLibraries = 16;  // that one request names

struct HelloRequest {};
struct ListRequest {
  std::vector<std::string> load;  // as RunRequest has it: the cases of these libraries are listed, too
};
struct StatsRequest {};
struct ShutdownRequest {};

// What one rank is made to do wrong, once. The daemon knows the kinds, and takes it only when it was started for that.
struct FaultRequest {
  std::string kind;        // "throw", "segfault", ...
  std::int64_t rank = 0;   // from 0; the daemon knows how many there are
  std::string stage;       // the name of a mark or how it begins; empty: any mark of the case's iterations
  std::int64_t count = 1;  // at which one of those marks: 1 .. 1,000,000

  bool operator==(const FaultRequest&) const = default;
};

// When to stop timing, in place of a fixed number of iterations. `repeat` is then the most iterations.
struct SamplingRequest {
  double precision = 0.01;      // 0.0001 .. 1: see MedianPrecision (statistics.h); of every stage
  std::int64_t max_ms = 10000;  // 1 .. 86,400,000: of all timed iterations

  bool operator==(const SamplingRequest&) const = default;
};
inline constexpr std::int64_t kMaxRepeat = 10000;

struct RunRequest {
  std::string case_name = "attention";
  Json params = Json::object();  // as given; or the string form when `from_kwargs`
  bool from_kwargs = false;  // {"op": "run", "kwargs": {...}}: ParametersFromKwargs comes before validation
  std::int64_t deadline_ms = kDefaultDeadlineMs;  // 1 .. 86,400,000
  std::int64_t warmup = 0;                        // 0 .. 1000
  std::int64_t repeat = 1;                        // 1 .. kMaxRepeat
  std::optional<SamplingRequest> sampling;        // absent: exactly `repeat` iterations
  bool checks = true;
  std::optional<std::uint64_t> perturb;  // the seed of random delays at every mark; absent: none
  std::string dump;                      // folder that tensors are written to; empty: none
  std::string inputs;                    // folder that input tensors are read from; empty: generated
  // Whose attention kernels: "cppool", "cudnn", a library's path, or "path,name". Empty: the daemon's default.
  std::string kernels;
  std::optional<FaultRequest> fault;
  std::vector<std::string> load;  // paths of shared libraries whose cases this request can name
  bool waits = false;             // the main stream's waits for other streams are stages of their own
  bool profile = false;           // the timed iterations are the range of a profiler
  std::string trace;              // file that a trace of the run is written to; empty: none
  // By path, of files that `load` or `kernels` names: the digest (digest.h) of the content that is meant. Others: what the file has.
  std::map<std::string, std::string> digests;
};
// What would come of the run, without running it: ok, or the answer (`skipped`, `error`) that the run would get.
struct ValidateRequest {
  RunRequest run;
};

using Operation =
    std::variant<HelloRequest, ListRequest, RunRequest, ValidateRequest, StatsRequest, ShutdownRequest>;

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

// At most kMaxRequestBytes, nesting at most kMaxNesting (never by recursion deeper than that), UTF-8, a JSON object, known keys, right
// types and ranges. Throws RequestError that names what is wrong and what is allowed.
Request ParseRequest(std::string_view line);

// One line, no newline. Throws InvalidRequest for what JSON cannot say: NaN, infinities, text that is not UTF-8.
std::string SerializeRequest(const Request& request);

}  // namespace cppool::protocol
