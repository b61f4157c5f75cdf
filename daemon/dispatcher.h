// From a request to its answer: validate, run. One at a time and in order, but for those that overtake. It
// does no output itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/crash_reporter.h"
#include "daemon/ranks.h"
#include "daemon/under_way.h"
#include "daemon/watchdog.h"
#include "protocol/framing.h"
#include "protocol/request.h"
#include "protocol/request_queue.h"
#include "protocol/response.h"

namespace cppool::daemon {

struct Answer {
  std::string text;       // with sentinel and newline
  bool fatal = false;     // end with a non-zero exit code once it is written
  bool shutdown = false;  // end in order once it is written
};

class Dispatcher {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::string sentinel{protocol::kDefaultSentinel};
    std::string version;  // for `hello`
    Clock::time_point started = Clock::now();
    protocol::Json init_ms = protocol::Json::object();  // for `hello`
  };

  // All must outlive it. Without a `watchdog` deadlines are not enforced.
  Dispatcher(Ranks& ranks, UnderWay& under_way, Watchdog* watchdog, Options options);

  // The answer to one request. Nothing when the deadline has passed: the watchdog answers. No request makes
  // it throw.
  std::optional<Answer> Handle(const protocol::RequestQueue::Entry& request);
  // Any thread, while another one is in Handle: the lines of the answers to a request that overtakes; that of
  // a waiting request which it cancels comes first.
  std::string Overtake(const protocol::IncomingRequest& request, protocol::RequestQueue& queue);
  // Any thread: calls `write` with a line on the progress of the run under way, if its request wants such
  // lines. Not any more when Handle has returned.
  void Progress(const std::function<void(std::string_view line)>& write);
  void WhileIdle() { ranks_.WhileIdle(); }

  // Any thread, when the process has crashed on `thread`. May get stuck.
  CrashPlace PlaceOf(pid_t thread) const;
  // For the watchdog's thread, when the deadline of a run has passed: its answer, which is fatal.
  std::string TimeoutAnswer() const;

 private:
  struct Counts {
    std::atomic<std::uint64_t> requests = 0, passed = 0, failed = 0, skipped = 0, errors = 0;
    std::uint64_t leaked_allocations = 0;
  };

  protocol::Json Hello() const;
  Answer List(const protocol::ListRequest& request, const std::optional<protocol::Json>& id,
              Clock::time_point taken_up);
  protocol::Json Stats();
  // What `members` throws is answered.
  Answer AnswerWith(const std::optional<protocol::Json>& id, const std::function<protocol::Json()>& members);
  std::optional<Answer> Run(const protocol::RequestQueue::Entry& request, Clock::time_point taken_up);
  Answer AnswerCancelled(const protocol::IncomingRequest& request);  // of one that waited
  void Count(protocol::Status status);
  // `response` gets what is loaded of the request's libraries.
  Answer FinishLoaded(protocol::Json response) const;
  Answer Finish(const protocol::Json& response) const;

  Ranks& ranks_;
  UnderWay& under_way_;
  Watchdog* watchdog_;
  const Options options_;
  Counts counts_;
};

}  // namespace cppool::daemon
