#include "daemon/case_context.h"

#include <cmath>
#include <exception>

#include <utility>

#include "kernels/error.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

using protocol::Json;

namespace {

// An answer is nested at most protocol::kMaxNesting deep, and has three levels around a result.
constexpr int kDeepestResult = 60;

}  // namespace

CaseContext::CaseContext(const PreparedRun& run, kernels::RankRuntime& runtime, Meeting& meeting)
    : run_(run),
      runtime_(runtime),
      reader_(run.params, run.registered.schema),
      meeting_(meeting),
      iteration_(-run.options.warmup) {
  c_.abi = CPPOOL_CASE_ABI;
  c_.struct_size = sizeof(c_);
  if (run.fault && run.fault->rank == runtime.seam()->rank) fault_.emplace(*run.fault, runtime);
  if (run.options.waits) waits_.emplace(runtime.seam());  // a request has one of the two
  c_.runtime = fault_ ? fault_->seam() : waits_ ? waits_->seam() : runtime.seam();
  c_.params_json = run.params_json.c_str();
  c_.checks = run.options.checks;
  c_.dump = run.options.dump.empty() ? nullptr : run.options.dump.c_str();
  c_.inputs = run.options.inputs.empty() ? nullptr : run.options.inputs.c_str();
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
  c_.locate = [](cppool_case_context* c, const cppool_location* location) {
    Self(c).Guard([&] { Self(c).AddLocation(*location); });
  };
  c_.result = [](cppool_case_context* c, const char* name, const char* json) {
    Self(c).Guard([&] { Self(c).AddResult(name, json); });
  };
  c_.fail = [](cppool_case_context* c, const char* detail) { Self(c).Guard([&] { Self(c).Fail(detail); }); };
  c_.fail_by = [](cppool_case_context* c, const char* detail, int culprit) {
    Self(c).Guard([&] { Self(c).FailBy(detail, culprit); });
  };
}

template <typename Function>
void CaseContext::Guard(Function&& function) noexcept {
  try {
    function();
  } catch (const kernels::RuntimeError& error) {
    callback_failure_ = {error.status(), error.what(), error.culprit()};
  } catch (const std::exception& error) {
    Misuse(error.what());
  }
}

CaseFailure CaseContext::Outcome(cppool_status returned) {
  if (callback_failure_.status != CPPOOL_OK) return callback_failure_;
  if (!reader_.misuse().empty()) return {CPPOOL_INTERNAL, reader_.misuse()};
  if (returned == CPPOOL_OK) {
    const std::string why_not =
        fault_ ? fault_->WhyNot() : "";  // no answer may hide that the fault did not happen
    return {why_not.empty() ? CPPOOL_OK : CPPOOL_INVALID_REQUEST, why_not};
  }
  if (!reported_.text.empty()) {
    const bool known = reported_.status == CPPOOL_OK || reported_.status == returned;
    return {returned, reported_.text, known ? reported_.culprit : kernels::RuntimeError::kOwn, true};
  }
  const cppool_failure& last = *c_.runtime->last_failure(c_.runtime);
  if (last.status != CPPOOL_OK && *last.text) return {returned, last.text, last.culprit};
  return {returned, "the case returned status " + std::to_string(returned) + " without a reason"};
}

void CaseContext::Fail(const char* detail) {
  const cppool_failure& last = *c_.runtime->last_failure(c_.runtime);
  // Without a failed call the culprit is the rank itself, whatever status follows.
  reported_ = {last.status, detail ? detail : "", last.culprit};
}

void CaseContext::FailBy(const char* detail, int culprit) {
  if (culprit < kernels::RuntimeError::kElsewhere || culprit >= c_.runtime->world_size)
    return Misuse("the case named " + std::to_string(culprit) + " as a culprit, which is no rank");
  reported_ = {CPPOOL_OK, detail ? detail : "", culprit == rank() ? kernels::RuntimeError::kOwn : culprit};
}

void CaseContext::Misuse(const std::string& what) {
  if (callback_failure_.status == CPPOOL_OK) callback_failure_ = {CPPOOL_INTERNAL, what};
}

bool CaseContext::NextIteration() {
  if (!iterating_) return false;
  if (!std::exchange(begun_, true) && !HasFailed() && before_iterations)
    callback_failure_ = before_iterations();
  if (!HasFailed()) runtime_.KeepUp();
  if (!HasFailed() && !meeting_.MayBegin(asked_++)) EndCancelled();
  // After a failure there is no further iteration.
  iterating_ = !HasFailed() && WantsMore();
  if (fault_) fault_->InIterations(iterating_);
  if (!iterating_) {
    if (!HasFailed() && (run_.options.sampling || run_.options.repeat > 1)) samples = runtime_.Samples();
    runtime_.EndIterations();
    if (run_.options.profile && iteration_ > 0) meeting_.Profile(false);
  } else if (std::exchange(run_dry_, false)) {
    runtime_.BeginIteration(-1);  // not timed: the calls are to get ahead of the device again
  } else {
    if (run_.options.profile && iteration_ == 0) meeting_.Profile(true);
    runtime_.BeginIteration(static_cast<int>(iteration_++));
  }
  return iterating_;
}

void CaseContext::EndCancelled() {
  const std::string why = "cancelled";
  callback_failure_ = {CPPOOL_CANCELLED, why, kernels::RuntimeError::kElsewhere};
  runtime_.Cancel(why);
}

bool CaseContext::WantsMore() {
  if (!run_.options.sampling || iteration_ < 0) return iteration_ < run_.options.repeat;
  if (decision_ < 0) decision_ = meeting_.StartSampling();
  if (iteration_ < decision_) return true;
  run_dry_ = true;
  return iteration_ < (decision_ = meeting_.NextDecision(runtime_.Samples()));
}

void CaseContext::AddWork(const char* stage, double flops) {
  const std::string name = stage ? stage : "";
  for (auto& [known, amount] : work) {
    if (known == name) {
      amount = flops;  // reported in every iteration: the same work
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
  if (check.ratio != 0) result.ratio = check.ratio;
  checks.push_back(std::move(result));
}

void CaseContext::AddLocation(const cppool_location& location) {
  if (checks.empty()) return Misuse("the case located an error before it reported a check");
  protocol::Check& check = checks.back();
  if (location.index_json) {
    const Json index = Json::parse(location.index_json, nullptr, false);
    if (!protocol::IsIndex(index))
      return Misuse("the case located an error at an index that is no JSON of integers");
    check.worst = cppool::Worst{index, location.got, location.wanted};
  }
  if (location.bad >= 0) check.bad = static_cast<std::uint64_t>(location.bad);
  if (location.where) check.where = location.where;
}

void CaseContext::AddResult(const char* name, const char* json) {
  const std::string key = name ? name : "";
  if (key.empty()) return Misuse("the case reported a result without a name");
  if (key == "rank" || key == "ok" || key == "error" || key == "gpu_ms" || key == "samples")
    return Misuse("the case reported a result '" + key + "', which every rank's entry has already");
  try {
    extra[key] = protocol::ParseJson(json ? json : "", kDeepestResult);
  } catch (const protocol::InvalidRequest& error) {
    Misuse("the case reported a result '" + key + "' that cannot be used: " + error.what());
  }
}

}  // namespace cppool::daemon
