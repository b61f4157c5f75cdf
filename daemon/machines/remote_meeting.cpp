#include "daemon/machines/remote_meeting.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

namespace cppool::daemon {

using protocol::Json;

RemoteMeeting::RemoteMeeting(FrameSocket& head, const RankThreads& threads, const kernels::Place& place,
                             std::uint64_t run)
    : head_(head), threads_(threads.ids()), place_(place), run_(run), results_(threads_.size()) {}

Json RemoteMeeting::Ask(Json frame) const {
  const auto own = std::find(threads_.begin(), threads_.end(), static_cast<pid_t>(syscall(SYS_gettid)));
  if (own == threads_.end()) throw std::logic_error("no thread of a rank meets");
  const auto index = static_cast<std::size_t>(own - threads_.begin());
  frame["frame"] = "meet";
  frame["run"] = run_;
  frame["rank"] = place_.first + static_cast<int>(index);
  head_.Send(frame);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return results_[index].has_value(); });
  return *std::exchange(results_[index], std::nullopt);
}

void RemoteMeeting::Take(const Json& met) {
  const int rank = met.value("rank", -1) - place_.first;
  if (met.value("run", std::uint64_t{0}) != run_ || rank < 0 || rank >= place_.ranks) return;
  const std::lock_guard lock(mutex_);
  results_[static_cast<std::size_t>(rank)] = met.at("result");
  changed_.notify_all();
}

bool RemoteMeeting::Begin(int, bool clean) { return Ask({{"what", "begin"}, {"clean", clean}}); }

std::optional<Meeting::Obstacle> RemoteMeeting::FirstIteration(int) {
  const Json obstacle = Ask({{"what", "first_iteration"}});
  if (obstacle.is_null()) return std::nullopt;
  return Obstacle{obstacle.at(0), static_cast<cppool_status>(obstacle.at(1).get<int>())};
}

bool RemoteMeeting::MayBegin(std::int64_t index) { return Ask({{"what", "may_begin"}, {"index", index}}); }

std::int64_t RemoteMeeting::StartSampling() { return Ask({{"what", "start_sampling"}}); }

std::int64_t RemoteMeeting::NextDecision(const kernels::StageSamples& samples) {
  Json list = Json::array();
  for (const auto& [stage, times] : samples) list.push_back(Json::array({stage, times}));
  return Ask({{"what", "next_decision"}, {"samples", std::move(list)}});
}

void RemoteMeeting::Profile(bool begin) { Ask({{"what", "profile"}, {"begin", begin}}); }

Meeting::FailureTime RemoteMeeting::Failed() {
  const Json time = Ask({{"what", "failed"}});
  return {time.at(0), time.at(1)};
}

void RemoteMeeting::Leave(int, cppool_status status) {
  Ask({{"what", "leave"}, {"status", static_cast<int>(status)}});
}

}  // namespace cppool::daemon
