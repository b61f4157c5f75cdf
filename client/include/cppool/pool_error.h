// What a call of a Pool throws when the daemon gives no answer.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace cppool {

// Why a daemon could not start, from the line for programs at the end of its stderr. What it does not say is empty or absent.
struct StartFailure {
  std::string error;   // for people
  std::string kind;    // as Failure has it
  std::string detail;  // what happened, without advice
  std::string stage;   // "arguments", "process", "backend", "cases", "ranks"
  std::optional<int> rank;
  std::optional<int> world_size;
  // How many CUDA sees; with kind "unsupported" and less than world_size: too many ranks.
  std::optional<int> devices;
  std::string backend, transport;
};

// Where a daemon was when a case or a library ended it, from a line for programs on its stderr. What is not known is empty or absent.
struct Crash {
  std::string error;  // for people
  std::optional<int> rank;
  std::string stage;  // the last mark that the rank had come to
  std::string case_name;
  std::string library;             // the file whose code it was, or that the case is from; empty: built in
  std::vector<std::string> stack;  // the thread's functions, innermost first
};

// A call got no answer. what() ends with the tail of the daemon's stderr.
class PoolError : public std::runtime_error {
 public:
  enum class Kind {
    kStart,        // the daemon could not be spawned, or did not answer `hello` correctly in time
    kDied,         // the daemon ended before it answered
    kTimeout,      // the daemon did not answer within the limit; it was killed
    kProtocol,     // the daemon's answer was not valid, or it closed a pipe and did not end; it was killed
    kInterrupted,  // PoolOptions::interrupted ended the call
  };
  PoolError(Kind kind, const std::string& message, std::string stderr_tail, int attempts = 1,
            std::optional<StartFailure> start_failure = std::nullopt, std::string diagnosis = "",
            std::optional<Crash> crash = std::nullopt);

  Kind kind() const { return kind_; }
  // Daemons that were sent the request; the last may not have started.
  int attempts() const { return attempts_; }
  const std::string& stderr_tail() const { return stderr_tail_; }  // at most 4000 characters
  // Present with kStart when the daemon wrote why; an older daemon, or one that was killed, does not.
  const std::optional<StartFailure>& start_failure() const { return start_failure_; }
  // With kTimeout: what the system knew of the daemon's threads, which what() has too. Else empty.
  const std::string& diagnosis() const { return diagnosis_; }
  // Present with kDied when the daemon crashed, or a case called exit(), and it could write where. what() has its `error`.
  const std::optional<Crash>& crash() const { return crash_; }

 private:
  Kind kind_;
  std::string stderr_tail_;
  int attempts_;
  std::optional<StartFailure> start_failure_;
  std::string diagnosis_;
  std::optional<Crash> crash_;
};
std::string_view ToString(PoolError::Kind kind);  // "start", "died", "timeout", "protocol", "interrupted"

}  // namespace cppool
