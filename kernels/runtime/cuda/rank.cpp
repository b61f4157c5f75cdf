#include "kernels/runtime/cuda/rank.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "kernels/runtime.h"
#include "kernels/runtime/common/seam_table.h"
#include "kernels/runtime/common/stage_tally.h"
#include "kernels/runtime/cuda/device_faults.h"
#include "kernels/signal_stack.h"

namespace cppool::kernels::cuda {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kHostSlabBytes = std::size_t{4} << 20;
constexpr int kStreamsAtStart = 4;
constexpr int kEventsAtStart = 32;
constexpr auto kSpinFor = 200us;
constexpr auto kPollEvery = 20us;
constexpr auto kCheckHealthEvery = 5ms;
constexpr auto kWaitForMemory = 5s;
constexpr auto kTryMemoryEvery = 50ms;

// A process that has just ended, such as an agent's of a world before, may hold the device's memory a moment
// longer.
cudaError_t MakeContext(int device) {
  const auto deadline = Clock::now() + kWaitForMemory;
  while (true) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaFree(nullptr);
    if (error != cudaErrorMemoryAllocation || Clock::now() >= deadline) return error;
    cudaGetLastError();
    std::this_thread::sleep_for(kTryMemoryEvery);
  }
}

// Called before the members are made: they need the context.
int OpenDevice(int device) {
  CheckCuda(MakeContext(device), ("making a context on device " + std::to_string(device)).c_str());
  // 1 us: this thread's short sleeps are part of every case's time.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  return device;
}

}  // namespace

struct CudaRank::HostCall {
  void (*function)(void*);
  void* argument;
  std::shared_ptr<HostFailure> failure;
};

CudaRank::CudaRank(std::shared_ptr<CommWorld> world, int rank)
    : world_(std::move(world)),
      rank_(rank),
      device_(OpenDevice(world_->device(rank))),
      pool_(world_->OpenPool(rank)),
      host_heap_(kHostSlabBytes),
      marks_(&host_heap_),
      ranges_(rank),
      iteration_(StageTally::kOnce),
      host_failure_(std::make_shared<HostFailure>()) {
  for (int i = 0; i < kStreamsAtStart; ++i) AddStream();
  streams_.front().handed_out = streams_.front().used = true;
  for (int i = 0; i < kEventsAtStart; ++i) {
    cudaEvent_t event = nullptr;
    CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    spare_events_.push_back(event);
  }
  marks_.Announce(main_stream(), "main", true);
  ranges_.Name(main_stream(), "main");
  FillSeam(*this, "cuda", world_->size(), &table_);
  table_.transport = world_->transport();
  table_.device = device_;
  table_.stream = reinterpret_cast<cppool_stream>(main_stream());
}

CudaRank::~CudaRank() {
  if (!world_->aborted()) cudaDeviceSynchronize();  // without an abort no work is stuck
  world_->Leave(rank_);
  for (const auto& [pointer, bytes] : allocations_) cudaFreeAsync(pointer, main_stream());
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  for (cudaEvent_t event : retired_events_) cudaEventDestroy(event);
  backlog_.Clear([](cudaEvent_t event) { cudaEventDestroy(event); });
  for (cudaEvent_t event : spare_events_) cudaEventDestroy(event);
  for (const OwnedStream& owned : streams_) cudaStreamDestroy(owned.stream);
}

cudaError_t CudaRank::State() const {
  cudaError_t state = cudaSuccess;
  for (const OwnedStream& owned : streams_) {
    if (!owned.used) continue;
    const cudaError_t one = cudaStreamQuery(owned.stream);
    if (one == cudaSuccess) continue;
    cudaGetLastError();
    state = one;
    if (one != cudaErrorNotReady) break;
  }
  return state;
}

