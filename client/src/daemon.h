// One daemon, spawned by the constructor, or a server's: greeted, asked one request at a time, ended. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <cppool/pool.h>
#include "client/src/peer.h"
#include "client/src/side_requests.h"
#include "client/src/stderr_tail.h"
#include "protocol/framing.h"
#include "protocol/request.h"

namespace cppool::client {

// Thrown when there is no answer. It becomes a PoolError once the daemon has ended and its stderr is
// complete.
struct Lost {
  PoolError::Kind kind;
  std::string message;
  // The daemon was ending in order and had not read the request: this does not count as an attempt.
  bool unread = false;
  // Says what the threads of a daemon do that does not answer. It is appended to the message.
  std::string state = {};
  // The request was cancelled: the daemon can be asked again. `state` is then where its ranks were.
  bool goes_on = false;
  // A server said it, of its daemon: the message is complete.
  bool told = false;
};

std::string Seconds(std::chrono::milliseconds time);  // "2.5 s"

// How long a wait may last before PoolOptions::interrupted is asked, and what it says; false without one, or
// when it throws.
inline constexpr std::chrono::milliseconds kInterruptionCheck{100};
bool Interrupted(const PoolOptions& options);
void Log(const PoolOptions& options, std::string_view line);
// Returns the words of the command line after the program.
std::vector<std::string> DaemonArguments(const PoolOptions& options);

class Daemon {
 public:
  // Throws PoolError of kind kStart. `options` is referred to for as long as this lives.
  explicit Daemon(const PoolOptions& options);
  ~Daemon() = default;  // kills the daemon at once if neither Stop nor Kill ended it
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Sends `hello` and checks the answer, within options.start_limit. Throws Lost of kind kStart.
  void Greet();
  // Sends the request with a new id and returns its answer. Throws Lost when there is none by `until`: then
  // the daemon must be killed, unless Lost says that it goes on. `side`: of a `run` or `validate`, what other
  // threads ask meanwhile; when the call is interrupted, the daemon is asked to cancel it. Null: neither.
  Json Ask(protocol::Operation operation, Clock::time_point until, SideRequests* side = nullptr);

  // Asks the server that other clients wait until it is told otherwise, or the connection ends. Throws Lost.
  void KeepTurn(bool keep, Clock::time_point until);

  bool Ended() { return peer_->Ended(); }
  bool EndedInOrder() { return peer_->EndedInOrder(); }
  std::string DescribeEnd() { return Name() + peer_->DescribeEnd(); }
  std::string StderrText() const { return tail_->Text(); }
  void CatchUpStderr();  // waits until all that it has written is read, at most half a second
  std::optional<StartFailure> WhyNotStarted() const { return tail_->StartFailure(); }  // once it has ended
  std::optional<Crash> WhyCrashed() const { return tail_->Crash(); }                   // once it has ended

  // Returns how much longer than the limit of a request its answer may take: a server's clients wait for each
  // other and for the start, and it has the limits of a call itself.
  std::chrono::milliseconds Slack() const;

  bool Stop();     // closes its input, waits for `grace`, then as Kill
  bool Kill();     // false: the process could not be ended; may be tried again
  void Abandon();  // in a forked child; the object must then be leaked

 private:
  Json AskLine(std::int64_t id, std::string outgoing, Clock::time_point until, SideRequests* side);
  bool Has(std::string_view feature) const;
  // Puts the requests of other threads behind what is being sent.
  void SendSide(std::int64_t id, SideRequests& side, std::string& outgoing);
  void AskToCancel(std::int64_t id, std::string& outgoing);  // and where the ranks are
  void AwaitSideAnswers();
  bool GiveSideAnswer(const Json& id, const Json& answer);  // false: it is not one

  void DropStale(Clock::time_point until);  // drops output from before a request: it cannot be its answer
  bool Send(std::string_view* unsent);      // false: the daemon has closed its stdin
  bool LeftUnread();  // whether the daemon closed its stdin before it had read everything; reported once
  bool Receive();     // false: end of file
  void ThrowLost(const Json& answer) const;  // if the answer says how the server's daemon was lost
  bool attached() const { return !options_.attach.empty(); }
  // Looks for the answer in what has been received. False: it is not there, or `until` has passed while
  // PoolOptions::log was called.
  bool NextAnswer(std::int64_t id, Clock::time_point until, Json* answer);
  // `part_unsent`: the daemon has not been sent the whole request.
  [[noreturn]] void ThrowClosed(const std::string& what, Clock::time_point until, bool part_unsent);
  std::string Name() const;  // "cppoold (pid 123, world size 2) "

  const PoolOptions& options_;
  std::unique_ptr<Peer> peer_;
  std::unique_ptr<StderrTail> tail_;
  protocol::LineReader reader_;
  std::int64_t last_id_ = 0;
  std::vector<std::string> features_;                          // of `hello`
  std::map<std::int64_t, SideRequests::Answer> side_answers_;  // by id: of requests that have been sent
  std::int64_t status_id_ = 0;  // of the `status` of an interrupted call; 0: none
  std::string where_;           // its answer
};

}  // namespace cppool::client
