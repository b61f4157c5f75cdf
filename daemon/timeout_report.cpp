#include "daemon/timeout_report.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "daemon/log.h"
#include "daemon/stack_sampler.h"
#include "kernels/group_shape.h"

namespace cppool::daemon {
namespace {

using kernels::StreamProgress;
using protocol::FailureKind;
using protocol::RunResult;
using Clock = std::chrono::steady_clock;

// Counted from the deadline. Both the snapshot of a stuck rank and the reading of files with function names may get stuck.
constexpr std::chrono::milliseconds kSnapshotLimit{150};
constexpr std::chrono::milliseconds kSignalLimit{250};
constexpr std::chrono::milliseconds kStackLimit{350};
constexpr std::size_t kShortFrames = 4;  // frames of a stack in the error's text

std::string Seconds(double seconds) { return Rounded(seconds, 2) + " s"; }

// Calls function(0), ..., function(count - 1), each on a thread of its own, and returns the results that are there at `until`. Threads
// that have not finished are left running: the process is about to end.
template <typename Result>
std::vector<std::optional<Result>> AskAll(std::size_t count, std::function<Result(std::size_t)> function,
                                          Clock::time_point until) {
  struct Answers {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::optional<Result>> all;
    std::size_t back = 0;
  };
  const auto answers = std::make_shared<Answers>();
  answers->all.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    try {
      std::thread([answers, function, i] {
        pthread_setname_np(pthread_self(), "timeout report");
        std::optional<Result> result;
        try {
          result = function(i);
        } catch (const std::exception&) {  // no result
        }
        const std::lock_guard lock(answers->mutex);
        answers->all[i] = std::move(result);
        ++answers->back;
        answers->changed.notify_all();
      }).detach();
    } catch (const std::exception&) {  // no thread, no result
      const std::lock_guard lock(answers->mutex);
      ++answers->back;
    }
  }
  std::unique_lock lock(answers->mutex);
  answers->changed.wait_until(lock, until, [&] { return answers->back == count; });
  return answers->all;
}

const StreamProgress* Find(const std::vector<StreamProgress>& streams, const std::string& name) {
  const auto found =
      std::find_if(streams.begin(), streams.end(), [&](const auto& stream) { return stream.stream == name; });
  return found == streams.end() ? nullptr : &*found;
}

// `first`, the stream that it waits for, the one that this waits for, and so on.
std::vector<const StreamProgress*> Chain(const std::vector<StreamProgress>& streams,
                                         const StreamProgress& first) {
  std::vector<const StreamProgress*> chain{&first};
  while (!chain.back()->behind.empty()) {
    const StreamProgress* next = Find(streams, chain.back()->behind);
    if (!next || next->idle || std::find(chain.begin(), chain.end(), next) != chain.end()) break;
    chain.push_back(next);
  }
  return chain;
}

std::string StageText(const StreamProgress& stream) {
  return stream.stage.empty() ? "before its first stage" : stream.stage;
}

std::string Describe(const std::vector<const StreamProgress*>& chain) {
  const StreamProgress& first = *chain.front();
  const StreamProgress& last = *chain.back();
  std::string text = (first.stream == "main" ? "" : first.stream + ": ") + StageText(first);
  if (chain.size() > 1 && last.doing.empty())
    text += ", waiting for " + last.stream + " (" + StageText(last) + ")";
  if (chain.size() == 1 && !first.behind.empty()) text += ", waiting for " + first.behind;
  if (!last.doing.empty()) text += ", " + last.doing;
  if (!first.stage.empty()) text += ", " + Seconds(first.seconds);
  return text;
}

// What the report knows of one rank.
struct Entry {
  std::optional<RankSnapshot> now;
  // Of the rank's own thread, then of those that run its streams.
  std::vector<std::vector<std::string>> stacks;
  bool finished() const { return now && now->phase == RankPhase::kDone && now->error.empty(); }
  std::set<int> Awaits() const {  // the ranks that it waits for, where known
    std::set<int> awaits;
    if (!now || now->phase == RankPhase::kDone) return awaits;
    awaits.insert(now->awaits.begin(), now->awaits.end());
    for (const auto& stream : now->streams) awaits.insert(stream.awaits.begin(), stream.awaits.end());
    return awaits;
  }
};

// The threads whose stacks are worth showing: the rank's own, and those that run a case's function on a stream.
std::vector<pid_t> ThreadsOf(const Entry& entry, pid_t own) {
  std::vector<pid_t> threads;
  if (entry.now && entry.now->phase == RankPhase::kDone) return threads;
  if (entry.now) {
    for (const auto& stream : entry.now->streams) {
      if (!stream.idle && stream.doing.empty() && stream.behind.empty() && stream.thread > 0)
        threads.push_back(stream.thread);
    }
  }
  threads.insert(threads.begin(), own);
  return threads;
}

void AddStacks(std::vector<Entry>& entries, const std::vector<pid_t>& threads, Clock::time_point start) {
  std::vector<pid_t> all;
  std::vector<std::size_t> rank_of;
  for (std::size_t rank = 0; rank < entries.size(); ++rank) {
    for (const pid_t thread : ThreadsOf(entries[rank], threads[rank])) {
      all.push_back(thread);
      rank_of.push_back(rank);
    }
  }
  const auto stacks = AskAll<std::vector<std::vector<std::string>>>(
      1, [all, start](std::size_t) { return SampleStacks(all, start + kSignalLimit); }, start + kStackLimit);
  for (std::size_t i = 0; i < all.size(); ++i) {
    Entry& entry = entries[rank_of[i]];
    if (stacks[0])
      entry.stacks.push_back((*stacks[0])[i]);
    else if (entry.stacks.empty())
      entry.stacks.push_back({"(no stack: the names of its functions were not found in time)"});
  }
}

// All stacks of a rank as the answer's list of lines.
std::vector<std::string> Lines(const std::vector<std::vector<std::string>>& stacks) {
  std::vector<std::string> lines;
  for (const auto& stack : stacks) {
    if (!lines.empty()) lines.emplace_back("(and on a stream:)");
    lines.insert(lines.end(), stack.begin(), stack.end());
  }
  return lines;
}

// The innermost frames of the first stream's thread, for which the rank's own thread waits, or else of the rank's own.
std::string ShortStack(const std::vector<std::vector<std::string>>& stacks) {
  const std::vector<std::string>& stack = stacks.size() > 1 ? stacks[1] : stacks[0];
  std::string text;
  for (std::size_t i = 0; i < stack.size() && i < kShortFrames; ++i)
    text += (text.empty() ? "" : " < ") + stack[i];
  return text;
}

std::string Where(const Entry& entry) {
  if (entry.finished()) return "finished";
  std::string text = "the runtime does not say where";
  if (entry.now && !entry.now->error.empty()) return "failed: " + entry.now->error;
  if (entry.now) {
    text = entry.now->phase == RankPhase::kWaiting ? "waiting for a clean state"
                                                   : DescribeProgress(entry.now->streams);
    if (entry.now->phase == RankPhase::kReady)
      text = "ready for its first iteration, waiting for " + kernels::RankList(entry.now->awaits);
    if (entry.now->phase == RankPhase::kEnding) text = "its function has returned; " + text;
  }
  if (entry.Awaits().empty() && !entry.stacks.empty()) text += ", in " + ShortStack(entry.stacks);
  return text;
}

// The rank that the others wait for; nothing when it is not known, or not only one.
std::optional<int> Culprit(const std::vector<Entry>& entries) {
  std::vector<int> failed, unfinished;
  std::set<int> awaited;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const int rank = static_cast<int>(i);
    if (entries[i].now && !entries[i].now->error.empty()) failed.push_back(rank);
    if (!entries[i].finished()) unfinished.push_back(rank);
    awaited.merge(entries[i].Awaits());
  }
  if (!failed.empty()) return failed.front();
  std::erase_if(awaited, [&](int rank) {  // a rank that itself waits is not the cause
    return static_cast<std::size_t>(rank) >= entries.size() ||
           !entries[static_cast<std::size_t>(rank)].Awaits().empty();
  });
  if (awaited.size() == 1) return *awaited.begin();
  if (unfinished.size() == 1) return unfinished.front();
  return std::nullopt;
}

