// What one rank's run of a case sees (cppool_case_context), and what it reported.
#pragma once

#include <cppool/case.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/parameter_reader.h"
#include "daemon/prepare.h"
#include "kernels/backend.h"
#include "kernels/fault_injector.h"
#include "protocol/response.h"

namespace cppool::daemon {

// On the rank's thread, as the rank's runtime is. None of the callbacks throws: what goes wrong in one is kept in `error`.
class CaseContext {
 public:
  CaseContext(const PreparedRun& run, kernels::RankRuntime& runtime);
  CaseContext(const CaseContext&) = delete;
  CaseContext& operator=(const CaseContext&) = delete;

  cppool_case_context* get() { return &c_; }
  int rank() const { return c_.runtime->rank; }

  // The runtime's failure in a callback, or how the case misused the interface; CPPOOL_OK: neither.
  cppool_status error_status() const;
  std::string error() const;
  const std::string& detail() const { return detail_; }  // what the case said with `fail`; may be empty

  bool checks_hold() const;

  // Once the case has returned: a fault that did not happen is an error, so that no answer hides it.
  void RequireFault();

  std::vector<protocol::Check> checks;
  std::vector<std::pair<std::string, double>> work;  // floating-point operations of one iteration, by stage
  protocol::Json extra = protocol::Json::object();

 private:
  static CaseContext& Self(cppool_case_context* c) { return *static_cast<CaseContext*>(c->self); }
  template <typename Function>
  void Guard(Function&& function) noexcept;
  bool NextIteration();
  void AddWork(const char* stage, double flops);
  void AddCheck(const cppool_check& check);
  void AddResult(const char* name, const char* json);
  void Misuse(const std::string& what);

  cppool_case_context c_{};
  const PreparedRun& run_;
  kernels::RankRuntime& runtime_;
  std::optional<kernels::FaultInjector> fault_;  // between the case and the runtime, on the rank it is for
  ParameterReader reader_;
  std::int64_t iteration_;  // of the next one; negative: warm-up
  bool iterating_ = true;
  cppool_status callback_status_ = CPPOOL_OK;
  std::string callback_error_;
  std::string detail_;
};

}  // namespace cppool::daemon