DeviceInfo CudaRank::Device() const {
  cudaDeviceProp props{};
  CheckCuda(cudaGetDeviceProperties(&props, device_), "asking for the device's properties");
  DeviceInfo info;
  info.name = props.name;
  info.ordinal = device_;
  info.capability = std::to_string(props.major) + "." + std::to_string(props.minor);
  info.total_bytes = props.totalGlobalMem;
  info.uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(props.uuid.bytes[i])));
    if (i == 4 || i == 6 || i == 8 || i == 10) info.uuid += '-';
    info.uuid += hex;
  }
  return info;
}

void CudaRank::BeginCase() {
  world_->ThrowIfAborted();
  CheckCuda(cudaSetDevice(device_), "choosing the rank's device");
  // Clears what an earlier case left on this thread; an error of the context comes back from the next call.
  cudaGetLastError();
  WaitForStreams();
  ReleaseLeftovers();
  marks_.TraceTo(nullptr);
  trace_.reset();
  world_->BeginCase(rank_);
  host_failure_ = std::make_shared<HostFailure>();
  last_error_.Clear();
}

void CudaRank::BeginTrace(std::size_t limit) {
  trace_ = std::make_unique<DeviceTrace>(limit, main_stream());
  marks_.TraceTo(trace_.get());
}

RankTrace CudaRank::TakeTrace() {
  if (!trace_) return {};
  marks_.TraceEnded();
  marks_.TraceTo(nullptr);
  return std::exchange(trace_, nullptr)->Finish(main_stream());
}

void CudaRank::BeginIteration(int index) {
  iteration_ = index < 0 ? StageTally::kWarmUp : index;
  const cudaEvent_t event = TakeEvent();
  backlog_.Begin(event);
  CheckCuda(cudaEventRecord(event, main_stream()), "recording an event");
}

void CudaRank::KeepUp() {
  const auto reached = [](cudaEvent_t event) {
    const cudaError_t state = cudaEventQuery(event);
    if (state == cudaSuccess) return true;
    cudaGetLastError();  // CUDA keeps "not ready" as an error
    if (state != cudaErrorNotReady) CheckCuda(state, "the work of an iteration");
    return false;
  };
  while (backlog_.IsLong(reached, [this](cudaEvent_t event) { spare_events_.push_back(event); })) {
    world_->ThrowIfAborted();
    std::this_thread::sleep_for(kPollEvery);
  }
}

void CudaRank::EndIterations() { iteration_ = StageTally::kOnce; }

StageSamples CudaRank::Samples() {
  marks_.Close(main_stream(), iteration_);
  ranges_.Enter(main_stream(), nullptr);
  WaitFor(main_stream());
  ThrowHostFailure();
  return marks_.Samples(main_stream());
}

void CudaRank::Cancel(const std::string& why) {
  last_error_.Refuse(CPPOOL_CANCELLED, why);
  WaitForStreams();
  ThrowHostFailure();
}

StageTimes CudaRank::EndCase() {
  CheckCuda(cudaSetDevice(device_), "choosing the rank's device");
  for (const OwnedStream& owned : streams_) {
    if (owned.handed_out) marks_.Close(owned.stream, StageTally::kOnce);
  }
  ranges_.LeaveAll();
  WaitForStreams();
  // Covers streams that the case has made itself. No deadline here: the daemon's watchdog has one.
  CheckCuda(cudaDeviceSynchronize(), "waiting for the case's work");
  world_->CheckHealth(rank_);
  StageTimes times = marks_.Collect();
  cudaGetLastError();
  world_->CheckCase(rank_);
  ThrowHostFailure();
  ReleaseLeftovers();
  if (trace_) trace_->SetComplete();
  return times;
}

