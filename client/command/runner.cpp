#include "client/command/runner.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "client/command/command.h"
#include "client/src/describe.h"
#include "client/src/request.h"
#include "client/suite/value_text.h"

namespace cppool::command {

void Outcome::Add(Outcome next) {
  const bool differs = failed() != next.failed() || (!failed() && kind != next.kind);
  const bool any_flaky = differs || !flaky.empty() || !next.flaky.empty();
  next.attempts += attempts;
  next.failures += failures;
  next.seconds += seconds;
  next.daemon_seconds += daemon_seconds;
  if (!next.verdict) next.verdict = verdict;
  if (!next.again) next.again = again;
  const Kind latest = next.kind;
  const auto rank = [](const Outcome& outcome) {
    return outcome.failed() ? 2 : outcome.flaky.empty() ? 0 : 1;
  };
  if (rank(*this) > 0 && rank(*this) >= rank(next)) {
    attempts = next.attempts;
    failures = next.failures;
    seconds = next.seconds;
    daemon_seconds = next.daemon_seconds;
  } else {
    *this = std::move(next);
  }
  if (any_flaky)
    flaky = failures > 0 ? client::FlakyOf(failures, attempts) : client::FlakyAt(ToString(latest), attempts);
}

std::string Summary(Status kind, const std::string& error) {
  return std::string(ToString(kind)) + (error.empty() ? "" : ": ") + error;
}

void CellRunner::Check(const RunOptions& options) try {
  client::ToRequest(Json(), options);
} catch (const std::invalid_argument& error) {
  throw suite::UsageError(error.what());
}

void CellRunner::KeepTurn(int world_size, bool keep) try {
  client::PoolAccess::KeepTurn(At(world_size), keep);
} catch (const PoolError&) {  // the requests will say it
}

Outcome CellRunner::Run(const suite::Cell& cell, const RunOptions& options) {
  Outcome outcome = Ask(cell, options, &Pool::Run);
  outcome.failures = outcome.attempts - (outcome.failed() ? 0 : 1);
  std::vector<suite::Cell>& history = histories_[cell.world_size];
  // A retry is answered by a daemon that has run nothing before.
  if (outcome.result && outcome.attempts > 1) history.clear();
  // No copy of what came before: after thousands of cells it would take longer than a cell.
  if (!outcome.result || outcome.result->fatal) {
    before_ = std::exchange(history, {});
  } else {
    history.push_back(cell);
  }
  return outcome;
}

std::vector<suite::Cell> CellRunner::Retire() {
  if (world_size_ == 0) return {};
  std::vector<suite::Cell>& history = histories_[world_size_];
  if (!history.empty()) {  // else the daemon has ended with the latest cell
    before_ = std::move(history);
    before_.pop_back();
  }
  Stop(world_size_);
  return std::exchange(before_, {});
}

CellRunner::~CellRunner() {
  if (started_.valid()) started_.wait();
  if (ended_.valid()) ended_.wait();
}

Pool& CellRunner::At(int world_size) {
  const auto known = pools_.find(world_size);
  if (known != pools_.end()) return known->second;
  PoolOptions options = options_;
  options.world_size = world_size;
  if (output_)
    options.on_stderr = [output = output_, world_size](std::string_view line) {
      output->Add(world_size, line);
    };
  return pools_.try_emplace(world_size, std::move(options)).first->second;
}

void CellRunner::Stop(int world_size) {
  At(world_size).Stop();
  histories_.erase(world_size);
}

Pool& CellRunner::PoolOf(int world_size) {
  // An idle daemon would hold GPU memory that the next one needs.
  if (world_size_ != world_size) {
    if (!rules_.keep_worlds && world_size_ != 0) {
      if (ended_.valid()) ended_.wait();
      histories_.erase(world_size_);
      ended_ = std::async(std::launch::async, [&last = At(world_size_)] { last.Stop(); });
      // One that starts only now may need the devices.
      if (next_ != world_size) ended_.wait();
    }
    world_size_ = world_size;
    seconds_ = cells_ = 0;
  }
  return At(world_size);
}

Outcome CellRunner::Ask(const suite::Cell& cell, RunOptions options, Question question) {
  if (!upcoming_.empty()) upcoming_.pop_front();
  if (auto known = not_started_.find(cell.world_size); known != not_started_.end()) return known->second;
  Pool& pool = PoolOf(cell.world_size);
  options.case_name = cell.case_name;
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  try {
    if (output_) output_->Begin(cell.world_size, "");
    const Json& hello = Hello(cell.world_size);
    options.digests = Digests(options);
    if (output_) {
      pool.StderrTail();  // what its start wrote is not the cell's
      output_->Begin(cell.world_size, cell.name);
    }
    outcome.result = AskPool(pool, cell, options, question);
    KeepDigests(hello, outcome.result->json);
    outcome.kind = outcome.result->status;
    outcome.error = outcome.result->error;
    if (rules_.leaks_are_errors && outcome.result->ok() && outcome.result->leaks.any()) {
      outcome.kind = Status::kFailed;
      outcome.error = "left something behind (--leaks error)";
      for (const std::string& warning : outcome.result->warnings) outcome.error += "\n" + warning;
    }
    outcome.daemon_seconds = outcome.result->wall_ms / 1000;
    outcome.attempts = outcome.result->attempts;
    outcome.flaky = outcome.result->flaky;
    outcome.lost = outcome.result->lost;
    outcome.timed_out = outcome.result->failure && outcome.result->failure->kind == "timeout";
    const bool wanted = outcome.failed() || outcome.attempts > 1 || rules_.all_output;
    if (wanted || output_) {  // reads all that was written, so that it counts for this cell
      std::string tail = pool.StderrTail();
      if (wanted) outcome.stderr_tail = std::move(tail);
    }
    if (wanted && output_) outcome.output = output_->Take();
  } catch (const PoolError& error) {
    outcome.error = error.what();
    outcome.attempts = error.attempts();
    outcome.crash = error.crash();
    outcome.flaky = error.flaky();
    outcome.lost = error.lost();
    outcome.timed_out = error.kind() == PoolError::Kind::kTimeout;
    if (error.kind() == PoolError::Kind::kStart) {
      Outcome not_started = NotStarted(cell, error);
      if (error.attempts() == 1) outcome = std::move(not_started);  // else the case ran, and its daemon died
    }
  }
  NameSources(outcome);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  StartNext(outcome.seconds);
  return outcome;
}

void CellRunner::NameSources(Outcome& outcome) const {
  const auto name = [this](std::string& text) { text = command::NameSources(std::move(text), sources_); };
  name(outcome.error);
  if (outcome.crash) name(outcome.crash->error);
  for (LostAttempt& lost : outcome.lost) name(lost.error);
  if (!outcome.result) return;
  name(outcome.result->error);
  if (outcome.result->failure) name(outcome.result->failure->detail);
  for (Rank& rank : outcome.result->ranks) name(rank.error);
  for (std::string& warning : outcome.result->warnings) name(warning);
}

std::map<std::string, std::string> CellRunner::Digests(const RunOptions& options) const {
  std::map<std::string, std::string> digests;
  for (const std::string& file : protocol::NamedLibraries(client::ToRequest(Json(), options)))
    if (const auto known = digests_.find(file); known != digests_.end()) digests.insert(*known);
  return digests;
}

void CellRunner::KeepDigests(const Json& hello, const Json& answer) {
  if (!HasFeature(hello, "digests")) return;
  const auto keep = [this](const Json& library) {
    const auto is_text = [&](const char* key) { return library.contains(key) && library[key].is_string(); };
    if (library.is_object() && is_text("file") && is_text("digest"))
      digests_.try_emplace(library["file"].get<std::string>(), library["digest"].get<std::string>());
  };
  for (const Json& library : answer.value("libraries", Json::array())) keep(library);
  keep(answer.value("kernels", Json()));
}

const Json& CellRunner::Hello(int world_size) {
  Pool& pool = PoolOf(world_size);
  const auto known = worlds_.find(world_size);
  if (known != worlds_.end()) return known->second;
  if (next_ == world_size) {
    next_ = 0;
    try {
      return worlds_[world_size] = started_.get();
    } catch (const PoolError& error) {
      worlds_.erase(world_size);
      const auto& why = error.start_failure();
      if (!beside_ || (why && why->kind == "unsupported")) throw;  // it would not start alone either
      if (ended_.valid())
        ended_.wait();  // beside the last one there was no room, or a GPU takes one process at a time
    }
  }
  Json hello = pool.Hello();
  return worlds_[world_size] = std::move(hello);
}

// Memory that is short may be that of the pools beside this one.
Result CellRunner::AskPool(Pool& pool, const suite::Cell& cell, const RunOptions& options,
                           Question question) {
  struct Asked {
    CellRunner& runner;
    Asked(CellRunner& asking, Pool* pool) : runner(asking) { Set(pool); }
    ~Asked() { Set(nullptr); }
    void Set(Pool* pool) const {
      const std::lock_guard lock(runner.asked_mutex_);
      runner.asked_ = pool;
    }
  } const asked{*this, &pool};
  Result result = (pool.*question)(cell.params, options);
  const bool short_of_memory = result.failure && result.failure->kind == "out_of_memory";
  if (!short_of_memory || (next_ == 0 && !ended_.valid())) return result;
  StopOthers();
  return (pool.*question)(cell.params, options);
}

template <typename Use>
void CellRunner::WithAsked(Use use) {
  const std::lock_guard lock(asked_mutex_);
  if (!asked_) return;
  try {
    use(*asked_);
  } catch (const PoolError&) {  // an older daemon
  }
}

std::string CellRunner::Where() {
  std::string where;
  WithAsked([&](Pool& pool) {
    const Json status = pool.Status();
    if (!status.at("running").is_null()) where = status.at("text");
  });
  return where;
}

void CellRunner::GiveUp() {
  WithAsked([](Pool& pool) { pool.Cancel(); });
}

// Starts the pool of the next world size when the cells before it will take no longer than that.
void CellRunner::StartNext(double seconds) {
  constexpr double kStartTakes = 4;  // seconds, about: what it takes depends on the machine
  seconds_ += seconds;
  ++cells_;
  if (next_ != 0 || rules_.keep_worlds) return;
  const auto next = std::ranges::find_if(upcoming_, [&](int size) { return size != world_size_; });
  if (next == upcoming_.end() || not_started_.count(*next) != 0) return;
  const auto left = static_cast<double>(next - upcoming_.begin());
  if (left * seconds_ / cells_ > kStartTakes) return;
  next_ = *next;
  beside_ = not_started_.count(world_size_) == 0;
  started_ = std::async(std::launch::async, [&pool = At(next_)] { return pool.Hello(); });
}

// The cell's own pool alone is left.
void CellRunner::StopOthers() {
  if (ended_.valid()) ended_.get();
  if (next_ == 0) return;
  started_.wait();
  At(std::exchange(next_, 0)).Stop();
  upcoming_.clear();  // none is started ahead any more
}

// Also decides the outcome of all further cells of this world size.
Outcome CellRunner::NotStarted(const suite::Cell& cell, const PoolError& error) {
  const std::string size = std::to_string(cell.world_size);
  Outcome& rest = not_started_[cell.world_size];
  rest.asked = false;
  const auto& why = error.start_failure();
  const bool too_large = why && why->kind == "unsupported" && why->devices && *why->devices < cell.world_size;
  if (rules_.skip_large_worlds && worlds_.count(cell.world_size) == 0 && too_large) {
    rest.kind = Outcome::Kind::kSkipped;
    rest.error =
        "world size " + size + " needs as many GPUs, and this machine has fewer (see --transport peer)";
    return rest;
  }
  rest.error = "not run: no daemon of world size " + size + " could be started: see " + cell.name;
  Outcome first;
  first.asked = false;
  first.error = error.what();
  return first;
}

}  // namespace cppool::command
