// mark(stream, stage) on CUDA: each mark is a timing event and a stream-ordered write of its number into
// page-locked host memory. So any thread can read how far each stream is without a CUDA call, even while the
// device is stuck.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime/cuda/device_trace.h"
#include "kernels/runtime/cuda/page_locked_heap.h"

namespace cppool::kernels::cuda {

// A call on a communicator, as the description of its stage names it: "send to rank 2".
struct StageCall {
  // String literals: "send to", "all_reduce"; " rank ", " with "; "", " ranks".
  const char* what = "";
  const char* before = "";
  int number = 0;  // the rank of the world, or how many ranks
  const char* after = "";
};

// A point on a stream: its latest mark when that was asked for. Valid until Reset.
struct StagePoint {
  std::size_t track = 0;
  std::uint32_t sequence = 0;
};

// Everything is for the rank's thread, except what is marked "any thread".
class StageMarks {
 public:
  // `heap` must outlive it.
  explicit StageMarks(PageLockedHeap* heap);
  ~StageMarks();
  StageMarks(const StageMarks&) = delete;
  StageMarks& operator=(const StageMarks&) = delete;

  // Shows the stream in Progress until Reset. Marking a stream that was not announced (a case's own
  // cudaStream_t) announces it. Announcing it again has no effect.
  void Announce(cudaStream_t stream, const std::string& name, bool main_stream);
  // stage NULL ends the last stage. Throws RuntimeError.
  void Mark(cudaStream_t stream, const char* stage, int iteration);
  // Notes a call of the stream's stage for Progress, without work on the device. An unknown stream is
  // announced.
  void Note(cudaStream_t stream, const StageCall& call);
  // For an event's record, and for another stream's wait for that event: Progress reports the wait until the
  // recording stream has left the stage of the record.
  StagePoint Here(cudaStream_t stream) { return HereOn(TrackOf(stream)); }
  void NoteWait(cudaStream_t stream, const StagePoint& point);
  const std::string& NameOf(cudaStream_t stream) { return TrackOf(stream).name; }
  // Ends the stream's stage, if it has one.
  void Close(cudaStream_t stream, int iteration);
  // The stream's work is done: when there are many events, keeps their times and releases them, so that a
  // long case needs little memory.
  void Settle(cudaStream_t stream);
  // The main stream's work is done and its last stage closed: the times of its counted iterations so far.
  StageSamples Samples(cudaStream_t main_stream);
  // All work is done: the stages' times.
  StageTimes Collect();
  // Stages are added to this trace, too, from here on; NULL: to none.
  void TraceTo(DeviceTrace* trace) { trace_ = trace; }
  // After a failure: adds the stages that have ended.
  void TraceEnded();
  // Forgets streams and marks. No marked work may be pending.
  void Reset();

  // Any thread. Reads how far the streams are. A stage counts as reached from the last reading that did not
  // show it yet, or from its mark's call where that is later: `seconds` is never too short, and too long by
  // at most the time between two readings. The rank's thread reads while it waits for a stream.
  void Read() const;
  // May be called on any thread; it takes a reading, too.
  std::vector<StreamProgress> Progress(std::vector<cudaStream_t>* streams = nullptr) const;

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
  template <typename Noted>
  struct Staged {
    std::uint32_t sequence;
    Noted what;
  };
  static constexpr std::size_t kMostNotes = 256;  // the latest ones of a stream

  // One stream. `word` counts on from case to case, cyclic; only the stream writes it.
  struct Track {
    cudaStream_t stream = nullptr;
    std::string name;
    bool main_stream = false;
    std::uint32_t* word = nullptr;
    std::uint32_t last_sequence = 0;  // the latest one that was enqueued
    std::vector<Entry> entries;
    std::deque<Staged<StageCall>> calls;
    std::deque<Staged<StagePoint>> waits;
    // What readings have shown.
    mutable int seen_stage = -1;
    mutable std::uint32_t seen_sequence = 0;
    mutable Clock::time_point reached;
    mutable Clock::time_point last_read;
  };

  template <typename Noted>
  void NoteIn(std::deque<Staged<Noted>> Track::*notes, cudaStream_t stream, const Noted& what);
  Track* Find(cudaStream_t stream);  // NULL: not announced
  Track& TrackOf(cudaStream_t stream);
  Track& AddTrack(cudaStream_t stream, const std::string& name, bool main_stream);
  StagePoint HereOn(const Track& track) const;
  int NameIndex(const char* stage);
  cudaEvent_t TakeEvent();
  void Fold(Track& track, bool whole);
  bool TraceStage(const Track& track, std::size_t entry);           // false: it has not ended
  void ReadTrack(const Track& track, Clock::time_point now) const;  // mutex_ held
  std::size_t Reached(const Track& track) const;                    // how many entries the stream has passed
  std::uint32_t ReachedSequence(const Track& track) const;          // of the last mark that it has passed
  std::string CallsIn(const Track& track, std::uint32_t sequence) const;
  const StagePoint* AwaitedIn(const Track& track, std::uint32_t sequence) const;
  bool IsIdle(const Track& track) const;

  DeviceTrace* trace_ = nullptr;
  PageLockedHeap* heap_;
  std::byte* words_;
  std::vector<cudaEvent_t> spare_events_;
  std::vector<Interval> intervals_;
  std::uint64_t next_order_ = 0;

  // Guards what Progress reads. Never held during a CUDA call: those can wait for the device.
  mutable std::mutex mutex_;
  std::deque<Track> tracks_;  // those in use first; the next case uses a track and its word again
  std::size_t used_tracks_ = 0;
  std::vector<std::string> names_;
};

}  // namespace cppool::kernels::cuda
