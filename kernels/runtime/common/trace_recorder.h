// Collects the slices of one rank's trace in memory that is taken at the beginning, for both runtimes.
//
// Threads: everything is for the rank's thread. A stream's thread may set the times of a slice that it was
// given; what orders the streams' work before Finish orders these times, too.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/trace.h"

namespace cppool::kernels {

class TraceRecorder {
 public:
  explicit TraceRecorder(std::size_t limit);  // of slices
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // A new slice, whose times the caller sets; one without a beginning is left out. NULL: the limit is
  // reached, which is counted. Valid until Finish.
  TraceSlice* Add(TraceSlice::Kind kind, int track, std::string_view name, int iteration);
  // Counts a slice that was dropped before Add.
  void CountDropped() { ++dropped_; }
  void NameStream(int track, const std::string& name);

  // For `mark`: `stage` begins on the stream; NULL: none. Returns the slice of the stage, which may be NULL,
  // and that of the stage before it on this stream, which ends: NULL where there is none.
  struct Change {
    TraceSlice* begun = nullptr;
    TraceSlice* ended = nullptr;
  };
  Change MarkStage(int track, const char* stage, int iteration);
  // All marked work has ended: so do the stages that have begun and not ended, at `now`.
  void EndStages(std::int64_t now);
  // For `mark` as well: the rank's thread enqueues work of the stage from here on. With NULL it goes on with
  // the stage of another stream that it began last and has not ended.
  void MarkCalls(cppool_stream stream, const char* stage, int iteration);

  // A call of the rank's thread for as long as it lives. Without a recorder (NULL) nothing.
  class Call {
   public:
    Call(TraceRecorder* recorder, const char* what);
    ~Call() {
      if (slice_) slice_->end_ns = TraceClockNs();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    TraceSlice* slice_ = nullptr;
  };

  // All work has ended, or, with `failed`, will not go on. Slices that have begun and not ended do so now.
  RankTrace Finish(bool failed);

 private:
  int NameIndex(std::string_view name);
  TraceSlice* BeginCall(std::string_view what, int iteration);

  std::vector<TraceSlice> slices_;
  std::size_t used_ = 0;
  std::uint64_t dropped_ = 0;
  std::vector<std::string> streams_, names_;
  std::map<std::string, int, std::less<>> name_index_;
  std::vector<TraceSlice*> open_;  // by track: the stage's slice
  std::vector<std::pair<cppool_stream, std::string>>
      enqueued_;                     // stages that are not ended, in order of their begin
  TraceSlice* enqueuing_ = nullptr;  // of the last one of them
};

}  // namespace cppool::kernels
