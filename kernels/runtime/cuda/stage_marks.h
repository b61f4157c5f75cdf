// mark(stream, stage) on CUDA: each mark is a timing event and a stream-ordered write of its number into
// page-locked host memory, so that any thread can read how far every stream has come without a CUDA call,
// also while the device is stuck.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime/cuda/page_locked_heap.h"

namespace cppool::kernels::cuda {

// A call on a communicator, as it is said of the stage that it was enqueued in: "send to rank 2".
struct StageCall {
  const char* before = "";  // "send to rank ", "all_reduce with "; lives for ever
  int number = 0;           // the rank of the world, or how many ranks
  const char* after = "";   // "", " ranks"
};

// A point on a stream: its latest mark when that was asked for. Valid until Reset.
struct StagePoint {
  std::size_t track = 0;
  std::uint32_t sequence = 0;
};

// Everything is for the rank's thread, except what is marked "any thread".
class StageMarks {
 public:
  static constexpr int kWarmUp =
      -2;  // an iteration whose intervals are not counted; StageTally::kOnce is outside of iterations

  // `heap` must outlive it.
  explicit StageMarks(PageLockedHeap* heap);
  ~StageMarks();
  StageMarks(const StageMarks&) = delete;
  StageMarks& operator=(const StageMarks&) = delete;

  // Shows the stream in Progress until Reset. Marking a stream that was not announced (a case's own
  // cudaStream_t) announces it. Announcing it again is no error.
  void Announce(cudaStream_t stream, const std::string& name, bool main_stream);
  // stage NULL ends the last stage. Throws RuntimeError.
  void Mark(cudaStream_t stream, const char* stage, int iteration);
  // Costs the device nothing: what the stream's stage has in it, for Progress to tell. An unknown stream is announced.
  void Note(cudaStream_t stream, const StageCall& call);
  // For an event's record, and for another stream's wait for that event: Progress tells of the wait until the stage
  // that the record is in has been left.
  StagePoint Here(cudaStream_t stream) { return HereOn(TrackOf(stream)); }
  void NoteWait(cudaStream_t stream, const StagePoint& point);
  // Ends the stream's stage when it has one.
  void Close(cudaStream_t stream, int iteration);
  // The stream's work is done: keeps the times and gives events back when there are many, so that a long case
  // stays small.
  void Settle(cudaStream_t stream);
  // All work is done: the stages' times.
  StageTimes Collect();
  // Forgets streams and marks. No marked work may be pending.
  void Reset();

  // Any thread. Looks at how far the streams are. A stage counts as reached from the last look that did not
  // show it yet, or from its mark's call where that is later: `seconds` is never too short, and too long by
  // at most the time between two looks. The rank's thread looks while it waits for a stream.
  void Look() const;
  std::vector<StreamProgress> Progress(
      std::vector<cudaStream_t>* streams = nullptr) const;  // any thread; a look, too

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    std::uint32_t sequence = 0;
    int stage = -1;  // of names_; -1: none
    int iteration = 0;
    std::uint64_t order = 0;  // among all of the rank's marks
    cudaEvent_t event = nullptr;
    Clock::time_point called;
  };
  struct Interval {
    std::uint64_t order;
    int stage;
    int iteration;
    bool main_stream;
    double milliseconds;
  };
  struct StagedCall {
    std::uint32_t sequence;
    StageCall call;
  };
  struct StagedWait {
    std::uint32_t sequence;
    StagePoint point;
  };
  static constexpr std::size_t kMostNotes = 256;  // of a stream: the latest

  // One stream. `word` counts on from case to case, cyclic, and is written by the stream alone.
  struct Track {
    cudaStream_t stream = nullptr;
    std::string name;
    bool main_stream = false;
    std::uint32_t* word = nullptr;
    std::uint32_t last_sequence = 0;  // the latest one that was enqueued
    std::vector<Entry> entries;
    std::deque<StagedCall> calls;
    std::deque<StagedWait> waits;
    // What looks have seen.
    mutable int seen_stage = -1;
    mutable std::uint32_t seen_sequence = 0;
    mutable Clock::time_point reached;
    mutable Clock::time_point looked;
  };

  Track& TrackOf(cudaStream_t stream);
  Track& AddTrack(cudaStream_t stream, const std::string& name, bool main_stream);
  StagePoint HereOn(const Track& track) const;
  int NameIndex(const char* stage);
  cudaEvent_t TakeEvent();
  void Fold(Track& track, bool whole);
  void LookAt(const Track& track, Clock::time_point now) const;  // mutex_ held
  std::size_t Reached(const Track& track) const;                 // entries that the stream has passed
  std::uint32_t ReachedSequence(const Track& track) const;       // of the mark that it has passed last
  std::string CallsIn(const Track& track, std::uint32_t sequence) const;
  const StagePoint* AwaitedIn(const Track& track, std::uint32_t sequence) const;
  bool IsIdle(const Track& track) const;

  PageLockedHeap* heap_;
  std::byte* words_;
  std::vector<cudaEvent_t> spare_events_;
  std::vector<Interval> intervals_;
  std::uint64_t next_order_ = 0;

  // Guards what Progress reads. Never held over a CUDA call: those can wait for the device.
  mutable std::mutex mutex_;
  std::deque<Track> tracks_;  // those in use first; a track and its word are used again by the next case
  std::size_t used_tracks_ = 0;
  std::vector<std::string> names_;
};

}  // namespace cppool::kernels::cuda
