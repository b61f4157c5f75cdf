// The trace of a run as a file: Chrome's Trace Event Format, "JSON Object Format", which ui.perfetto.dev and
// chrome://tracing open. What it holds is described in daemon/timelines.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/trace.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

// The most slices of a rank's trace: they take about 4 MB of memory, and 13 MB of the file.
inline constexpr std::size_t kMostTraceSlices = 65536;

// Those of a rank that is a process, which sends them: MAX_SLICES of client/python/cppool/_ranks/world.py.
inline constexpr std::size_t kMostProcessSlices = 16384;

// Work of the daemon on one thread.
struct HostSlice {
  std::string name;
  std::int64_t begin_ns = 0, end_ns = 0;  // TraceClockNs
};

// Adds a slice that lasts as long as this object lives. A null list gets none.
class HostScope {
 public:
  HostScope(std::vector<HostSlice>* to, const char* name)
      : to_(to), name_(name), begin_ns_(to ? kernels::TraceClockNs() : 0) {}
  ~HostScope() {
    if (to_) to_->push_back({name_, begin_ns_, kernels::TraceClockNs()});
  }
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;

 private:
  std::vector<HostSlice>* const to_;
  const char* const name_;
  const std::int64_t begin_ns_;
};

// How the monotonic clock of another machine stands to this one's.
struct NodeClock {
  std::int64_t offset_ns = 0;  // what a time of this machine must be given to be one of the other
  std::int64_t error_ns = 0;   // at most: half of the fastest of several questions with their answers
};

struct RunTrace {
  struct Rank {
    std::string device, node;
    std::vector<HostSlice> host;  // work on the rank's thread
    kernels::RankTrace work;
  };
  std::string version, request, case_name, backend, transport;
  std::size_t limit = kMostTraceSlices;  // per rank
  std::int64_t begin_ns = 0;             // when the request was taken up: 0 in the file
  std::vector<HostSlice> host;           // work on the daemon's main thread
  std::vector<Rank> ranks;
  // By node: the times of its ranks are those of its clock. Empty: all ranks are here.
  std::map<std::string, NodeClock> clocks;
};

// Writes the file whole, or throws base::FileError and leaves none. With `clocks`, a file for each node,
// which has the node's times: "x.NODE.json" for "x.json".
void WriteTrace(const std::string& path, const RunTrace& trace);

// A rank's part, between processes. TraceRankFrom throws std::exception for anything else.
protocol::Json ToJson(const RunTrace::Rank& rank);
RunTrace::Rank TraceRankFrom(const protocol::Json& json);

// Says for people what the trace lacks; empty: nothing.
std::string DescribeDropped(const RunTrace& trace);

}  // namespace cppool::daemon
