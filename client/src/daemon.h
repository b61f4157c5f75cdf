// One daemon: spawned by the constructor, greeted, asked one request at a time, ended. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <cppool/pool.h>
#include "client/src/process.h"
#include "client/src/stderr_tail.h"
#include "protocol/framing.h"
#include "protocol/request.h"

namespace cppool::client {

// Thrown when there is no answer. It becomes a PoolError once the daemon has ended and its stderr is complete.
struct Lost {
  PoolError::Kind kind;
  std::string message;
  // The daemon was ending in order and had not read the request: this does not count as an attempt.
  bool untaken = false;
  // Of a daemon that does not answer: what its threads do, to be appended to the message.
  std::string state = {};
};

std::string Seconds(std::chrono::milliseconds time);  // "2.5 s"

// How long a wait may last before PoolOptions::interrupted is asked, and what it says; false without one, or when it throws.
inline constexpr std::chrono::milliseconds kInterruptionCheck{100};
bool Interrupted(const PoolOptions& options);
std::vector<std::string> DaemonArguments(
    const PoolOptions& options);                                  // of the command line, without the program
std::string DeviceList(const std::vector<std::string>& devices);  // as CUDA_VISIBLE_DEVICES has it

class Daemon {
 public:
  // Throws PoolError of kind kStart. `options` is referred to for as long as this lives.
  explicit Daemon(const PoolOptions& options);
  ~Daemon() = default;  // kills the daemon at once if neither Stop nor Kill ended it
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Sends `hello` and checks the answer, within options.start_limit. Throws Lost of kind kStart.
  void Greet();
  // Sends the request with a new id and returns its answer. Throws Lost when there is none by `until`: then the daemon must be killed.
  Json Ask(protocol::Operation operation, Clock::time_point until);

  bool Ended() { return process_->Ended(); }
  bool EndedInOrder() { return process_->EndedInOrder(); }
  std::string DescribeEnd() { return Name() + process_->DescribeEnd(); }
  std::string StderrText() const { return tail_->Text(); }
  void CatchUpStderr();  // waits until all that it has written is read, at most half a second
  std::optional<StartFailure> WhyNotStarted() const;  // once it has ended
  std::optional<Crash> WhyCrashed() const;            // likewise

  bool Stop();     // closes its input, waits for `grace`, then as Kill
  bool Kill();     // false: the process could not be ended; may be tried again
  void Abandon();  // in a forked child; the object must then be leaked

 private:
  void DropStale(Clock::time_point until);  // drops output from before a request: it cannot be its answer
  bool Send(std::string_view* unsent);      // false: the daemon has closed its stdin
  bool LeftUnread();  // whether the daemon closed its stdin before it had read everything; reported once
  bool Receive();     // false: end of file
  // Looks for the answer in what has been received. False: it is not there, or `until` has passed while PoolOptions::log was called.
  bool NextAnswer(std::int64_t id, Clock::time_point until, Json* answer);
  // `part_unsent`: of the request.
  [[noreturn]] void ThrowClosed(const std::string& what, Clock::time_point until, bool part_unsent);
  std::string Name() const;  // "cppoold (pid 123, world size 2) "
  void Log(std::string_view line) const;

  const PoolOptions& options_;
  std::unique_ptr<Process> process_;
  std::unique_ptr<StderrTail> tail_;
  protocol::LineReader reader_;
  std::int64_t last_id_ = 0;
};

}  // namespace cppool::client
