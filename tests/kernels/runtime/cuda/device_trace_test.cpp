// Tests of the traces of devices, with events of a made-up device whose clock counts from elsewhere and
// faster.
#include "kernels/runtime/cuda/device_trace.h"

#include <chrono>
#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"

namespace {

using namespace cppool::kernels;
using cppool::kernels::cuda::DeviceTrace;

constexpr double kDrift = 9e-5;            // of the device's clock against the host's
constexpr std::int64_t kResolution = 500;  // ns, of an event

struct FakeEvent {
  std::int64_t device_ns = 0;  // 0: not recorded
  int queries = 0;             // until it is seen to have happened
};
int events = 0;     // that there are
int recorded = 0;   // calls of cudaEventRecord
bool lost = false;  // the device

FakeEvent& At(cudaEvent_t event) { return *reinterpret_cast<FakeEvent*>(event); }
cudaStream_t StreamOf(std::uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

std::vector<const TraceSlice*> Find(const RankTrace& trace, const std::string& name) {
  std::vector<const TraceSlice*> found;
  for (const TraceSlice& slice : trace.slices) {
    if (trace.names[static_cast<std::size_t>(slice.name)] == name) found.push_back(&slice);
  }
  return found;
}

// What the host's clock says around something.
struct Around {
  std::int64_t before = 0, after = 0;
};
template <typename Function>
Around Timed(Function&& function) {
  Around around;
  around.before = TraceClockNs();
  function();
  around.after = TraceClockNs();
  return around;
}

void CheckLies(const RankTrace& trace, std::int64_t ns, const Around& around) {
  const auto off = static_cast<std::int64_t>(trace.clock_error_us * 1e3) + 4 * kResolution;
  INFO("off by at most " << off << " ns");
  CHECK(ns >= around.before - off);
  CHECK(ns <= around.after + off);
}

struct Fresh {
  Fresh() { recorded = 0, lost = false; }
  ~Fresh() { CHECK(events == 0); }  // all are destroyed
};

}  // namespace

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CHECK(flags == cudaEventDefault);  // with timing
  *event = reinterpret_cast<cudaEvent_t>(new FakeEvent);
  return ++events, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &At(event);
  return --events, cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  static const std::int64_t base = TraceClockNs();
  const auto since = static_cast<double>(TraceClockNs() - base);
  At(event) = {7'000'000'000'000 + std::llround(since * (1 + kDrift)) / kResolution * kResolution, 2};
  return ++recorded, cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return At(event).queries-- > 0 ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  if (lost || At(from).device_ns == 0 || At(to).device_ns == 0) return cudaErrorInvalidResourceHandle;
  *milliseconds = static_cast<float>(static_cast<double>(At(to).device_ns - At(from).device_ns) * 1e-6);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made up"; }
const char* cudaGetErrorName(cudaError_t) { return "made up"; }

}  // extern "C"

