// One daemon's life: spawned by the constructor, greeted, asked one request at a time, ended. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <cppool/pool.h>
#include "client/src/process.h"
#include "protocol/framing.h"
#include "protocol/request.h"
#include "client/src/stderr_tail.h"

namespace cppool::client {

// No answer: what a PoolError is made of once the daemon is gone and its stderr complete.
struct Lost {
  PoolError::Kind kind;
  std::string message;
  bool untaken = false;   // the daemon was going, as it should, before it read the request: it is no attempt
  std::string look = {};  // of a daemon that does not answer: what was seen of it, to be appended
};

std::string Seconds(std::chrono::milliseconds time);              // "2.5 s"
std::string DeviceList(const std::vector<std::string>& devices);  // as CUDA_VISIBLE_DEVICES has it

class Daemon {
 public:
  // Throws PoolError of kind kStart. `options` is referred to for as long as this lives.
  explicit Daemon(const PoolOptions& options);
  ~Daemon() = default;  // kills without a grace what Stop or Kill did not end
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Sends `hello` and checks the answer, within options.start_limit. Throws Lost of kind kStart.
  void Greet();
  // The answer to the request, whose id this sets. Throws Lost when there is none by `until`; the daemon is
  // then to be killed.
  Json Ask(protocol::Operation operation, Clock::time_point until);

  bool Ended() { return process_->Ended(); }
  bool EndedInOrder() { return process_->EndedInOrder(); }
  std::string DescribeEnd() { return Name() + process_->DescribeEnd(); }
  std::string StderrText() const { return tail_->Text(); }
  std::optional<StartFailure> WhyNotStarted() const;  // once it has ended

  bool Stop();     // closes its input, waits for `grace`, then as Kill
  bool Kill();     // false: the process could not be ended; may be tried again
  void Abandon();  // in a forked child; the object must then be leaked

 private:
  void DropStale(Clock::time_point until);  // what came before a request does not answer it, whatever it says
  bool Send(std::string_view* unsent);      // false: it does not read any more
  bool LeftUnread();  // whether it closed its stdin before it had read what was sent; told once
  bool Receive();     // false: end of file
  // Of what has been received. False: there is none, or the time is up and PoolOptions::log takes it all.
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
