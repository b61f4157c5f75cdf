#include "daemon/rank_process.h"

#include "daemon/process_frames.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;

constexpr std::chrono::seconds kEndLimit{5};

}  // namespace

std::optional<Json> RankProcess::Next(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return !frames_.empty() || end_; };
  if (limit == Clock::time_point::max())
    changed_.wait(lock, ready);
  else
    changed_.wait_until(lock, limit, ready);
  if (frames_.empty()) return std::nullopt;
  Json frame = std::move(frames_.front());
  frames_.pop_front();
  return frame;
}

std::optional<std::string> RankProcess::End() const {
  const std::lock_guard lock(mutex_);
  return frames_.empty() ? end_ : std::nullopt;
}

bool RankProcess::WaitEnd(Clock::time_point limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, limit, [&] { return over_; });
}

std::string RankProcess::Stacks() const {
  const std::lock_guard lock(mutex_);
  return stacks_text_;
}

std::string RankProcess::Output() const {
  const std::lock_guard lock(mutex_);
  return tail_;
}

std::string RankProcess::LeftOut() const {
  const std::lock_guard lock(mutex_);
  return left_out_;
}

void RankProcess::BeginCase() {
  const std::lock_guard lock(mutex_);
  tail_.clear();
  left_out_.clear();
  stacks_text_.clear();
}

bool RankServer::KillAll(const Ranks& ranks, Clock::time_point limit) {
  for (const auto& rank : ranks) Kill(*rank);
  bool all = true;
  for (const auto& rank : ranks) {
    // One that has just been forked may have no pid yet where it is.
    while (!rank->WaitEnd(std::min(limit, Clock::now() + std::chrono::milliseconds(50))) &&
           Clock::now() < limit)
      Kill(*rank);
    all = all && rank->WaitEnd(Clock::now());
  }
  return all;
}

void RankServer::Fail(const Ranks& ranks, int rank, const std::string& why, FailureKind kind) {
  KillAll(ranks, Clock::now() + kEndLimit);
  StartError error("rank " + std::to_string(rank) + " could not start: " + why, kind);
  error.detail = why;
  error.rank = rank;
  throw error;
}

RankServer::World RankServer::WaitReady(Ranks ranks, Clock::time_point deadline) {
  World world{std::move(ranks), {}};
  for (const auto& rank : world.ranks) {
    const std::string on = rank->node().empty() ? "" : "on node " + rank->node() + ", ";
    std::optional<Json> ready = rank->Next(deadline);
    if (!ready) {
      const auto end = rank->End();
      std::string tail = rank->Output();
      while (tail.ends_with('\n')) tail.pop_back();
      Fail(world.ranks, rank->rank(),
           on + (end ? "it " + *end : "it was not ready in time") + (tail.empty() ? "" : ": " + tail),
           end ? FailureKind::kInternal : FailureKind::kTimeout);
    }
    if (ready->contains("error"))
      Fail(world.ranks, rank->rank(), on + TextOf(*ready, "error"), FailureKind::kInvalidRequest);
    world.ready.push_back(std::move(*ready));
  }
  return world;
}

}  // namespace cppool::daemon