TEST_CASE("device trace: times are on the host's clock, at both ends of a run, as exact as it says") {
  const Fresh fresh;
  RankTrace trace;
  Around begin, end, call;
  {
    DeviceTrace device(100, StreamOf(1));
    device.recorder().NameStream(0, "main");
    cudaEvent_t marks[2] = {};
    for (cudaEvent_t& mark : marks) cudaEventCreateWithFlags(&mark, cudaEventDefault);
    CHECK_FALSE(device.AddStage(0, "stage", 0, marks[0], marks[1]));  // not recorded yet
    begin = Timed([&] { cudaEventRecord(marks[0], StreamOf(1)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the clocks are 27 us apart then
    end = Timed([&] { cudaEventRecord(marks[1], StreamOf(1)); });
    CHECK(device.AddStage(0, "stage", 0, marks[0], marks[1]));
    call = Timed([&] {
      device.BeginCall(StreamOf(1), device.recorder().Add(TraceSlice::Kind::kTransfer, 0, "send", 0));
      device.EndCall();
      const TraceRecorder::Call wait(&device.recorder(), "synchronize");
    });
    device.SetComplete();
    trace = device.Finish(StreamOf(1));
    for (cudaEvent_t mark : marks) cudaEventDestroy(mark);
  }
  REQUIRE(trace.slices.size() == 3);
  CHECK(trace.dropped == 0);
  CheckLies(trace, Find(trace, "stage").at(0)->begin_ns, begin);
  CheckLies(trace, Find(trace, "stage").at(0)->end_ns, end);
  for (const char* name : {"send", "synchronize"}) {
    CheckLies(trace, Find(trace, name).at(0)->begin_ns, call);
    CheckLies(trace, Find(trace, name).at(0)->end_ns, call);
  }
}

TEST_CASE("device trace: the calls of a group are one piece of work on each stream, made when it ends") {
  const Fresh fresh;
  DeviceTrace device(100, StreamOf(1));
  const auto begin = [&](std::uintptr_t stream, const char* name) {
    device.BeginCall(StreamOf(stream), device.recorder().Add(TraceSlice::Kind::kTransfer, 0, name, 0));
    device.EndCall();
  };
  recorded = 0;
  begin(1, "alone");
  CHECK(recorded == 2);
  device.GroupStart();
  device.GroupStart();
  begin(1, "first");
  begin(1, "second");
  begin(2, "other");
  device.BeginGroupEnd();
  device.EndGroupEnd();  // of the inner one
  CHECK(recorded == 2);
  const Around calls = Timed([&] {
    device.BeginGroupEnd();
    CHECK(recorded == 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    device.EndGroupEnd();
  });
  CHECK(recorded == 6);
  begin(2, "later");
  CHECK(recorded == 8);
  device.SetComplete();
  const RankTrace trace = device.Finish(StreamOf(1));
  REQUIRE(trace.slices.size() == 5);
  const TraceSlice &first = *Find(trace, "first").at(0), &second = *Find(trace, "second").at(0);
  CHECK((first.begin_ns == second.begin_ns && first.end_ns == second.end_ns));
  CHECK(first.end_ns - first.begin_ns > 900'000);
  CHECK(Find(trace, "other").at(0)->begin_ns >= first.begin_ns);
  CheckLies(trace, first.begin_ns, calls);
  CheckLies(trace, first.end_ns, calls);
  CHECK(Find(trace, "alone").at(0)->end_ns <= first.begin_ns);
  CHECK(Find(trace, "later").at(0)->begin_ns >= first.end_ns);
}

TEST_CASE("device trace: transfers without an event, and slices without room, are counted") {
  const Fresh fresh;
  DeviceTrace device(10'000, StreamOf(1));
  constexpr std::size_t kCalls = DeviceTrace::kMostTransfers + 3;
  for (std::size_t i = 0; i < kCalls; ++i) {
    device.BeginCall(StreamOf(1), device.recorder().Add(TraceSlice::Kind::kTransfer, 0, "send", 0));
    device.EndCall();
  }
  device.SetComplete();
  const RankTrace trace = device.Finish(StreamOf(1));
  CHECK(trace.slices.size() == DeviceTrace::kMostTransfers);
  CHECK(trace.dropped == 3);

  DeviceTrace small(2, StreamOf(1));
  for (int i = 0; i < 5; ++i) {
    small.BeginCall(StreamOf(1), small.recorder().Add(TraceSlice::Kind::kTransfer, 0, "send", 0));
    small.EndCall();
  }
  small.SetComplete();
  const RankTrace limited = small.Finish(StreamOf(1));
  CHECK(limited.slices.size() == 2);
  CHECK(limited.dropped == 3);
}

TEST_CASE("device trace: after a failure it has what is known, and asks the device for nothing more") {
  const Fresh fresh;
  for (const bool device_lost : {false, true}) {
    lost = false;
    DeviceTrace device(100, StreamOf(1));
    device.BeginCall(StreamOf(1), device.recorder().Add(TraceSlice::Kind::kTransfer, 0, "done", 0));
    device.EndCall();
    device.BeginCall(StreamOf(1), device.recorder().Add(TraceSlice::Kind::kTransfer, 0, "begun", 0));
    device.GroupStart();  // which fails: it has no end
    device.BeginCall(StreamOf(1), device.recorder().Add(TraceSlice::Kind::kTransfer, 0, "waits", 0));
    recorded = 0;
    lost = device_lost;
    const RankTrace trace = device.Finish(StreamOf(1));
    CHECK(recorded == 0);
    CHECK(trace.slices.size() == (device_lost ? 0 : 2));
    if (device_lost) continue;
    CHECK_FALSE(Find(trace, "done").at(0)->unfinished);
    CHECK(Find(trace, "begun").at(0)->unfinished);
    CHECK(Find(trace, "waits").empty());
  }
}
