// The answer to a passed deadline: where each rank is, from its streams' marks and its threads' stacks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "daemon/rank_report.h"
#include "kernels/backend.h"
#include "protocol/response.h"

namespace cppool::daemon {

// The text for a rank that was not read in time.
inline constexpr char kNoPlace[] = "the runtime does not say where";
// What a rank's process does that has got SIGSTOP.
inline constexpr char kStopped[] = "it is stopped";

// One line on where a rank is: "forward/p2p step 2 of 4, waiting for recv from rank 0, 4.98 s". A stream that
// waits for another stream of the rank is described together with it.
std::string DescribeProgress(const std::vector<kernels::StreamProgress>& streams);

// The stage of the first stream, the main one first, that has work in a stage; else of the first that has
// been in one.
std::string StageOf(const std::vector<kernels::StreamProgress>& streams);

// The innermost frames of a thread that may be stuck: "poll [libc.so.6] < Load [mine.so]"; empty where they
// cannot be had. The text is there within 0.35 s.
std::string PlaceOfThread(pid_t thread) noexcept;

// One line on where a rank is, with its stack where nothing else says what it waits for.
std::string DescribeRank(const RankReport& rank);

// All stacks of a rank as the answer's list of lines.
std::vector<std::string> StackLines(const std::vector<std::vector<std::string>>& stacks);

// The node of all ranks that were not read in time, which then is no matter of the ranks; empty: they are of
// several, or others of it were read.
std::string SilentNode(const std::vector<RankReport>& ranks);

// The members `text`, `awaited` and `ranks` of the answer to `status`.
protocol::Json WhereRanksAre(const std::vector<RankReport>& ranks);

// A fatal result of kind `timeout`. Its rank is the one that the others wait for, where it is known. `ranks`:
// where they are, by rank.
protocol::RunResult TimeoutReport(const std::vector<RankReport>& ranks, std::chrono::milliseconds deadline);

}  // namespace cppool::daemon
