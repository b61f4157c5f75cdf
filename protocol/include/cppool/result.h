// The parts of an answer to `run`, as the daemon writes them and the client hands them out.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace cppool {

using Json = nlohmann::json;

// Failed: a check did not hold. Skipped: meaningful, but not supported here; `error` says why.
enum class Status { kPassed, kFailed, kSkipped, kError };
std::string_view ToString(Status status);  // "passed", ...
std::ostream& operator<<(std::ostream& out, Status status);

// The element of a checked tensor that is furthest off.
struct Worst {
  Json index;  // {"sequence": 0, "token": 17, "head": 3, "dim": 5}; of a case's own tensor also [17, 5]
  double got = 0, wanted = 0;
};
std::string DescribeIndex(const Json& index);  // "head 3, token 17"

// One compared tensor of one rank.
struct Check {
  std::string tensor;   // "out", "dq", ...
  std::string against;  // "no_cp", "oracle", ...
  int rank = 0;
  double max_abs_err = 0;  // NaN when it is not finite; so are the other numbers
  double rel_err = 0;      // RMS of the difference over RMS of the reference
  double tolerance = 0;
  bool ok = false;
  std::optional<double> ratio;  // against the oracle: our largest error over plain attention's
  // Of one that does not hold, where it is known:
  std::optional<Worst> worst = {};
  std::optional<std::uint64_t> bad = {};  // how many elements are further off than they may be
  std::string where = {};                 // what these share: "head 3, sequence 0, tokens 0 to 63"
};

// "worst at head 3, token 17: got 1.5, wanted 0.5; 64 elements are out: head 3, tokens 0 to 63". Empty: the
// check does not say.
std::string DescribeWorst(const Check& check);

struct Rank {
  int rank = 0;
  bool ok = false;
  std::string error;                                   // empty when it is ok
  std::vector<std::pair<std::string, double>> gpu_ms;  // by stage
  // Milliseconds of every timed iteration, by stage of the main stream. Only with `sampling`, or `repeat`
  // above 1.
  std::vector<std::pair<std::string, std::vector<double>>> samples = {};
  Json extra = Json::object();  // what the case reported beside these
  // Of a case in Python: the exception's traceback, if it failed, and the end of what the rank has written.
  std::string traceback = {}, output = {};
};

// What a case has left behind in the daemon. All 0: nothing.
struct Leaks {
  std::uint64_t allocations = 0;   // made with `alloc` and `alloc_host`; the daemon has freed them
  std::uint64_t device_bytes = 0;  // in these allocations
  std::uint64_t host_bytes = 0;    // in these allocations, and what other host memory grew by
  std::uint64_t threads = 0, fds = 0, processes = 0;

  bool any() const { return allocations || device_bytes || host_bytes || threads || fds || processes; }
};

}  // namespace cppool
