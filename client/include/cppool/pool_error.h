// What a call of a Pool throws when the daemon gives no answer.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <cppool/daemon_end.h>

namespace cppool {

namespace client {
struct Asked;
struct PoolAccess;
}  // namespace client

enum class PoolErrorKind {
  kStart,        // the daemon could not be spawned, or did not answer `hello` correctly in time
  kDied,         // the daemon ended before it answered
  kTimeout,      // the daemon did not answer within the limit; it was killed
  kProtocol,     // the daemon's answer was not valid, or it closed a pipe and did not end; it was killed
  kInterrupted,  // PoolOptions::interrupted ended the call
  kQueue,        // other clients of the server used the devices for all of PoolOptions::queue_limit
};

// A daemon that was sent a request before the last one. It died or broke the protocol.
struct LostAttempt {
  PoolErrorKind kind = PoolErrorKind::kDied;
  std::string error;           // for people: how it ended, with all that is known of a crash
  std::optional<Crash> crash;  // as PoolError has it
  std::string stderr_tail;     // at most 4000 characters
};

// A call got no answer. what() ends with the tail of the daemon's stderr.
class PoolError : public std::runtime_error {
 public:
  using Kind = PoolErrorKind;
  PoolError(Kind kind, const std::string& message, std::string stderr_tail, int attempts = 1,
            std::optional<StartFailure> start_failure = std::nullopt, std::string diagnosis = "",
            std::optional<Crash> crash = std::nullopt, std::vector<LostAttempt> lost = {});

  Kind kind() const { return kind_; }
  // Daemons that were sent the request; the last may not have started.
  int attempts() const { return attempts_; }
  const std::string& stderr_tail() const { return stderr_tail_; }  // at most 4000 characters
  // Present with kStart when the daemon wrote why; an older daemon, or one that was killed, does not.
  const std::optional<StartFailure>& start_failure() const { return start_failure_; }
  // With kTimeout what the system knew of the daemon's threads, with kInterrupted where its ranks were;
  // what() has it, too. Else empty.
  const std::string& diagnosis() const { return diagnosis_; }
  // Present with kDied when the daemon crashed, or a case called exit(), and it could write where. what() has
  // its `error`.
  const std::optional<Crash>& crash() const { return crash_; }
  // Returns the daemons that were sent the request before, in order.
  const std::vector<LostAttempt>& lost() const { return lost_; }
  // "flaky (timeout at attempt 2)" when the request ended differently in two of the daemons. Else empty.
  std::string flaky() const;
  // The shell command that does the same again; empty for an error that is not of Run.
  std::string Command() const;

 private:
  friend struct client::PoolAccess;
  Kind kind_;
  std::string stderr_tail_;
  int attempts_;
  std::optional<StartFailure> start_failure_;
  std::string diagnosis_;
  std::optional<Crash> crash_;
  std::vector<LostAttempt> lost_;
  std::shared_ptr<const client::Asked> asked_;
};
std::string_view ToString(PoolError::Kind kind);  // "start", "died", "timeout", "protocol", "interrupted",
                                                  // "queue"

}  // namespace cppool
