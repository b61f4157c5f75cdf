#include "daemon/under_way.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "daemon/timeout_report.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;
using protocol::RunResult;

Json OrNull(const std::string& text) { return text.empty() ? Json() : Json(text); }

}  // namespace

void MarkCancelled(RunResult& result, const protocol::IncomingRequest& request) {
  std::string text = "cancelled";
  if (std::holds_alternative<protocol::RunRequest>(request.request()->operation)) {
    const protocol::RunRequest& run = *request.run();
    const std::int64_t iterations = run.warmup + run.repeat;
    const std::int64_t begun = std::min(request.control.begun(), iterations);
    text += begun == 0 ? " before its first iteration" : " after " + std::to_string(begun);
    if (begun > 0) text += run.sampling ? " iterations" : " of " + std::to_string(iterations) + " iterations";
  }
  if (result.fatal || (result.failure && result.failure->kind != FailureKind::kCancelled)) {
    const std::size_t from = result.error.starts_with("; ") ? 2 : 0;
    text += ": " + result.error.substr(from);
  }
  result.status = protocol::Status::kError;
  result.error = text;
  result.failure = protocol::Failure{FailureKind::kCancelled, std::nullopt, "", text};
}

void UnderWay::Begin(protocol::RequestQueue::Entry request, Clock::time_point taken_up) {
  const std::lock_guard lock(mutex_);
  state_ = {std::move(request), taken_up, gettid(), nullptr};
}

void UnderWay::BeginList() {
  const std::lock_guard lock(mutex_);
  state_ = {};
}

void UnderWay::Loaded(LibraryKind kind, const std::string& file, const std::string& digest) {
  Json loaded{{"file", file}, {"digest", digest}};
  const std::lock_guard lock(mutex_);
  if (kind == LibraryKind::kCases)
    state_.loaded["libraries"].push_back(std::move(loaded));
  else
    state_.loaded["kernels"] = std::move(loaded);
}

Json UnderWay::WithLoaded(Json response) const {
  response.merge_patch(Now().loaded);
  return response;
}

void UnderWay::OnRanks(std::shared_ptr<const CaseRun> run) {
  const std::lock_guard lock(mutex_);
  state_.run = std::move(run);
}

void UnderWay::End() {
  const std::scoped_lock lock(progress_mutex_, mutex_);
  state_ = {};
  last_progress_ = nullptr;
}

UnderWay::State UnderWay::Now() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

Json UnderWay::TimedOut(const std::string& opening) const {
  const State now = Now();
  if (!now.request) return nullptr;
  const std::chrono::milliseconds deadline = now.request->run()->deadline;
  RunResult result;
  if (now.run) {
    result = now.run->TimedOut(deadline);
  } else {
    std::string text =
        "not finished after " + std::to_string(deadline.count()) + " ms: the ranks had not started, ";
    text += opening.empty() ? "or had just returned" : "and " + opening + " was being loaded";
    if (opening.empty() && now.loaded.contains("kernels"))
      text += "; supports of the kernels of " + now.loaded["kernels"].value("file", "") +
              " may not have returned";
    if (const std::string place = PlaceOfThread(now.thread); !place.empty()) text += ", in " + place;
    result.status = protocol::Status::kError;
    result.error = text;
    result.failure = protocol::Failure{FailureKind::kTimeout, std::nullopt, "", text};
    result.fatal = true;
  }
  if (now.request->control.Close()) MarkCancelled(result, *now.request);
  result.wall_ms = static_cast<double>(deadline.count());
  Json response = protocol::ToJson(result, now.request->id());
  response.merge_patch(now.loaded);
  return response;
}

Json UnderWay::ProgressOf(const State& state) {
  const protocol::RunRequest& run = *state.request->run();
  Json progress = {{"case", run.case_name}, {"stage", nullptr}};
  const RankReport first = state.run ? state.run->FirstRank() : RankReport();
  const std::int64_t begun = std::max(state.request->control.begun(), first.iterations);
  const std::int64_t iterations = run.warmup + run.repeat;
  progress["iteration"] = std::min(begun, iterations);  // what follows the last one counts as one more
  progress["iterations"] = run.sampling ? Json() : Json(iterations);
  if (state.run) progress["stage"] = OrNull(StageOf(first.streams));
  return progress;
}

Json UnderWay::Status(const std::string& opening) const {
  const State now = Now();
  if (!now.request) return {{"running", nullptr}, {"text", "nothing runs"}};
  Json running = ProgressOf(now);
  if (now.request->id()) running["id"] = *now.request->id();
  running["wall_ms"] = std::chrono::duration<double, std::milli>(Clock::now() - now.taken_up).count();
  running["cancelled"] = now.request->control.cancelled();
  Json members = now.run ? now.run->Where() : Json{{"text", "it is being prepared"}};
  if (!opening.empty()) members["text"] = opening + " is being loaded";
  members["running"] = std::move(running);
  return members;
}

void UnderWay::Progress(const std::function<void(const Json& line)>& write) {
  const State now = Now();
  if (!now.request || !now.request->run()->progress) return;
  Json progress = ProgressOf(now);
  const std::lock_guard lock(progress_mutex_);
  if (Now().request != now.request || progress == last_progress_) return;
  write({{"id", *now.request->id()}, {"progress", progress}});
  last_progress_ = std::move(progress);
}

CrashPlace UnderWay::PlaceOf(pid_t thread) const {
  const State now = Now();
  CrashPlace place = now.run ? now.run->PlaceOf(thread) : CrashPlace{};
  if (now.request) place.case_name = now.request->run()->case_name;
  return place;
}

}  // namespace cppool::daemon
