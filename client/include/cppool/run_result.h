// What Pool::Run returns.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <cppool/pool_error.h>
#include <cppool/result.h>

namespace cppool {

struct Failure {
  std::string kind;  // "mismatch", "timeout", "out_of_memory", ...: listed in protocol/README.md
  std::optional<int> rank;
  std::string stage;
  std::string detail;
  std::string node = {};  // of the rank, where ranks are on several machines
};

struct Result {
  Status status = Status::kError;
  std::string error;               // for people; empty when passed
  std::optional<Failure> failure;  // present when not passed
  bool fatal = false;              // the daemon ended with this answer; the next call spawns another
  std::vector<Rank> ranks;
  std::vector<Check> checks;
  std::vector<std::pair<std::string, double>> tflops;  // per GPU, by stage
  double wall_ms = 0;
  std::optional<std::uint64_t> seed;
  std::string stopped;  // with `sampling`, what ended it: "precision", "max_ms" or "repeat" (`most`)
  std::vector<std::string> warnings;  // for people: that nothing was compared, for example
  Leaks leaks;
  int attempts = 1;               // daemons that were sent the request, this one included
  std::vector<LostAttempt> lost;  // the others, in order: each died or broke the protocol
  // "flaky (passed at attempt 2)" when others were lost: it ended differently in two daemons. Else empty.
  std::string flaky;
  Json json;                                             // the whole answer
  std::shared_ptr<const client::Asked> asked = nullptr;  // the pool's options and the request, for Command()

  bool ok() const { return status == Status::kPassed; }
  explicit operator bool() const { return ok(); }  // CHECK(result) of Catch2 then shows it
  // The shell command that does the same again; empty for a Result that is not of Run. Made when it is asked
  // for: a Result keeps what it is made of.
  std::string Command() const;
  // Status, error, lost attempts, warnings, a table of the checks that do not hold, the times of the stages
  // if it passed, the ranks that failed, or what they wait in, and "repeat: " with the command, as lines.
  std::string Describe() const;
};
// Describe(). GoogleTest and Catch2 print a Result with it.
std::ostream& operator<<(std::ostream& out, const Result& result);

}  // namespace cppool