RunResult Compose(const std::vector<Entry>& entries, std::chrono::milliseconds deadline) {
  RunResult result;
  result.status = protocol::Status::kError;
  result.fatal = true;
  protocol::Failure failure{FailureKind::kTimeout, Culprit(entries), "", ""};
  std::string text = "not finished after " + std::to_string(deadline.count()) + " ms";
  if (failure.rank) {
    const Entry& cause = entries[static_cast<std::size_t>(*failure.rank)];
    if (cause.now && !cause.now->error.empty())  // the cause comes before its consequence
      text = "rank " + std::to_string(*failure.rank) + ": " + cause.now->error + "; " + text;
    if (cause.now) failure.stage = StageOf(cause.now->streams);
    if (cause.finished())
      text += ", others wait for rank " + std::to_string(*failure.rank) + ", which has finished";
    else if (std::count_if(entries.begin(), entries.end(), [](const Entry& e) { return !e.finished(); }) > 1)
      text += ", others wait for rank " + std::to_string(*failure.rank);
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    protocol::Rank rank;
    rank.rank = static_cast<int>(i);
    rank.ok = entries[i].finished();
    const std::string where = Where(entries[i]);
    if (!rank.ok) rank.error = where;
    if (!entries[i].stacks.empty()) rank.extra["stack"] = Lines(entries[i].stacks);
    text += (i ? "; rank " : ": rank ") + std::to_string(i) + ": " + where;
    result.ranks.push_back(std::move(rank));
  }
  failure.detail = text;
  result.error = text;
  result.failure = std::move(failure);
  return result;
}

}  // namespace

