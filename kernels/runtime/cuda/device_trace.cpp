#include "kernels/runtime/cuda/device_trace.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/runtime/cuda/check.h"

namespace cppool::kernels::cuda {
namespace {

constexpr int kReadings = 16;
constexpr double kMostDrift = 1e-4;  // of a device's clock against the host's

}  // namespace

DeviceTrace::DeviceTrace(std::size_t limit, cudaStream_t idle) : recorder_(limit) {
  try {
    for (std::size_t i = 0; i < 2 * std::min(limit, kMostTransfers); ++i) NewEvent();
    origin_ = ReadClocks(idle);
  } catch (...) {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    throw;
  }
}

DeviceTrace::~DeviceTrace() {
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
}

cudaEvent_t NewTimingEvent() {
  cudaEvent_t event = nullptr;
  CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDefault), "creating a timing event");
  return event;
}

cudaEvent_t DeviceTrace::NewEvent() { return events_.emplace_back(NewTimingEvent()); }

DeviceTrace::Reading DeviceTrace::ReadClocks(cudaStream_t idle) {
  Reading best;
  best.error_ns = std::numeric_limits<std::int64_t>::max();
  best.event = NewEvent();
  cudaEvent_t next = NewEvent();
  for (int i = 0; i < kReadings; ++i) {
    const std::int64_t before = TraceClockNs();
    CheckCuda(cudaEventRecord(next, idle), "recording an event to read the device's clock");
    // Without a limit: nothing is before it on the stream, and the daemon's watchdog has the deadline.
    cudaError_t state = cudaErrorNotReady;
    while ((state = cudaEventQuery(next)) == cudaErrorNotReady) {
    }
    CheckCuda(state, "reading the device's clock");
    const std::int64_t after = TraceClockNs();
    if ((after - before) / 2 >= best.error_ns) continue;
    std::swap(best.event, next);
    best.error_ns = (after - before) / 2;
    best.host_ns = before + best.error_ns;
  }
  cudaGetLastError();  // CUDA keeps "not ready" as an error
  return best;
}

std::int64_t DeviceTrace::TimeOf(cudaEvent_t event) const {
  float milliseconds = 0;
  if (!event || cudaEventElapsedTime(&milliseconds, origin_.event, event) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return origin_.host_ns + std::llround(static_cast<double>(milliseconds) * 1e6);
}

bool DeviceTrace::AddStage(int track, const std::string& stage, int iteration, cudaEvent_t begin,
                           cudaEvent_t end) {
  const std::int64_t begin_ns = TimeOf(begin);
  const std::int64_t end_ns = begin_ns ? TimeOf(end) : 0;
  if (!end_ns) return false;
  if (TraceSlice* const slice = recorder_.Add(TraceSlice::Kind::kStage, track, stage, iteration)) {
    slice->begin_ns = begin_ns;
    slice->end_ns = end_ns;
  }
  return true;
}

void DeviceTrace::BeginCall(cudaStream_t stream, TraceSlice* slice) {
  if (slice) {
    const auto known = std::find_if(waiting_.begin(), waiting_.end(),
                                    [stream](const Transfer& one) { return one.stream == stream; });
    if (known != waiting_.end()) {
      known->slices.push_back(slice);
    } else {
      Transfer& transfer = waiting_.emplace_back();
      transfer.stream = stream;
      transfer.slices.push_back(slice);
    }
  }
  if (group_depth_ == 0) BeginWaiting();
}

void DeviceTrace::EndCall() {
  if (group_depth_ == 0) EndBegun();
}

void DeviceTrace::BeginGroupEnd() {
  if (group_depth_ == 1) BeginWaiting();
}

void DeviceTrace::EndGroupEnd() {
  if (group_depth_ > 0 && --group_depth_ == 0) EndBegun();
}

void DeviceTrace::BeginWaiting() {
  for (Transfer& transfer : waiting_) {
    if (made_.size() == std::min(kMostTransfers, (events_.size() - 2) / 2)) {
      for (std::size_t i = 0; i < transfer.slices.size(); ++i) recorder_.CountDropped();
      continue;
    }
    transfer.begin = events_[used_events_++];
    transfer.end = events_[used_events_++];
    CheckCuda(cudaEventRecord(transfer.begin, transfer.stream), "recording the beginning of a transfer");
    made_.push_back(std::move(transfer));
  }
  waiting_.clear();
}

void DeviceTrace::EndBegun() {
  for (; begun_ < made_.size(); ++begun_) {
    const Transfer& transfer = made_[begun_];
    CheckCuda(cudaEventRecord(transfer.end, transfer.stream), "recording the end of a transfer");
  }
}

void DeviceTrace::TimeTransfers() {
  for (const Transfer& transfer : made_) {
    const std::int64_t begin_ns = TimeOf(transfer.begin);
    const std::int64_t end_ns = begin_ns ? TimeOf(transfer.end) : 0;
    for (TraceSlice* slice : transfer.slices) {
      slice->begin_ns = begin_ns;
      slice->end_ns = end_ns;
    }
  }
}

RankTrace DeviceTrace::Finish(cudaStream_t idle) {
  TimeTransfers();
  double rate = 1;
  std::int64_t error_ns = origin_.error_ns;
  if (complete_) {
    const Reading last = ReadClocks(idle);
    const auto host = static_cast<double>(last.host_ns - origin_.host_ns);
    const auto device = static_cast<double>(TimeOf(last.event) - origin_.host_ns);
    if (device > 0) rate = std::clamp(host / device, 1 - kMostDrift, 1 + kMostDrift);
    error_ns = std::max(error_ns, last.error_ns);
  }
  RankTrace trace = recorder_.Finish(!complete_);
  const auto on_host_clock = [&](std::int64_t ns) {
    return origin_.host_ns + std::llround(static_cast<double>(ns - origin_.host_ns) * rate);
  };
  for (TraceSlice& slice : trace.slices) {
    if (slice.kind == TraceSlice::Kind::kCall) continue;
    slice.begin_ns = on_host_clock(slice.begin_ns);
    slice.end_ns = on_host_clock(slice.end_ns);
  }
  trace.clock_error_us = static_cast<double>(error_ns) * 1e-3;
  return trace;
}

}  // namespace cppool::kernels::cuda
