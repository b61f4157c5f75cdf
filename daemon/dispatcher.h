// From a request to its answer: validate, run. One at a time and in order, but for those that overtake. It
// does no output itself.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/case_registry.h"
#include "daemon/case_run.h"
#include "daemon/leftovers.h"
#include "daemon/library_store.h"
#include "daemon/prepare.h"
#include "daemon/under_way.h"
#include "daemon/watchdog.h"
#include "daemon/world.h"
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
    FailureLimits limits;
    protocol::KernelChoice kernels;  // for a request without "kernels"; nothing named: the case's own
    LibraryStore::Options libraries;
    // Device memory that libraries may take beside their cases' allocations before another daemon should be
    // used.
    std::size_t most_library_bytes = std::size_t{1} << 30;
    // Writes a text to the channel of answers. When it is set, requests may ask for faults.
    std::function<void(std::string_view)> allow_faults;
  };

  // All must outlive it. `world` is open, and whole: throws otherwise. Without a `watchdog` deadlines are not
  // enforced.
  Dispatcher(World& world, const CaseRegistry& registry, Watchdog* watchdog, Options options);

  // The answer to one request. Nothing when the deadline has passed: the watchdog answers. No request makes
  // it throw.
  std::optional<Answer> Handle(const protocol::RequestQueue::Entry& request);
  // Any thread, while another one is in Handle: the lines of the answers to a request that overtakes; that of
  // a waiting request which it cancels comes first.
  std::string Overtake(const protocol::IncomingRequest& request, protocol::RequestQueue& queue);
  // Any thread: calls `write` with a line on the progress of the run under way, if its request wants such
  // lines. Not any more when Handle has returned.
  void Progress(const std::function<void(std::string_view line)>& write);
  // To be called when no request has followed the last answer for a moment: the ranks give pooled memory
  // back. Between requests that follow one another they keep it: to return it and take it again would cost
  // each of them some milliseconds.
  void WhileIdle();

  // Any thread, when the process has crashed on `thread`. May get stuck.
  CrashPlace PlaceOf(pid_t thread) const;
  // Any thread: the file that a request named and of which `copy` was loaded; empty: none.
  std::string NamedLibrary(const std::string& copy) const { return libraries_.Named(copy); }

  // For the watchdog's thread, when the deadline of a run has passed: its answer, which is fatal.
  std::string TimeoutAnswer() const;

 private:
  struct Counts {
    std::atomic<std::uint64_t> requests = 0, passed = 0, failed = 0, skipped = 0, errors = 0;
    std::uint64_t leaked_allocations = 0;
  };

  protocol::Json Hello() const;
  // The daemon's cases and those of `libraries`. Throws LibraryError or StartError.
  const CaseRegistry& CasesWith(const std::vector<const LoadedLibrary*>& libraries);
  std::vector<const LoadedLibrary*> LoadAll(const std::vector<std::string>& files, LibraryKind kind,
                                            Clock::time_point until,
                                            const std::map<std::string, std::string>& digests);
  // The kernels that a case may choose: a user's library is opened, and cuDNN's when the case wants its
  // kernel. Throws Refusal.
  WantedKernels LoadKernels(const protocol::RunRequest& request, Clock::time_point until);
  Answer List(const protocol::ListRequest& request, const std::optional<protocol::Json>& id,
              Clock::time_point taken_up);
  protocol::Json Stats();
  Answer AnswerStats(const std::optional<protocol::Json>& id);
  std::optional<Answer> Run(const protocol::RequestQueue::Entry& request, Clock::time_point taken_up);
  // All checks before a run starts. Throws Refusal or InvalidRequest.
  // `host`: receives its parts, for a trace; NULL: none was asked for.
  std::shared_ptr<const PreparedRun> PrepareRun(const protocol::RunRequest& request, Clock::time_point until,
                                                std::vector<HostSlice>* host = nullptr);
  // Device memory of this process and of others that is not in the ranks' pools, by rank; empty: not known.
  std::vector<std::size_t> MemoryBesidePools() const;
  std::string WhyRespawn() const;  // empty: this daemon can go on
  std::optional<FaultMeans> MeansOfFaults() const;
  // `trace`: what the answer's trace has so far; NULL: none was asked for.
  protocol::RunResult RunOnRanks(const protocol::RequestQueue::Entry& request, const std::string& tag,
                                 Clock::time_point until, RunTrace* trace);
  Answer AnswerCancelled(const protocol::IncomingRequest& request);  // of one that waited
  // Writes the file. A run that passed, and cannot have its trace, is an error; others get a warning.
  void SaveTrace(const std::string& file, CaseRun& run, RunTrace& trace, protocol::RunResult& result) const;
  void Count(protocol::Status status);
  // `response` gets what is loaded of the request's libraries.
  Answer FinishLoaded(protocol::Json response) const;
  Answer Finish(const protocol::Json& response) const;

  World& world_;
  const CaseRegistry& registry_;
  Watchdog* watchdog_;
  const Options options_;
  LibraryStore libraries_;
  Leftovers leftovers_;
  std::vector<const LoadedLibrary*> joined_with_;  // the libraries of `joined_`
  std::optional<CaseRegistry> joined_;             // for the latest request with libraries
  std::vector<std::size_t> beside_pools_;  // MemoryBesidePools() before the first library; empty: none yet
  Counts counts_;
  bool trim_due_ = false;  // a case has run since the last trim
  UnderWay under_way_;
};

}  // namespace cppool::daemon
