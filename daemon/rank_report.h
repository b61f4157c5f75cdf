// What one rank of a run has to say: plain data, which a rank of another process or machine sends as JSON.
// The trace is apart.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/error.h"
#include "protocol/response.h"

namespace cppool::daemon {

enum class RankPhase {
  kUnknown,  // the rank could not be read in time
  kWaiting,  // for the ranks to be clean
  kRunning,
  kReady,  // waiting for the other ranks before its first iteration
  kEnding,
  kDone
};

// How well a failure explains the failures of other ranks, best first.
enum class FailureOrigin {
  kOwn,         // caused by the rank itself
  kSkip,        // inapplicable or unsupported: the rank stopped without an error
  kPropagated,  // caused by another rank, or reported by a communicator
  kMismatch,    // a check did not hold: no other rank is affected
  kAfterAbort,  // probably caused by the abort
  kNone         // no failure
};

// Why a rank's run of a case failed. `culprit` as RuntimeError has it.
struct CaseFailure {
  cppool_status status = CPPOOL_OK;  // CPPOOL_OK: it has not failed
  std::string text;
  int culprit = kernels::RuntimeError::kOwn;
  bool gave_reason = false;  // `text` is the case's own, by `fail`
};

struct RankFailure : CaseFailure {
  std::string stage;  // in which it failed
  FailureOrigin origin = FailureOrigin::kNone;
  int order = 0;  // among the failures of all ranks
};

FailureOrigin OriginOf(const CaseFailure& failure, bool after_abort);

struct RankReport {
  int rank = 0;      // its number in the world
  std::string node;  // where it is, as its head names it; empty: in this process
  RankPhase phase = RankPhase::kUnknown;
  RankFailure failure;  // the one that explains most, when there are several
  bool needs_probe =
      false;  // its end failed or left a group of calls open: its communication may be out of step

  // Complete once the case's function has returned; times and leaks with kDone, after an end without a
  // failure.
  std::vector<protocol::Check> checks;
  kernels::StageTimes times;
  kernels::StageSamples samples;
  std::vector<std::pair<std::string, double>> work;  // floating-point operations of one iteration, by stage
  protocol::Json extra = protocol::Json::object();   // results of the case's own
  kernels::LiveMemory leaks;

  // Of a case in Python. `differed`, `left`: as the answer has them; empty: nothing. With `replace`, which
  // says why, its ranks are to be replaced before the case is begun.
  std::string traceback, output, replace;
  std::vector<std::string> warnings;
  protocol::Json differed = protocol::Json::object(), left = protocol::Json::object();

  // In a snapshot: where it is.
  std::vector<kernels::StreamProgress> streams;
  std::vector<int> awaits;      // with kReady: the ranks that are not
  std::int64_t iterations = 0;  // that a rank of Python has begun
  std::vector<std::vector<std::string>>
      stacks;  // where asked for: of its own thread, then of those of its streams
};

inline bool IsDone(const RankReport& report) { return report.phase == RankPhase::kDone; }

// Every number is kept exactly: those that are not finite are the words "nan", "inf" and "-inf".
protocol::Json ToJson(const RankReport& report);
// Throws std::runtime_error when a member is missing or of another type, or the rank is not of `place`, which
// the report comes from.
RankReport RankReportFrom(const protocol::Json& json, const kernels::Place& place);

}  // namespace cppool::daemon
