#include "daemon/timeout_report.h"

#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::RunResult;

// Asking a stuck rank where it is may get stuck itself.
constexpr std::chrono::milliseconds kLookLimit{300};

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f s", seconds);
  return text;
}

// What the ranks' looks have brought so far; shared with the threads that look.
struct Looks {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::optional<RankNow>> of_rank;
  std::size_t count = 0;
};

std::vector<std::optional<RankNow>> LookAtAll(int ranks, const std::function<RankNow(int rank)>& look) {
  const auto looks = std::make_shared<Looks>();
  looks->of_rank.resize(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < looks->of_rank.size(); ++i) {
    // Left behind when it is stuck, with a process that ends.
    std::thread([looks, look, i] {
      RankNow now = look(static_cast<int>(i));
      const std::lock_guard lock(looks->mutex);
      looks->of_rank[i] = std::move(now);
      ++looks->count;
      looks->changed.notify_all();
    }).detach();
  }
  std::unique_lock lock(looks->mutex);
  looks->changed.wait_for(lock, kLookLimit, [&] { return looks->count == looks->of_rank.size(); });
  return looks->of_rank;
}

}  // namespace

std::string StageOf(const std::vector<kernels::StreamProgress>& streams) {
  for (const auto& stream : streams) {
    if (!stream.idle) return stream.stage;
  }
  return streams.empty() ? "" : streams.front().stage;
}

std::string DescribeProgress(const std::vector<kernels::StreamProgress>& streams) {
  std::string text;
  for (const auto& stream : streams) {
    if (stream.idle) continue;
    text += text.empty() ? "" : "; ";
    text +=
        stream.stream + ": " +
        (stream.stage.empty() ? "before its first stage" : stream.stage + " for " + Seconds(stream.seconds));
  }
  if (!text.empty()) return text;
  const std::string last = streams.empty() ? "" : streams.front().stage;
  return "in the case's host code, no marked work is pending" +
         (last.empty() ? "" : " (last stage: " + last + ")");
}

RunResult TimeoutReport(int ranks, const std::function<RankNow(int rank)>& look,
                        std::chrono::milliseconds deadline) {
  const auto looks = LookAtAll(ranks, look);
  RunResult result;
  result.status = protocol::Status::kError;
  result.fatal = true;
  protocol::Failure failure{FailureKind::kTimeout, std::nullopt, "", ""};
  std::string text = "not finished after " + std::to_string(deadline.count()) + " ms";
  int unfinished = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& now = looks[static_cast<std::size_t>(rank)];
    protocol::RankResult entry;
    entry.rank = rank;
    std::string where;
    if (now && now->phase == RankPhase::kDone && now->error.empty()) {
      entry.ok = true;
      where = "finished";
    } else {
      where = !now                                ? "the runtime does not say where"
              : !now->error.empty()               ? "failed: " + now->error
              : now->phase == RankPhase::kWaiting ? "waiting for a clean state"
                                                  : DescribeProgress(now->streams);
      if (now && now->error.empty() && now->phase == RankPhase::kEnding)
        where = "its function has returned; " + where;
      entry.error = where;
      if (++unfinished == 1) {
        failure.rank = rank;
        failure.stage = now ? StageOf(now->streams) : "";
      } else {
        failure.rank.reset();
      }
    }
    text += (rank ? "; rank " : ": rank ") + std::to_string(rank) + ": " + where;
    result.ranks.push_back(std::move(entry));
  }
  failure.detail = text;
  result.error = text;
  result.failure = std::move(failure);
  return result;
}

}  // namespace cppool::daemon
