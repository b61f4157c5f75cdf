// The run under way, as other threads see it: the watchdog, the crash reporter, and the thread that answers
// `status`.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "daemon/case_run.h"
#include "daemon/crash_reporter.h"
#include "daemon/library_probe.h"
#include "protocol/request_queue.h"
#include "protocol/response.h"

namespace cppool::daemon {

// Makes it the answer to a request that has been cancelled, whatever came of it.
void MarkCancelled(protocol::RunResult& result, const protocol::IncomingRequest& request);

// Thread-safe.
class UnderWay {
 public:
  using Clock = std::chrono::steady_clock;

  // On the thread that handles a `run` or `validate`.
  void Begin(protocol::RequestQueue::Entry request, Clock::time_point taken_up);
  void BeginList();  // on the same thread: a `list`
  void Loaded(LibraryKind kind, const std::string& file,
              const std::string& digest);            // a library that the request names
  void OnRanks(std::shared_ptr<const CaseRun> run);  // null: it has returned from them
  void End();

  protocol::Json WithLoaded(protocol::Json response) const;  // with what is known of its libraries

  // The answer to a passed deadline. As the next two, it is there within 0.35 s even when ranks are stuck.
  // `opening`: the library that is being loaded; empty: none.
  protocol::Json TimedOut(const std::string& opening) const;
  // The members of the answer to `status` that are about what is under way.
  protocol::Json Status(const std::string& opening) const;
  // Calls `write` with what a line on the progress has, if the request wants such lines and something has
  // changed since the last one. Not after End has returned.
  void Progress(const std::function<void(const protocol::Json& line)>& write);
  CrashPlace PlaceOf(pid_t thread) const;  // may get stuck

 private:
  struct State {
    protocol::RequestQueue::Entry request;  // null: nothing is under way
    Clock::time_point taken_up;
    pid_t thread = 0;                    // which handles it
    std::shared_ptr<const CaseRun> run;  // null: not on the ranks
    // What its answer says, whatever becomes of it: of the libraries that are loaded, in `libraries` and
    // `kernels`.
    protocol::Json loaded = protocol::Json::object();
  };
  State Now() const;
  static protocol::Json ProgressOf(const State& state);

  mutable std::mutex mutex_;
  State state_;
  std::mutex progress_mutex_;  // held while a line is written; taken before `mutex_`
  protocol::Json last_progress_;
};

}  // namespace cppool::daemon