void CudaRank::ReleaseLeftovers() {
  for (const auto& [pointer, bytes] : allocations_)
    CheckCuda(cudaFreeAsync(pointer, main_stream()), "freeing what a case left");
  allocations_.clear();
  for (const auto& [pointer, bytes] : host_allocations_) host_heap_.Free(pointer);
  host_allocations_.clear();
  live_allocations_ = 0;
  for (OwnedStream& owned : streams_) owned.handed_out = owned.used = false;
  streams_.front().handed_out = streams_.front().used = true;
  for (cudaEvent_t event : events_) spare_events_.push_back(event);
  events_.clear();
  spare_events_.insert(spare_events_.end(), retired_events_.begin(), retired_events_.end());
  retired_events_.clear();
  backlog_.Clear([this](cudaEvent_t event) { spare_events_.push_back(event); });
  iteration_ = StageTally::kOnce;
  delays_ = {};
  marks_.Reset();
  ranges_.LeaveAll();
  marked_.clear();
  recorded_.clear();
  marks_.Announce(main_stream(), "main", true);
}

void CudaRank::Trim() {
  // After the caller's barrier no work is pending.
  CheckCuda(cudaDeviceSynchronize(), "waiting for the device before trimming");
  pool_->Trim();
}

MemoryInfo CudaRank::Memory() const {
  int device_before = 0;
  CheckCuda(cudaGetDevice(&device_before), "asking for the thread's device");
  if (device_before != device_) CheckCuda(cudaSetDevice(device_), "choosing the rank's device");
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  const cudaError_t result = cudaMemGetInfo(&free_bytes, &total_bytes);
  if (device_before != device_) cudaSetDevice(device_before);
  CheckCuda(result, "asking for the device's free memory");
  MemoryInfo info;
  info.held_bytes = pool_->HeldBytes();
  info.free_bytes = free_bytes + pool_->UnusedBytes();
  info.live_allocations = live_allocations_;
  return info;
}

LiveMemory CudaRank::Live() const {
  LiveMemory live{allocations_.size() + host_allocations_.size()};
  for (const auto& [pointer, bytes] : allocations_) live.device_bytes += bytes;
  for (const auto& [pointer, bytes] : host_allocations_) live.host_bytes += bytes;
  return live;
}

bool CudaRank::HasRoom(double bytes) const {
  // The pool's unused memory may lie in pieces: half of it is enough without asking the device.
  return bytes <= static_cast<double>(pool_->UnusedBytes()) / 2 ||
         bytes <= static_cast<double>(Memory().free_bytes);
}

void* CudaRank::Allocate(std::size_t bytes, cudaStream_t stream) {
  const TraceRecorder::Call call(Recorder(), "allocate");
  if (bytes == 0) return nullptr;
  void* pointer = nullptr;
  const cudaError_t result = pool_->Allocate(&pointer, bytes, stream);
  if (result == cudaErrorMemoryAllocation) {
    const MemoryInfo memory = Memory();
    throw RuntimeError(CPPOOL_OUT_OF_MEMORY,
                       "allocating " + std::to_string(bytes) + " bytes on device " + std::to_string(device_) +
                           ": " + std::to_string(memory.free_bytes) + " bytes are free, " +
                           std::to_string(memory.held_bytes) + " are held by this process");
  }
  CheckCuda(result, ("allocating " + std::to_string(bytes) + " bytes").c_str());
  allocations_[pointer] = bytes;
  ++live_allocations_;
  return pointer;
}

void CudaRank::Free(void* pointer, cudaStream_t stream) {
  if (!pointer) return;
  if (allocations_.erase(pointer) == 0)
    throw RuntimeError(CPPOOL_INTERNAL, "free of a pointer that alloc did not return on this rank");
  --live_allocations_;
  CheckCuda(cudaFreeAsync(pointer, stream), "freeing device memory");
}

void* CudaRank::AllocateHost(std::size_t bytes) {
  const TraceRecorder::Call call(Recorder(), "allocate");
  if (bytes == 0) return nullptr;
  void* const pointer = host_heap_.Allocate(bytes);
  host_allocations_[pointer] = bytes;
  ++live_allocations_;
  return pointer;
}

