// The ranks of a daemon, and what they can run: threads of this process, or Python processes.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/crash_reporter.h"
#include "daemon/prepare.h"
#include "daemon/trace_file.h"
#include "kernels/error.h"
#include "protocol/request.h"
#include "protocol/request_queue.h"
#include "protocol/response.h"

namespace cppool::daemon {

// What is thrown when an agent with ranks is lost, or has not answered in time: the daemon cannot go on.
struct RanksLost : kernels::RuntimeError {
  RanksLost(const std::string& text, std::string on_node,
            protocol::FailureKind of_kind = protocol::FailureKind::kInternal)
      : RuntimeError(CPPOOL_INTERNAL, text), node(std::move(on_node)), kind(of_kind) {}
  protocol::RunResult ToResult() const {
    protocol::RunResult result;
    result.status = protocol::Status::kError;
    result.error = what();
    result.failure = protocol::Failure{kind, std::nullopt, "", what()};
    result.failure->node = node;
    result.fatal = true;
    return result;
  }
  const std::string node;            // empty: there are several
  const protocol::FailureKind kind;  // kTimeout: it has not answered, and may yet
};

// On the dispatcher's thread, but for the last two. What requests are refused for is thrown: Refusal,
// InvalidRequest, RuntimeError, RanksLost.
class Ranks {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Ranks() = default;

  // The members of `hello` about the ranks, and the features that only this kind of ranks has.
  virtual protocol::Json Hello() const = 0;
  virtual std::vector<std::string_view> Features() const = 0;
  // The entries of the answer to `list`.
  virtual protocol::Json Cases(const protocol::ListRequest& request, Clock::time_point until) = 0;
  // All checks of a run, which is not run.
  virtual void Validate(const protocol::RunRequest& request, Clock::time_point until) = 0;
  // `trace`: what the answer's trace has so far; NULL: none was asked for.
  virtual protocol::RunResult Run(const protocol::RequestQueue::Entry& request, const std::string& tag,
                                  Clock::time_point until, RunTrace* trace) = 0;
  // How long after a deadline Run may still need to answer by itself. The watchdog answers then.
  virtual std::chrono::milliseconds DeadlineMargin() const = 0;
  // No request has followed the last answer for a moment.
  virtual void WhileIdle() = 0;
  virtual protocol::Json Memory() = 0;  // by rank, as `stats` has it
  virtual void Close() {}               // at the end: processes of its own end

  // Any thread: the library that is being opened now, empty: none; and the file that a request named and of
  // which `copy` was loaded, empty: none.
  virtual std::string BeingOpened() const = 0;
  virtual std::string NamedLibrary(const std::string& copy) const = 0;
};

}  // namespace cppool::daemon
