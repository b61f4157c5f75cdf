#include "daemon/dispatcher.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <variant>

#include "daemon/failure_kind.h"
#include "daemon/log.h"
#include "daemon/process.h"
#include "kernels/error.h"
#include "protocol/features.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;
using protocol::Status;

constexpr std::size_t kLongestTag = 40;
constexpr std::chrono::seconds kListLimit{30};  // for the libraries of `list`, which has no deadline
std::int64_t TraceTime(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

double Milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// The name of a request in log lines: its id, or its number.
std::string TagOf(const std::optional<Json>& id, std::uint64_t number) {
  if (!id) return "#" + std::to_string(number);
  return id->dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, kLongestTag);
}

// The result of a run that did not reach the ranks.
RunResult NotRun(FailureKind kind, const std::string& detail) {
  RunResult result;
  result.status = IsSkip(kind) ? Status::kSkipped : Status::kError;
  result.error = detail;
  result.failure = protocol::Failure{kind, std::nullopt, "", detail};
  return result;
}

// A device or communicator that fails outside of a case is not probed: the process must end.
bool IsLost(FailureKind kind) { return kind == FailureKind::kCuda || kind == FailureKind::kNccl; }

// The result of `function`, or the one for its exception.
template <typename Function>
RunResult Answered(Function&& function) {
  try {
    return function();
  } catch (const Refusal& refusal) {
    RunResult result = NotRun(refusal.kind(), refusal.what());
    result.failure->node = refusal.node();
    return result;
  } catch (const protocol::InvalidRequest& error) {
    return NotRun(FailureKind::kInvalidRequest, error.what());
  } catch (const RanksLost& lost) {
    return lost.ToResult();
  } catch (const kernels::RuntimeError& error) {
    RunResult result = NotRun(ToFailureKind(error.status()), error.what());
    result.fatal = IsLost(result.failure->kind);
    return result;
  } catch (const std::exception& error) {
    return NotRun(FailureKind::kInternal, error.what());
  }
}

}  // namespace

Dispatcher::Dispatcher(Ranks& ranks, UnderWay& under_way, Watchdog* watchdog, Options options)
    : ranks_(ranks), under_way_(under_way), watchdog_(watchdog), options_(std::move(options)) {}

std::optional<Answer> Dispatcher::Handle(const protocol::RequestQueue::Entry& incoming) {
  const auto taken_up = Clock::now();
  ++counts_.requests;
  if (!incoming->request()) {
    ++counts_.errors;
    const auto& error = std::get<protocol::RequestError>(incoming->content);
    return Finish(
        protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", error.what()}, error.id));
  }
  const protocol::Request& request = *incoming->request();
  if (incoming->run()) return Run(incoming, taken_up);
  if (std::holds_alternative<protocol::HelloRequest>(request.operation))
    return Finish(protocol::OkResponse(Hello(), request.id));
  if (const auto* list = std::get_if<protocol::ListRequest>(&request.operation))
    return List(*list, request.id, taken_up);
  if (std::holds_alternative<protocol::StatsRequest>(request.operation))
    return AnswerWith(request.id, [this] { return Stats(); });
  Answer answer = Finish(protocol::OkResponse(Json::object(), request.id));
  answer.shutdown = true;
  return answer;
}

std::string Dispatcher::Overtake(const protocol::IncomingRequest& incoming, protocol::RequestQueue& queue) {
  ++counts_.requests;
  const protocol::Request& request = *incoming.request();
  const auto* cancel = std::get_if<protocol::CancelRequest>(&request.operation);
  if (!cancel) {
    Json members = under_way_.Status(ranks_.BeingOpened());
    members["waiting"] = queue.waiting();
    return Finish(protocol::OkResponse(std::move(members), request.id)).text;
  }
  const auto cancelled = queue.Cancel(cancel->cancels);
  if (!cancelled.error.empty()) {
    ++counts_.errors;
    return Finish(protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", cancelled.error},
                                          request.id))
        .text;
  }
  const std::string own = Finish(protocol::OkResponse(Json::object(), request.id)).text;
  return cancelled.waited ? AnswerCancelled(*cancelled.waited).text + own : own;
}

Answer Dispatcher::AnswerCancelled(const protocol::IncomingRequest& request) {
  ++counts_.requests;
  if (std::holds_alternative<protocol::RunRequest>(request.request()->operation)) ++counts_.errors;
  RunResult result;
  MarkCancelled(result, request);
  return Finish(protocol::ToJson(result, request.id()));
}

void Dispatcher::Progress(const std::function<void(std::string_view line)>& write) {
  under_way_.Progress([&](const Json& line) { write(Finish(line).text); });
}