std::string StageOf(const std::vector<StreamProgress>& streams) {
  const StreamProgress* in_stage = nullptr;
  for (const auto& stream : streams) {
    if (!stream.stage.empty() && (!in_stage || (in_stage->idle && !stream.idle))) in_stage = &stream;
  }
  return in_stage ? in_stage->stage : "";
}

std::string DescribeProgress(const std::vector<StreamProgress>& streams) {
  // A stream that another one waits for is described with that one, a stream that waits for the main one with the main one.
  std::set<const StreamProgress*> told;
  std::vector<std::vector<const StreamProgress*>> chains;
  for (const auto& stream : streams) {
    if (stream.idle) continue;
    auto chain = Chain(streams, stream);
    const bool with_main =
        std::any_of(chain.begin() + 1, chain.end(), [](const auto* s) { return s->stream == "main"; });
    if (with_main) continue;
    told.insert(chain.begin() + 1, chain.end());
    chains.push_back(std::move(chain));
  }
  std::string text;
  for (const auto& chain : chains) {
    if (!told.count(chain.front())) text += (text.empty() ? "" : "; ") + Describe(chain);
  }
  if (text.empty() && !chains.empty()) text = Describe(chains.front());  // all wait for each other
  if (!text.empty()) return text;
  const std::string last = streams.empty() ? "" : streams.front().stage;
  return "in the case's host code, no marked work is pending" +
         (last.empty() ? "" : " (last stage: " + last + ")");
}

std::string PlaceOfThread(pid_t thread) noexcept {
  const auto start = Clock::now();
  try {
    using Stacks = std::vector<std::vector<std::string>>;
    const auto stacks = AskAll<Stacks>(
        1, [thread, start](std::size_t) { return SampleStacks({thread}, start + kSignalLimit); },
        start + kStackLimit);
    return stacks[0] ? ShortStack(*stacks[0]) : "";
  } catch (const std::exception&) {  // then without it
    return "";
  }
}

RunResult TimeoutReport(const std::vector<pid_t>& threads,
                        const std::function<RankSnapshot(int rank)>& snapshot,
                        std::chrono::milliseconds deadline) noexcept {
  const auto start = Clock::now();
  std::vector<Entry> entries(threads.size());
  try {
    auto snapshots = AskAll<RankSnapshot>(
        threads.size(), [snapshot](std::size_t rank) { return snapshot(static_cast<int>(rank)); },
        start + kSnapshotLimit);
    for (std::size_t i = 0; i < entries.size(); ++i) entries[i].now = std::move(snapshots[i]);
    AddStacks(entries, threads, start);
  } catch (const std::exception&) {  // the report has what there is
  }
  return Compose(entries, deadline);
}

}  // namespace cppool::daemon
