#include "daemon/machines/agent_link.h"

#include <cstddef>
#include <utility>

#include "kernels/group_shape.h"

namespace cppool::daemon {

using protocol::Json;

AgentLink::AgentLink(GreetedAgent agent, const kernels::Place& place, Events events)
    : place_(place),
      events_(std::move(events)),
      of_rank_(static_cast<std::size_t>(place.ranks)),
      agent_(std::move(agent)),
      threads_(place.ranks, place.first) {
  agent_.socket->Start(
      {[this](Json frame) { Take(std::move(frame)); }, [this](const std::string& why) { BeGone(why); }});
}

AgentLink::~AgentLink() { Shut(); }

std::string AgentLink::Name() const {
  std::vector<int> ranks;
  for (int i = 0; i < place_.ranks; ++i) ranks.push_back(place_.first + i);
  return "node " + agent_.node + " (" + kernels::RankList(ranks) + ")";
}

void AgentLink::Take(Json frame) {
  const std::string name = frame.at("frame");
  if (name == "write") {
    if (events_.write) events_.write(frame.value("text", ""));
    return;
  }
  if (name == "tell") return events_.tell(frame);
  if (name == "of_rank" || name == "ended") {
    const std::lock_guard following(following_);
    if (follow_) follow_(&frame);
    return;
  }
  const std::lock_guard lock(mutex_);
  if (name == "answer") {
    const auto asked = answers_.find(frame.value("ask", std::uint64_t{0}));
    if (asked != answers_.end()) asked->second = std::move(frame);
  } else if (name == "crash") {
    crash_ = std::move(frame);
  } else if (name == "unstarted") {
    unstarted_ = std::move(frame);
  } else if (name == "report" || name == "meet") {
    const int rank = frame.value("rank", -1) - place_.first;
    if (rank < 0 || rank >= place_.ranks)
      throw std::runtime_error("it sent a frame of a rank that it has not");
    if (frame.value("run", std::uint64_t{0}) == run_)
      of_rank_[static_cast<std::size_t>(rank)].push_back(std::move(frame));
  } else {
    start_.push_back(std::move(frame));
  }
  changed_.notify_all();
}

void AgentLink::BeGone(const std::string& why) {
  if (events_.gone) events_.gone(*this, why);
  {
    const std::lock_guard lock(mutex_);
    gone_ = why;
    changed_.notify_all();
  }
  {
    const std::lock_guard following(following_);
    if (follow_) follow_(nullptr);
  }
}

void AgentLink::Follow(std::function<void(Json*)> follow) {
  const std::lock_guard following(following_);
  follow_ = std::move(follow);
}

bool AgentLink::Wait(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                     const std::function<bool()>& ready) {
  const auto over = [&] { return ready() || !gone_.empty(); };
  if (until == Clock::time_point::max())
    changed_.wait(lock, over);
  else
    changed_.wait_until(lock, until, over);
  return ready();
}

std::optional<Json> AgentLink::Ask(Json frame, Clock::time_point until) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++asked_;
    answers_[number] = nullptr;
  }
  frame["ask"] = number;
  Send(frame);
  std::unique_lock lock(mutex_);
  const bool there = Wait(lock, until, [&] { return !answers_.at(number).is_null(); });
  Json answer = std::move(answers_.at(number));
  answers_.erase(number);
  if (!there) return std::nullopt;
  return answer;
}

std::optional<Json> AgentLink::NextOfStart(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  Wait(lock, until, [&] { return !start_.empty() || unstarted_; });
  if (start_.empty()) return std::nullopt;
  Json frame = std::move(start_.front());
  start_.pop_front();
  return frame;
}

void AgentLink::BeginRun(std::uint64_t run) {
  const std::lock_guard lock(mutex_);
  run_ = run;
  for (auto& frames : of_rank_) frames.clear();
}

std::optional<Json> AgentLink::NextOf(int rank) {
  auto& frames = of_rank_[static_cast<std::size_t>(rank - place_.first)];
  std::unique_lock lock(mutex_);
  if (!Wait(lock, Clock::time_point::max(), [&] { return !frames.empty(); })) return std::nullopt;
  Json frame = std::move(frames.front());
  frames.pop_front();
  return frame;
}

std::string AgentLink::Gone() const {
  const std::lock_guard lock(mutex_);
  return gone_;
}

std::optional<Json> AgentLink::Unstarted() const {
  const std::lock_guard lock(mutex_);
  return unstarted_;
}

std::optional<Json> AgentLink::Crash() const {
  const std::lock_guard lock(mutex_);
  return crash_;
}

}  // namespace cppool::daemon
