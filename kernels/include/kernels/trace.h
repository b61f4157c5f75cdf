// The trace of a rank's case: when its streams and its thread did what. RankRuntime::BeginTrace asks for one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cppool::kernels {

// Nanoseconds of the monotonic clock, which is one for all threads of the machine.
inline std::int64_t TraceClockNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One interval. Slices of a track follow each other or lie in each other.
struct TraceSlice {
  enum class Kind {
    kStage,     // of a stream, from one mark to the next: `name` is the stage
    kTransfer,  // a call on a communicator, in stream order: "send", "all_reduce"
    kCall,      // of the rank's thread: what it enqueues or waits for
  };
  static constexpr int kNoPeer = -1;

  Kind kind = Kind::kStage;
  int track = 0;       // of RankTrace::streams; kCall: not used
  int name = 0;        // of RankTrace::names
  int iteration = -1;  // from 0; -1: outside of iterations; -2: warm-up
  // TraceClockNs. A slice that had not ended when the trace was taken ends there, and says so.
  std::int64_t begin_ns = 0, end_ns = 0;
  bool unfinished = false;
  // A kTransfer has these.
  int peer = kNoPeer;  // the other rank of a send or receive, in the world
  int ranks = 0;       // of the communicator
  std::size_t bytes =
      0;  // sent or received; all_gather: given by the rank; reduce_scatter: its part; all_reduce: all
};

struct RankTrace {
  std::vector<std::string> streams;  // "main", "stream 1", ...
  std::vector<std::string> names;
  std::vector<TraceSlice> slices;  // in no particular order
  std::uint64_t dropped = 0;       // slices that the limit left no room for
  double clock_error_us = 0;       // how far the times of streams may be off
};

}  // namespace cppool::kernels