void CudaRank::FreeHost(void* pointer) {
  if (!pointer) return;
  if (host_allocations_.erase(pointer) == 0) {
    throw RuntimeError(CPPOOL_INTERNAL, "free_host of a pointer that alloc_host did not return on this rank");
  }
  --live_allocations_;
  host_heap_.Free(pointer);
}

void CudaRank::Copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes) CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying");
}

void CudaRank::Fill(void* to, int byte, std::size_t bytes, cudaStream_t stream) {
  if (bytes) CheckCuda(cudaMemsetAsync(to, byte, bytes, stream), "filling");
}

void CudaRank::AddStream() {
  cudaStream_t stream = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  streams_.push_back({stream, false, false});
}

cudaStream_t CudaRank::CreateStream() {
  std::size_t i = 1;
  for (; i < streams_.size(); ++i) {
    if (streams_[i].handed_out) continue;
    // Destroyed in this case with work pending: a new user would wait for that work.
    if (!streams_[i].used || cudaStreamQuery(streams_[i].stream) == cudaSuccess) break;
    cudaGetLastError();
  }
  if (i == streams_.size()) AddStream();
  streams_[i].handed_out = streams_[i].used = true;
  marks_.Announce(streams_[i].stream, "stream " + std::to_string(i), false);
  ranges_.Name(streams_[i].stream, "stream " + std::to_string(i));
  return streams_[i].stream;
}

void CudaRank::DestroyStream(cudaStream_t stream) {
  const auto owned = std::find_if(streams_.begin() + 1, streams_.end(), [&](const OwnedStream& one) {
    return one.handed_out && one.stream == stream;
  });
  if (owned == streams_.end())
    throw RuntimeError(CPPOOL_INTERNAL, "stream_destroy of a stream that stream_create did not return");
  marks_.Close(stream, iteration_);
  ranges_.Enter(stream, nullptr);
  owned->handed_out = false;
}

cudaEvent_t CudaRank::TakeEvent() {
  cudaEvent_t event = nullptr;
  if (!spare_events_.empty()) {
    event = spare_events_.back();
    spare_events_.pop_back();
  } else if (!retired_events_.empty() && cudaEventQuery(retired_events_.front()) == cudaSuccess) {
    event = retired_events_.front();
    retired_events_.pop_front();
  } else {
    cudaGetLastError();
    CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  }
  return event;
}

cudaEvent_t CudaRank::CreateEvent() { return *events_.insert(TakeEvent()).first; }

void CudaRank::DestroyEvent(cudaEvent_t event) {
  if (events_.erase(event) == 0)
    throw RuntimeError(CPPOOL_INTERNAL, "event_destroy of an event that event_create did not return");
  recorded_.erase(event);
  // Its last record may be pending, and a wait for a new event must not wait.
  retired_events_.push_back(event);
}

void CudaRank::Record(cudaEvent_t event, cudaStream_t stream) {
  CheckCuda(cudaEventRecord(event, stream), "recording an event");
  recorded_[event] = marks_.Here(stream);
}

void CudaRank::WaitFor(cudaStream_t stream, cudaEvent_t event) {
  CheckCuda(cudaStreamWaitEvent(stream, event, 0), "waiting for an event");
  const auto recorded = recorded_.find(event);
  if (recorded != recorded_.end()) marks_.NoteWait(stream, recorded->second);
}

void CudaRank::RunHostCall(void* call) noexcept {
  static thread_local const SignalStack signal_stack;  // of the driver's thread
  const std::unique_ptr<HostCall> owned(static_cast<HostCall*>(call));
  std::string failure;
  try {
    owned->function(owned->argument);
    return;
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "an exception that is not a std::exception";
  }
  const std::lock_guard lock(owned->failure->mutex);
  if (owned->failure->text.empty()) owned->failure->text = "a host function failed: " + failure;
}