Json Dispatcher::Hello() const {
  Json features = Json::array();
  for (const std::string_view feature : protocol::kFeatures) features.push_back(feature);
  for (const std::string_view feature : ranks_.Features()) features.push_back(feature);
  Json hello = {{"protocol", protocol::kProtocolVersion},
                {"protocol_minor", protocol::kProtocolMinor},
                {"features", std::move(features)},
                {"version", options_.version},
                {"pid", getpid()},
                {"init_ms", options_.init_ms}};
  hello.update(ranks_.Hello());
  return hello;
}

Answer Dispatcher::List(const protocol::ListRequest& request, const std::optional<Json>& id,
                        Clock::time_point taken_up) {
  under_way_.BeginList();
  Answer answer = AnswerWith(id, [&] {
    return Json{{"cases", ranks_.Cases(request, taken_up + kListLimit)}};
  });
  under_way_.End();
  return answer;
}

Answer Dispatcher::AnswerWith(const std::optional<Json>& id, const std::function<Json()>& members) {
  Json response;
  const RunResult refused = Answered([&] {
    response = protocol::OkResponse(members(), id);
    return RunResult();
  });
  if (refused.failure) {
    ++counts_.errors;
    response = protocol::ErrorResponse(*refused.failure, id, refused.fatal);
  }
  Answer answer = FinishLoaded(std::move(response));
  answer.fatal = refused.fatal;
  return answer;
}

Json Dispatcher::Stats() {
  Json memory = ranks_.Memory();
  const Usage usage = OwnUsage();
  return {{"requests", counts_.requests.load()},
          {"passed", counts_.passed.load()},
          {"failed", counts_.failed.load()},
          {"skipped", counts_.skipped.load()},
          {"errors", counts_.errors.load()},
          {"memory", std::move(memory)},
          {"leaked_allocations", counts_.leaked_allocations},
          {"resident_bytes", usage.resident_bytes},
          {"threads", usage.threads},
          {"fds", usage.fds},
          {"uptime_s", Milliseconds(Clock::now() - options_.started) / 1000}};
}

std::optional<Answer> Dispatcher::Run(const protocol::RequestQueue::Entry& request,
                                      Clock::time_point taken_up) {
  const protocol::RunRequest& run = *request->run();
  const bool only_validate = std::holds_alternative<protocol::ValidateRequest>(request->request()->operation);
  const std::string tag = TagOf(request->id(), counts_.requests);
  const LogTags tags(-1, tag);
  under_way_.Begin(request, taken_up);
  const auto deadline = taken_up + run.deadline;
  if (watchdog_) watchdog_->Arm(deadline + ranks_.DeadlineMargin());
  std::optional<RunTrace> trace;
  if (!run.trace.empty()) {
    trace.emplace();
    trace->version = options_.version;
    trace->request = tag;
    trace->case_name = run.case_name;
    trace->begin_ns = TraceTime(taken_up);
  }
  RunResult result = Answered([&] {
    if (!only_validate) return ranks_.Run(request, tag, deadline, trace ? &*trace : nullptr);
    ranks_.Validate(run, deadline);
    RunResult would_run;
    would_run.status = Status::kPassed;
    return would_run;
  });
  if (watchdog_ && !watchdog_->Disarm()) return std::nullopt;
  if (request->control.Close()) MarkCancelled(result, *request);
  result.wall_ms = Milliseconds(Clock::now() - taken_up);
  const bool would_run = only_validate && result.status == Status::kPassed;
  if (!only_validate) Count(result.status);
  counts_.leaked_allocations += result.leaks.allocations;
  if (Logs(LogLevel::kDebug) && !would_run)
    Log(LogLevel::kDebug, std::string(protocol::ToString(result.status)) + " in " +
                              Rounded(result.wall_ms, 2) + " ms" + (result.error.empty() ? "" : ": ") +
                              result.error);
  Answer answer = FinishLoaded(would_run ? protocol::OkResponse({{"runs", true}}, request->id())
                                         : protocol::ToJson(result, request->id()));
  answer.fatal = result.fatal;
  under_way_.End();
  return answer;
}

CrashPlace Dispatcher::PlaceOf(pid_t thread) const {
  CrashPlace place = under_way_.PlaceOf(thread);
  if (std::string opened = ranks_.BeingOpened(); !opened.empty()) place.library = std::move(opened);
  return place;
}

std::string Dispatcher::TimeoutAnswer() const {
  return Finish(under_way_.TimedOut(ranks_.BeingOpened())).text;
}

void Dispatcher::Count(Status status) {
  switch (status) {
    case Status::kPassed:
      ++counts_.passed;
      break;
    case Status::kFailed:
      ++counts_.failed;
      break;
    case Status::kSkipped:
      ++counts_.skipped;
      break;
    case Status::kError:
      ++counts_.errors;
      break;
  }
}

Answer Dispatcher::FinishLoaded(Json response) const {
  return Finish(under_way_.WithLoaded(std::move(response)));
}

Answer Dispatcher::Finish(const Json& response) const {
  Answer answer;
  answer.text = protocol::SerializeResponse(response, options_.sentinel);
  return answer;
}

}  // namespace cppool::daemon
