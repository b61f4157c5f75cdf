#include "daemon/case_context.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>

#include "kernels/error.h"

namespace cppool::daemon {

using protocol::Json;

CaseContext::CaseContext(const PreparedRun& run, kernels::RankRuntime& runtime)
    : run_(run), runtime_(runtime), reader_(run.params, run.registered.schema), iteration_(-run.warmup) {
  c_.abi = CPPOOL_CASE_ABI;
  c_.struct_size = sizeof(c_);
  if (run.fault && run.fault->rank == runtime.seam()->rank) fault_.emplace(*run.fault, runtime);
  c_.runtime = fault_ ? fault_->seam() : runtime.seam();
  c_.params_json = run.params_json.c_str();
  c_.checks = run.checks;
  c_.dump = run.dump.empty() ? nullptr : run.dump.c_str();
  c_.inputs = run.inputs.empty() ? nullptr : run.inputs.c_str();
  c_.prepared = run.prepared.get();
  c_.self = this;
  c_.integer = [](cppool_case_context* c, const char* name) { return Self(c).reader_.Integer(name); };
  c_.number = [](cppool_case_context* c, const char* name) { return Self(c).reader_.Number(name); };
  c_.boolean = [](cppool_case_context* c, const char* name) -> int { return Self(c).reader_.Boolean(name); };
  c_.string = [](cppool_case_context* c, const char* name) { return Self(c).reader_.String(name); };
  c_.next_iteration = [](cppool_case_context* c) -> int {
    bool more = false;
    Self(c).Guard([&] { more = Self(c).NextIteration(); });
    return more;
  };
  c_.work = [](cppool_case_context* c, const char* stage, double flops) {
    Self(c).Guard([&] { Self(c).AddWork(stage, flops); });
  };
  c_.check = [](cppool_case_context* c, const cppool_check* check) {
    Self(c).Guard([&] { Self(c).AddCheck(*check); });
  };
  c_.result = [](cppool_case_context* c, const char* name, const char* json) {
    Self(c).Guard([&] { Self(c).AddResult(name, json); });
  };
  c_.fail = [](cppool_case_context* c, const char* detail) {
    Self(c).Guard([&] { Self(c).detail_ = detail ? detail : ""; });
  };
}

template <typename Function>
void CaseContext::Guard(Function&& function) noexcept {
  try {
    function();
  } catch (const kernels::RuntimeError& error) {
    callback_status_ = error.status();
    callback_error_ = error.what();
  } catch (const std::exception& error) {
    Misuse(error.what());
  }
}

cppool_status CaseContext::error_status() const {
  return callback_status_ == CPPOOL_OK && !reader_.misuse().empty() ? CPPOOL_INTERNAL : callback_status_;
}

std::string CaseContext::error() const {
  return callback_status_ == CPPOOL_OK ? reader_.misuse() : callback_error_;
}

bool CaseContext::checks_hold() const {
  return std::all_of(checks.begin(), checks.end(), [](const auto& check) { return check.ok; });
}

void CaseContext::RequireFault() {
  const std::string why_not = fault_ ? fault_->WhyNot() : "";
  if (why_not.empty() || callback_status_ != CPPOOL_OK) return;
  callback_status_ = CPPOOL_INVALID_REQUEST;
  callback_error_ = why_not;
}

void CaseContext::Misuse(const std::string& what) {
  if (callback_status_ != CPPOOL_OK) return;
  callback_status_ = CPPOOL_INTERNAL;
  callback_error_ = what;
}

bool CaseContext::NextIteration() {
  if (!iterating_) return false;
  // A bug of the case ends it: no further iteration.
  iterating_ = iteration_ < run_.repeat && error_status() == CPPOOL_OK;
  if (fault_) fault_->InIterations(iterating_);
  if (iterating_) {
    runtime_.BeginIteration(static_cast<int>(iteration_++));
  } else {
    runtime_.EndIterations();
  }
  return iterating_;
}

void CaseContext::AddWork(const char* stage, double flops) {
  const std::string name = stage ? stage : "";
  for (auto& [known, amount] : work) {
    if (known == name) {
      amount = flops;  // said again in every iteration: the same work
      return;
    }
  }
  work.emplace_back(name, flops);
}

void CaseContext::AddCheck(const cppool_check& check) {
  protocol::Check result;
  result.tensor = check.tensor ? check.tensor : "";
  result.against = check.against ? check.against : "";
  result.rank = c_.runtime->rank;
  result.max_abs_err = check.max_abs_err;
  result.rel_err = check.rel_err;
  result.tolerance = check.tolerance;
  result.ok = check.ok && std::isfinite(check.max_abs_err) && std::isfinite(check.rel_err);
  const cppool_case& definition = *run_.registered.definition;
  if (definition.struct_size > offsetof(cppool_case, features) && check.ratio != 0)
    result.ratio = check.ratio;
  checks.push_back(std::move(result));
}

void CaseContext::AddResult(const char* name, const char* json) {
  const std::string key = name ? name : "";
  if (key.empty() || key == "rank" || key == "ok" || key == "error" || key == "gpu_ms") {
    return Misuse("the case reported a result named '" + key + "', which it cannot have");
  }
  Json value = Json::parse(json ? json : "", nullptr, false);
  if (value.is_discarded()) return Misuse("the case reported a result '" + key + "' that is not JSON");
  extra[key] = std::move(value);
}

}  // namespace cppool::daemon