void CudaRank::Enqueue(cudaStream_t stream, void (*function)(void*), void* argument) {
  auto call = std::make_unique<HostCall>(HostCall{function, argument, host_failure_});
  CheckCuda(cudaLaunchHostFunc(stream, &CudaRank::RunHostCall, call.get()), "enqueuing a host function");
  call.release();  // RunHostCall owns it
}

void CudaRank::ThrowHostFailure() {
  const std::lock_guard lock(host_failure_->mutex);
  if (host_failure_->text.empty()) return;
  const std::string text = std::exchange(host_failure_->text, {});
  throw RuntimeError(CPPOOL_INTERNAL, text);
}

void CudaRank::WaitFor(cudaStream_t stream) {
  const auto start = Clock::now();
  auto health_checked = start;
  bool waited = false;
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) break;
    if (state != cudaErrorNotReady) CheckCuda(state, "the work of a stream");
    waited = true;
    world_->ThrowIfAborted();
    const auto now = Clock::now();
    if (now - start < kSpinFor) continue;
    marks_.Read();
    if (now - health_checked > kCheckHealthEvery) {
      world_->CheckHealth(rank_);
      health_checked = now;
    }
    std::this_thread::sleep_for(kPollEvery);
  }
  if (waited) cudaGetLastError();  // CUDA keeps "not ready" as an error
  world_->ThrowIfAborted();        // aborted collectives also end
}

void CudaRank::WaitForStreams() {
  for (const OwnedStream& owned : streams_) {
    if (owned.used) WaitFor(owned.stream);
  }
}

void CudaRank::Synchronize(cudaStream_t stream) {
  const TraceRecorder::Call call(Recorder(), "synchronize");
  WaitFor(stream);
  marks_.Settle(stream);
  ThrowHostFailure();
}

void CudaRank::MarkStage(cudaStream_t stream, const char* stage) {
  if (trace_) trace_->recorder().MarkCalls(reinterpret_cast<cppool_stream>(stream), stage, iteration_);
  marks_.Mark(stream, stage, iteration_);
  ranges_.Enter(stream, stage);
  if (stage) marked_ = stage;
  const auto delay = delays_.Next();
  if (delay.count() > 0) HoldStream(stream, delay);
}

void CudaRank::Break(DeviceFault fault, void* byte, cppool_stream stream) {
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  if (fault != DeviceFault::kOutOfBounds) return BreakDevice(fault, byte, on);
  void* const memory = Allocate(4096, on);
  BreakDevice(fault, memory, on);
  Free(memory, on);
}

std::optional<std::string> CudaRank::FailedInStage() const {
  const cudaError_t state = State();
  if (state != cudaSuccess && state != cudaErrorNotReady) return std::nullopt;
  return marked_;
}

std::vector<StreamProgress> CudaRank::Progress() const {
  std::vector<cudaStream_t> streams;
  std::vector<StreamProgress> progress = marks_.Progress(&streams);
  if (auto wait = world_->WaitingForGroup(rank_);
      wait && !progress.empty()) {  // the rank's thread: the main stream stands for it
    StreamProgress& main = progress.front();
    main.doing = std::move(wait->doing);
    main.awaits = std::move(wait->awaits);
    main.idle = false;
  }
  // The rank's thread waits in these calls: their stream has at most earlier work.
  std::unordered_set<cudaStream_t> held;
  for (const WaitingCall& call : world_->Waiting(rank_)) {
    const auto at = std::find(streams.begin(), streams.end(), call.stream);
    if (at == streams.end()) continue;
    StreamProgress& stream = progress[static_cast<std::size_t>(at - streams.begin())];
    stream.doing = held.insert(call.stream).second ? call.doing : stream.doing + " and " + call.doing;
    stream.awaits.insert(stream.awaits.end(), call.awaits.begin(), call.awaits.end());
    stream.behind.clear();  // a wait that comes after it, as behind a kernel under ring transfers
    stream.idle = false;
  }
  return progress;
}

}  // namespace cppool::kernels::cuda
