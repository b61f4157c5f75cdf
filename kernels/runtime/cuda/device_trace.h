// The trace of one rank's case on CUDA: times that events of the streams have, on the clock of the host.
//
// The clocks are read together twice, at the beginning and at the end, each time on an idle stream: the
// host's clock before and after an event is recorded and seen to have happened, in the shortest of several
// tries. Half of that time is how far the times may be off (RankTrace::clock_error_us). Between the two
// readings the device's clock counts, at the rate that the readings give; rates differ by less than 100 ppm.
// Durations have the resolution of CUDA's events, 0.5 us; from 8 s on after the beginning that of a float of
// milliseconds, 1 us, and 4 us after a minute.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/runtime/common/trace_recorder.h"

namespace cppool::kernels::cuda {

cudaEvent_t NewTimingEvent();  // throws RuntimeError

// For the rank's thread. Throws RuntimeError.
class DeviceTrace {
 public:
  // Calls on communicators that can be timed in one case; those of a group on one stream count once.
  static constexpr std::size_t kMostTransfers = 8192;

  // Creates all events. `idle`: a stream without work.
  DeviceTrace(std::size_t limit, cudaStream_t idle);
  ~DeviceTrace();
  DeviceTrace(const DeviceTrace&) = delete;
  DeviceTrace& operator=(const DeviceTrace&) = delete;

  TraceRecorder& recorder() { return recorder_; }

  // A stage between two timing events. False: they have not both happened, and nothing is added.
  bool AddStage(int track, const std::string& stage, int iteration, cudaEvent_t begin, cudaEvent_t end);

  // Calls on communicators. Those between GroupStart and GroupEnd are one piece of work on each stream.
  // `slice` may be NULL: dropped.
  void GroupStart() { ++group_depth_; }
  void BeginCall(cudaStream_t stream, TraceSlice* slice);  // before the call
  void EndCall();                                          // after it
  void BeginGroupEnd();                                    // before the call of group_end
  void EndGroupEnd();                                      // after it

  // The case's work has ended without an error.
  void SetComplete() { complete_ = true; }
  // What was recorded, in the host's time. `idle`: a stream without work, if the case is complete.
  RankTrace Finish(cudaStream_t idle);

 private:
  // A moment on both clocks.
  struct Reading {
    cudaEvent_t event = nullptr;
    std::int64_t host_ns = 0;
    std::int64_t error_ns = 0;
  };
  // Calls on one stream that run together.
  struct Transfer {
    cudaStream_t stream = nullptr;
    std::vector<TraceSlice*> slices;
    cudaEvent_t begin = nullptr, end = nullptr;
  };

  cudaEvent_t NewEvent();
  Reading ReadClocks(cudaStream_t idle);
  void BeginWaiting();
  void EndBegun();
  // Nanoseconds of the host's clock, at the device's rate; 0: the event has not happened.
  std::int64_t TimeOf(cudaEvent_t event) const;
  void TimeTransfers();

  std::vector<cudaEvent_t> events_;  // all, owned
  std::size_t used_events_ = 0;      // of transfers: those in front
  TraceRecorder recorder_;
  Reading origin_;
  int group_depth_ = 0;
  std::vector<Transfer> waiting_;  // not made yet: their group is open
  std::vector<Transfer> made_;
  std::size_t begun_ = 0;  // those of made_ before this one have ended
  bool complete_ = false;
};

}  // namespace cppool::kernels::cuda
