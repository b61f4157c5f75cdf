#include "daemon/timeout_report.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <utility>

#include "base/words.h"
#include "daemon/log.h"
#include "daemon/stack_sampler.h"
#include "kernels/group_shape.h"

namespace cppool::daemon {
namespace {

using kernels::StreamProgress;
using protocol::FailureKind;
using protocol::RunResult;

constexpr std::size_t kShortFrames = 4;  // frames of a stack in the error's text

std::string Seconds(double seconds) { return Rounded(seconds, 2) + " s"; }

const StreamProgress* Find(const std::vector<StreamProgress>& streams, const std::string& name) {
  const auto found = std::ranges::find_if(streams, [&](const auto& stream) { return stream.stream == name; });
  return found == streams.end() ? nullptr : &*found;
}

// `first`, the stream that it waits for, the one that this waits for, and so on.
std::vector<const StreamProgress*> Chain(const std::vector<StreamProgress>& streams,
                                         const StreamProgress& first) {
  std::vector<const StreamProgress*> chain{&first};
  while (!chain.back()->behind.empty()) {
    const StreamProgress* next = Find(streams, chain.back()->behind);
    if (!next || next->idle || std::ranges::find(chain, next) != chain.end()) break;
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

bool Finished(const RankReport& rank) { return IsDone(rank) && rank.failure.text.empty(); }

// The ranks that it waits for, where known.
std::set<int> Awaited(const RankReport& rank) {
  std::set<int> awaited;
  if (IsDone(rank)) return awaited;
  awaited.insert(rank.awaits.begin(), rank.awaits.end());
  for (const auto& stream : rank.streams) awaited.insert(stream.awaits.begin(), stream.awaits.end());
  return awaited;
}

bool IsStopped(const RankReport& rank) {
  return std::ranges::any_of(rank.streams, [](const auto& stream) { return stream.doing == kStopped; });
}

// The innermost frames of the first stream's thread, for which the rank's own thread waits, or else of the
// rank's own.
std::string ShortStack(const std::vector<std::vector<std::string>>& stacks) {
  const std::vector<std::string>& stack = stacks.size() > 1 ? stacks[1] : stacks[0];
  return base::Join(
      {stack.begin(), stack.begin() + static_cast<std::ptrdiff_t>(std::min(stack.size(), kShortFrames))},
      " < ");
}

std::string WhereInPhase(const RankReport& rank) {
  switch (rank.phase) {
    case RankPhase::kUnknown:
      return kNoPlace;
    case RankPhase::kWaiting:
      return "waiting for a clean state";
    case RankPhase::kReady:
      return "ready for its first iteration, waiting for " + kernels::RankList(rank.awaits);
    case RankPhase::kEnding:
      return "its function has returned; " + DescribeProgress(rank.streams);
    case RankPhase::kRunning:
    case RankPhase::kDone:
      break;
  }
  return DescribeProgress(rank.streams);
}

// The rank that the others wait for; nothing when it is not known, or not only one.
std::optional<int> Culprit(const std::vector<RankReport>& ranks) {
  std::vector<int> failed, unfinished;
  std::set<int> awaited;
  for (const RankReport& rank : ranks) {
    if (!rank.failure.text.empty()) failed.push_back(rank.rank);
    if (!Finished(rank)) unfinished.push_back(rank.rank);
    awaited.merge(Awaited(rank));
  }
  if (!failed.empty()) return failed.front();
  std::erase_if(awaited, [&](int rank) {  // a rank that itself waits is not the cause
    return static_cast<std::size_t>(rank) >= ranks.size() ||
           !Awaited(ranks[static_cast<std::size_t>(rank)]).empty();
  });
  if (awaited.size() == 1) return *awaited.begin();
  if (unfinished.size() == 1) return unfinished.front();
  std::erase_if(unfinished, [&](int rank) { return !IsStopped(ranks[static_cast<std::size_t>(rank)]); });
  if (unfinished.size() == 1) return unfinished.front();  // what the others wait for was not heard in time
  return std::nullopt;
}

std::string WhereAll(const std::vector<RankReport>& ranks) {
  std::string text;
  for (const RankReport& rank : ranks)
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank.rank) +
            (rank.node.empty() ? "" : " on node " + rank.node) + ": " + DescribeRank(rank);
  return text;
}

}  // namespace

std::string DescribeRank(const RankReport& rank) {
  if (Finished(rank)) return "finished";
  if (!rank.failure.text.empty()) return "failed: " + rank.failure.text;
  std::string text = WhereInPhase(rank);
  if (Awaited(rank).empty() && !rank.stacks.empty()) text += ", in " + ShortStack(rank.stacks);
  return text;
}

std::vector<std::string> StackLines(const std::vector<std::vector<std::string>>& stacks) {
  std::vector<std::string> lines;
  for (const auto& stack : stacks) {
    if (!lines.empty()) lines.emplace_back("(and on a stream:)");
    lines.insert(lines.end(), stack.begin(), stack.end());
  }
  return lines;
}

std::string StageOf(const std::vector<StreamProgress>& streams) {
  const StreamProgress* in_stage = nullptr;
  for (const auto& stream : streams) {
    if (!stream.stage.empty() && (!in_stage || (in_stage->idle && !stream.idle))) in_stage = &stream;
  }
  return in_stage ? in_stage->stage : "";
}

std::string DescribeProgress(const std::vector<StreamProgress>& streams) {
  // A stream that another one waits for is described with that one, a stream that waits for the main one with
  // the main one.
  std::set<const StreamProgress*> described;
  std::vector<std::vector<const StreamProgress*>> chains;
  for (const auto& stream : streams) {
    if (stream.idle) continue;
    auto chain = Chain(streams, stream);
    const bool with_main =
        std::any_of(chain.begin() + 1, chain.end(), [](const auto* s) { return s->stream == "main"; });
    if (with_main) continue;
    described.insert(chain.begin() + 1, chain.end());
    chains.push_back(std::move(chain));
  }
  std::string text;
  for (const auto& chain : chains) {
    if (!described.count(chain.front())) text += (text.empty() ? "" : "; ") + Describe(chain);
  }
  if (text.empty() && !chains.empty()) text = Describe(chains.front());  // all wait for each other
  if (!text.empty()) return text;
  const std::string last = streams.empty() ? "" : streams.front().stage;
  return "in the case's host code, no marked work is pending" +
         (last.empty() ? "" : " (last stage: " + last + ")");
}

std::string PlaceOfThread(pid_t thread) noexcept {
  try {
    const auto stacks = SampleStacksInTime({thread}, std::chrono::steady_clock::now());
    return stacks ? ShortStack(*stacks) : "";
  } catch (const std::exception&) {  // then without it
    return "";
  }
}

std::string SilentNode(const std::vector<RankReport>& ranks) {
  std::string silent;
  for (const RankReport& rank : ranks) {
    if (rank.phase != RankPhase::kUnknown || rank.node.empty() || rank.node == silent) continue;
    if (!silent.empty()) return "";
    silent = rank.node;
  }
  const bool whole = std::ranges::all_of(ranks, [&](const RankReport& rank) {
    return rank.node != silent || rank.phase == RankPhase::kUnknown;
  });
  return whole ? silent : "";
}

protocol::Json WhereRanksAre(const std::vector<RankReport>& ranks) {
  using protocol::Json;
  Json list = Json::array();
  for (const RankReport& rank : ranks) {
    const std::string stage = StageOf(rank.streams);
    list.push_back({{"rank", rank.rank},
                    {"finished", Finished(rank)},
                    {"where", DescribeRank(rank)},
                    {"stage", stage.empty() ? Json() : Json(stage)},
                    {"awaits", Awaited(rank)}});
  }
  const auto awaited = Culprit(ranks);
  return {
      {"text", WhereAll(ranks)}, {"awaited", awaited ? Json(*awaited) : Json()}, {"ranks", std::move(list)}};
}

RunResult TimeoutReport(const std::vector<RankReport>& ranks, std::chrono::milliseconds deadline) {
  RunResult result;
  result.status = protocol::Status::kError;
  result.fatal = true;
  protocol::Failure failure{FailureKind::kTimeout, Culprit(ranks), "", ""};
  std::string text = "not finished after " + std::to_string(deadline.count()) + " ms";
  if (failure.rank) {
    const RankReport& cause = ranks[static_cast<std::size_t>(*failure.rank)];
    const std::string name = "rank " + std::to_string(*failure.rank);
    if (!cause.failure.text.empty())  // the cause comes before its consequence
      text = name + ": " + cause.failure.text + "; " + text;
    failure.stage = StageOf(cause.streams);
    failure.node = cause.node;
    if (Finished(cause))
      text += ", others wait for " + name + ", which has finished";
    else if (std::ranges::count_if(ranks, [](const auto& rank) { return !Finished(rank); }) > 1)
      text += ", others wait for " + name;
  }
  if (const std::string silent = SilentNode(ranks);
      !silent.empty() && (failure.node.empty() || failure.node == silent)) {
    failure.node = silent;
    text += ", node " + silent + " does not answer";
  }
  for (const RankReport& rank : ranks) {
    protocol::Rank entry;
    entry.rank = rank.rank;
    entry.ok = Finished(rank);
    if (!entry.ok) entry.error = DescribeRank(rank);
    if (!rank.stacks.empty()) entry.extra["stack"] = StackLines(rank.stacks);
    result.ranks.push_back(std::move(entry));
  }
  text += ": " + WhereAll(ranks);
  failure.detail = text;
  result.error = text;
  result.failure = std::move(failure);
  return result;
}

}  // namespace cppool::daemon
