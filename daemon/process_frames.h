// What the frames of a rank process say: client/python/cppool/_ranks/README.md has them. A frame may hold
// anything: what is not as it should be throws std::exception, except where a function says otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/rank_report.h"
#include "kernels/backend.h"
#include "kernels/trace.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

// Returns the member if it is a string, else "".
std::string TextOf(const protocol::Json& frame, const char* member);

// Adds what the frame `report` says of the case to the rank's report, but for its failure.
void ReadReport(const protocol::Json& frame, const kernels::Place& place, RankReport& report);
// Returns the failure of a frame `report` or `mark`.
RankFailure FailureFrom(const protocol::Json& frame);
kernels::StageSamples SamplesFrom(const protocol::Json& mark);
kernels::RankTrace TraceFrom(const protocol::Json& trace);  // the member of a report

// Of the frame `stacks`, whatever it holds: the stacks of its Python threads, the main one first.
std::vector<std::vector<std::string>> StacksOf(const protocol::Json& answer);
// The stacks that faulthandler has written, the main thread's first, without the frames of the ranks' own
// code.
std::vector<std::vector<std::string>> StacksFrom(const std::string& text);

// A collective of a group of processes.
struct Collective {
  std::int64_t number = -1;
  std::string name, group;
  bool over = true;
  std::vector<std::int64_t> ranks;  // the group's members; empty: not known
};
// Of the frame `stacks`, whatever it holds: the last one that the rank has entered in each group.
std::vector<Collective> CollectivesOf(const protocol::Json& answer);

}  // namespace cppool::daemon
