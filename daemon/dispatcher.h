// Lines in, answers out: parse -> validate -> run -> answer, one at a time and in order. It writes nothing itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/case_registry.h"
#include "daemon/case_run.h"
#include "daemon/watchdog.h"
#include "daemon/world.h"
#include "protocol/framing.h"
#include "protocol/request.h"
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
    protocol::Json init_ms = protocol::Json::object();  // likewise
    FailureLimits limits;
    // Writes a text to where the answers go. Given: requests may ask for faults.
    std::function<void(std::string_view)> allow_faults;
  };

  // All must outlive it. `world` is open. A null `watchdog`: deadlines are not kept.
  Dispatcher(World& world, const CaseRegistry& registry, Watchdog* watchdog, Options options);

  // The answer to one line. Nothing: the deadline has passed, and the watchdog answers. Throws nothing that a line could cause.
  std::optional<Answer> Handle(const protocol::LineReader::Line& line);
  // Once the answer is written: the ranks give pooled memory back.
  void AfterAnswer();

  // The watchdog's thread, when the deadline of a run has passed: the answer to it, fatal.
  std::string TimeoutAnswer() const;

 private:
  struct Counts {
    std::uint64_t requests = 0, passed = 0, failed = 0, skipped = 0, errors = 0, leaked_allocations = 0;
  };
  // What the watchdog may need to know while a run is under way.
  struct UnderWay {
    std::optional<protocol::Json> id;
    std::chrono::milliseconds deadline{0};
    std::shared_ptr<const CaseRun> run;  // null: not yet on the ranks
  };

  protocol::Json Hello() const;
  protocol::Json List() const;
  protocol::Json Stats();
  Answer AnswerStats(const std::optional<protocol::Json>& id);
  std::optional<Answer> Run(const protocol::Request& request, const protocol::RunRequest& run,
                            bool only_validate, Clock::time_point taken_up);
  // Everything that can refuse a run before it starts: throws Refusal or InvalidRequest.
  std::shared_ptr<const PreparedRun> PrepareRun(const protocol::RunRequest& request);
  std::optional<FaultMeans> MeansOfFaults() const;
  protocol::RunResult RunOnRanks(const protocol::RunRequest& request, const std::string& tag);
  void Count(protocol::Status status);
  Answer Finish(const protocol::Json& response) const;

  World& world_;
  const CaseRegistry& registry_;
  Watchdog* watchdog_;
  const Options options_;
  Counts counts_;
  bool trim_due_ = false;
  mutable std::mutex under_way_mutex_;
  UnderWay under_way_;
};

}  // namespace cppool::daemon
