#include "client/command/runner.h"

#include <chrono>
#include <utility>

#include "client/command/text.h"

namespace cppool::command {

Outcome CellRunner::Run(const Cell& cell, const RunOptions& options) {
  Outcome outcome = Ask(cell, options, &Pool::Run);
  std::vector<Cell>& history = histories_[cell.world_size];
  before_ = history;
  // A retry is answered by a daemon that has run nothing before.
  if (outcome.result && outcome.attempts > 1) before_.clear();
  history = before_;
  history.push_back(cell);
  if (!outcome.result || outcome.result->fatal) history.clear();
  return outcome;
}

std::vector<Cell> CellRunner::Retire() {
  if (world_size_ != 0) Stop(world_size_);
  return std::move(before_);
}

PoolOptions CellRunner::WithOutput(PoolOptions options, CaseOutput* output) {
  if (output) options.on_stderr = [output](std::string_view line) { output->Add(line); };
  return options;
}

void CellRunner::Stop(int world_size) {
  pools_.At(world_size).Stop();
  histories_.erase(world_size);
}

Outcome CellRunner::Ask(const Cell& cell, RunOptions options, Question question) {
  if (auto known = not_started_.find(cell.world_size); known != not_started_.end()) return known->second;
  // An idle daemon would hold GPU memory that the next one needs.
  if (!rules_.keep_worlds && world_size_ != cell.world_size && world_size_ != 0) Stop(world_size_);
  world_size_ = cell.world_size;
  Pool& pool = pools_.At(cell.world_size);
  options.case_name = cell.case_name;
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  try {
    if (output_) output_->Begin("");
    if (worlds_.count(cell.world_size) == 0) worlds_[cell.world_size] = pool.Hello();
    if (output_) {
      pool.StderrTail();  // what its start wrote is not the cell's
      output_->Begin(cell.name);
    }
    outcome.result = (pool.*question)(cell.params, options);
    outcome.kind = outcome.result->status;
    outcome.error = outcome.result->error;
    outcome.attempts = outcome.result->attempts;
    const bool wanted = outcome.failed() || rules_.all_output;
    if (wanted || output_) {  // reads all that was written, so that it counts for this cell
      std::string tail = pool.StderrTail();
      if (wanted) outcome.stderr_tail = std::move(tail);
    }
    if (wanted && output_) outcome.output = output_->Take();
  } catch (const PoolError& error) {
    outcome.error = error.what();
    outcome.attempts = error.attempts();
    if (error.kind() == PoolError::Kind::kStart) {
      Outcome not_started = NotStarted(cell, error);
      if (error.attempts() == 1) outcome = std::move(not_started);  // else the case ran, and its daemon died
    }
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

// Also decides the outcome of all further cells of this world size.
Outcome CellRunner::NotStarted(const Cell& cell, const PoolError& error) {
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
  rest.error = "not run: no daemon of world size " + size +
               " could be started (see above): " + FirstLine(error.what());
  Outcome first;
  first.asked = false;
  first.error = error.what();
  return first;
}

}  // namespace cppool::command
