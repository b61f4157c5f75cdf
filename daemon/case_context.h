// The cppool_case_context of one rank's run of a case, and what the case reported through it.
#pragma once

#include <cppool/case.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/meeting.h"
#include "daemon/parameter_reader.h"
#include "daemon/prepare.h"
#include "daemon/rank_report.h"
#include "kernels/backend.h"
#include "kernels/error.h"
#include "kernels/fault_injector.h"
#include "kernels/wait_stages.h"
#include "protocol/response.h"

namespace cppool::daemon {

// Used on the rank's thread, as the rank's runtime is. No callback throws: a callback's failure is kept for
// Outcome().
class CaseContext {
 public:
  // All must outlive it.
  CaseContext(const PreparedRun& run, kernels::RankRuntime& runtime, Meeting& meeting);
  CaseContext(const CaseContext&) = delete;
  CaseContext& operator=(const CaseContext&) = delete;

  cppool_case_context* get() { return &c_; }
  int rank() const { return c_.runtime->rank; }

  // Once the case has returned `returned`: its failure. The first of these that there is: a callback's
  // failure, or a misuse of the interface; a requested fault that did not happen; what the case reported with
  // `fail`; the runtime's last failure.
  CaseFailure Outcome(cppool_status returned);

  std::vector<protocol::Check> checks;
  std::vector<std::pair<std::string, double>> work;  // floating-point operations of one iteration, by stage
  protocol::Json extra = protocol::Json::object();
  kernels::StageSamples samples;  // with `sampling`, or with more than one iteration
  // Called before the first iteration. A failure that it returns is this rank's, which then begins none.
  // NULL: nothing to wait for.
  std::function<CaseFailure()> before_iterations;

 private:
  static CaseContext& Self(cppool_case_context* c) { return *static_cast<CaseContext*>(c->self); }
  template <typename Function>
  void Guard(Function&& function) noexcept;
  bool NextIteration();
  bool WantsMore();
  void EndCancelled();
  void AddWork(const char* stage, double flops);
  void AddCheck(const cppool_check& check);
  void AddLocation(const cppool_location& location);
  void AddResult(const char* name, const char* json);
  void Fail(const char* detail);
  void FailBy(const char* detail, int culprit);
  void Misuse(const std::string& what);
  bool HasFailed() const { return callback_failure_.status != CPPOOL_OK || !reader_.misuse().empty(); }

  cppool_case_context c_{};
  const PreparedRun& run_;
  kernels::RankRuntime& runtime_;
  std::optional<kernels::FaultInjector> fault_;  // on the fault's rank: between the case and the runtime
  ParameterReader reader_;
  std::optional<kernels::WaitStages> waits_;  // between the case and the runtime, where they are asked for
  Meeting& meeting_;
  std::int64_t iteration_;      // the next one's number; negative: warm-up
  std::int64_t decision_ = -1;  // the number of iterations at which all ranks decide next; -1: none yet
  std::int64_t asked_ = 0;      // how often the case has asked for the next iteration
  bool run_dry_ = false;        // the last iteration was followed by a decision
  bool begun_ = false;          // before_iterations has been called
  bool iterating_ = true;
  CaseFailure callback_failure_;
  // What the case reported with `fail` or `fail_by`: `status` is the one that the culprit is known for;
  // CPPOOL_OK: for any.
  CaseFailure reported_;
};

}  // namespace cppool::daemon
