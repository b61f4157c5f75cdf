#include "daemon/timeout_report.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "daemon/stack_sampler.h"

namespace cppool::daemon {
namespace {

using kernels::StreamProgress;
using protocol::FailureKind;
using protocol::RunResult;
using Clock = std::chrono::steady_clock;

// From the deadline on. Asking a stuck rank where it is may get stuck itself, and so may reading the files that have the functions' names.
constexpr std::chrono::milliseconds kLookLimit{150};
constexpr std::chrono::milliseconds kSignalLimit{250};
constexpr std::chrono::milliseconds kStackLimit{350};
constexpr std::size_t kShortFrames = 4;  // of a stack, within a sentence

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f s", seconds);
  return text;
}

// Calls function(0), ..., function(count - 1) on threads of their own, and returns what has come by `until`. The others are left behind
// with a process that ends.
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
        } catch (const std::exception&) {  // no answer
        }
        const std::lock_guard lock(answers->mutex);
        answers->all[i] = std::move(result);
        ++answers->back;
        answers->changed.notify_all();
      }).detach();
    } catch (const std::exception&) {  // no thread: no answer
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

// The streams that `first` waits for, one after another, and itself.
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

// One rank as the report has it.
struct Entry {
  std::optional<RankNow> now;
  std::vector<std::string> stack;
  bool finished() const { return now && now->phase == RankPhase::kDone && now->error.empty(); }
  std::set<int> Awaits() const {  // the ranks that it is known to wait for
    std::set<int> awaits;
    if (!now || now->phase == RankPhase::kDone) return awaits;
    for (const auto& stream : now->streams) awaits.insert(stream.awaits.begin(), stream.awaits.end());
    return awaits;
  }
};

// The threads that say more than the marks: the rank's own, and those whose work on a stream is the case's.
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
    if (!stacks[0]) {
      entry.stack = {"(no stack: its functions' names were not found in time)"};
      continue;
    }
    if (!entry.stack.empty()) entry.stack.emplace_back("(and on a stream:)");
    entry.stack.insert(entry.stack.end(), (*stacks[0])[i].begin(), (*stacks[0])[i].end());
  }
}

// The innermost frames, or those of the work on a stream, which the rank's own thread waits for.
std::string ShortStack(const std::vector<std::string>& stack) {
  std::string text;
  std::size_t frames = 0;
  auto frame = std::find(stack.begin(), stack.end(), "(and on a stream:)");
  frame = frame == stack.end() ? stack.begin() : frame + 1;
  for (; frame != stack.end() && frames < kShortFrames; ++frame, ++frames)
    text += (text.empty() ? "" : " < ") + *frame;
  return text;
}

std::string Where(const Entry& entry) {
  if (entry.finished()) return "finished";
  std::string text = "the runtime does not say where";
  if (entry.now && !entry.now->error.empty()) return "failed: " + entry.now->error;
  if (entry.now) {
    text = entry.now->phase == RankPhase::kWaiting ? "waiting for a clean state"
                                                   : DescribeProgress(entry.now->streams);
    if (entry.now->phase == RankPhase::kEnding) text = "its function has returned; " + text;
  }
  if (entry.Awaits().empty() && !entry.stack.empty()) text += ", in " + ShortStack(entry.stack);
  return text;
}

// The rank that the others wait for, where it is known and but one.
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
  std::erase_if(awaited, [&](int rank) {  // what waits itself is no cause
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
    if (cause.now && !cause.now->error.empty())  // it comes before what came of it
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
    if (!entries[i].stack.empty()) rank.extra["stack"] = entries[i].stack;
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
  // A stream is told with another one that waits for it, and one that waits for the main stream with that.
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
  if (text.empty() && !chains.empty()) text = Describe(chains.front());  // they wait for each other
  if (!text.empty()) return text;
  const std::string last = streams.empty() ? "" : streams.front().stage;
  return "in the case's host code, no marked work is pending" +
         (last.empty() ? "" : " (last stage: " + last + ")");
}

RunResult TimeoutReport(const std::vector<pid_t>& threads, const std::function<RankNow(int rank)>& look,
                        std::chrono::milliseconds deadline) noexcept {
  const auto start = Clock::now();
  std::vector<Entry> entries(threads.size());
  try {
    auto looks = AskAll<RankNow>(
        threads.size(), [look](std::size_t rank) { return look(static_cast<int>(rank)); },
        start + kLookLimit);
    for (std::size_t i = 0; i < entries.size(); ++i) entries[i].now = std::move(looks[i]);
    AddStacks(entries, threads, start);
  } catch (const std::exception&) {  // what there is is told
  }
  return Compose(entries, deadline);
}

}  // namespace cppool::daemon
