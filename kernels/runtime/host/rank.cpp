#include "kernels/runtime/host/rank.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <thread>

#include "kernels/error.h"
#include "kernels/runtime.h"
#include "kernels/runtime/common/seam_table.h"

namespace cppool::kernels::host {
HostRank::HostRank(std::shared_ptr<HostWorld> world, int rank) : world_(std::move(world)), rank_(rank) {
  FillSeam(*this, "host", world_->size(), &seam_);
  seam_.transport = "host";
  seam_.device = -1;
  streams_.push_back(NewStream(0));
  streams_[0]->name = "main";
  seam_.stream = reinterpret_cast<cppool_stream>(streams_[0].get());
}

HostRank::~HostRank() {
  // The streams run their queued work before they end. A daemon whose work does not end exits without this
  // destructor.
  SynchronizeAll();
  ReleaseAll();
}

std::unique_ptr<HostStream> HostRank::NewStream(int number) {
  return std::make_unique<HostStream>("rank " + std::to_string(rank_) + " stream " + std::to_string(number),
                                      failure_, [this] { world_->wake_up(rank_).Notify(); });
}

// No deadline: the streams wait for other ranks, and the watchdog ends that with Abort.
void HostRank::SynchronizeAll() {
  for (auto& stream : streams_) stream->Synchronize();
  for (auto& stream : retired_) stream->Synchronize();
}

void HostRank::BeginCase() {
  SynchronizeAll();
  ReleaseAll();
  trace_.reset();
  world_->BeginCase(rank_);
}

void HostRank::BeginTrace(std::size_t limit) {
  trace_ = std::make_unique<TraceRecorder>(limit);
  trace_->NameStream(0, streams_[0]->name);
}

RankTrace HostRank::TakeTrace() {
  const auto trace = std::move(trace_);
  return trace ? trace->Finish(failure_.set()) : RankTrace{};
}

void HostRank::BeginIteration(int index) {
  iteration_ = index < 0 ? StageTally::kWarmUp : index;
  backlog_.Begin(++begun_);
  // Relaxed: it must not order the rank's thread after the stream's work.
  streams_[0]->Push(HostStream::Run::kAlways,
                    [this, number = begun_] { begun_on_main_.store(number, std::memory_order_relaxed); });
}

void HostRank::KeepUp() {
  const auto reached = [this](std::int64_t number) {
    return begun_on_main_.load(std::memory_order_relaxed) >= number;
  };
  while (backlog_.IsLong(reached, [](std::int64_t) {}))
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void HostRank::EndIterations() { iteration_ = StageTally::kOnce; }

StageSamples HostRank::Samples() {
  const auto last =
      std::find_if(marks_.rbegin(), marks_.rend(), [](const Mark& mark) { return mark.stream == 0; });
  if (last != marks_.rend() && last->stage) MarkStage(seam_.stream, nullptr);
  Synchronize(seam_.stream);
  return TallyMarks(TraceClockNs()).Samples();
}

void HostRank::Cancel(const std::string& why) {
  last_error_.Refuse(CPPOOL_CANCELLED, why);
  SynchronizeAll();
  failure_.Throw();
}

StageTimes HostRank::EndCase() {
  SynchronizeAll();
  for (const auto* left : {&buffers_, &host_buffers_, &freed_host_buffers_}) {
    for (const auto& [ptr, bytes] : *left) CheckGuards(ptr, bytes);
  }
  try {
    failure_.Throw();
  } catch (const RuntimeError&) {
    ReleaseMemory();  // the rest stays: Progress must still say where the streams stopped
    throw;
  }
  const std::int64_t now = TraceClockNs();
  if (trace_) trace_->EndStages(now);
  StageTimes times = TallyMarks(now).Times();
  ReleaseAll();
  return times;
}

// Makes the clean state. All work has run.
void HostRank::ReleaseAll() {
  grouped_.clear();
  group_depth_ = 0;
  iteration_ = StageTally::kOnce;
  begun_ = 0;
  begun_on_main_ = 0;
  backlog_.Clear([](std::int64_t) {});
  delays_ = {};
  next_stream_ = 1;
  last_error_.Clear();
  failure_.Clear();
  ReleaseMemory();
  for (HostEvent* event : events_) delete event;
  events_.clear();
  records_.clear();

  std::lock_guard lock(progress_mutex_);
  for (auto* over : {&streams_, &retired_}) {
    const auto first = over->begin() + (over == &streams_ ? 1 : 0);  // except for the main stream
    idle_.insert(idle_.end(), std::move_iterator(first), std::move_iterator(over->end()));
    over->erase(first, over->end());
  }
  streams_[0]->ForgetMarks();
  marks_.clear();
  marked_.clear();
  // The names stay for the next case. A case may use many of its own.
  if (stages_.size() > 4096) stages_.clear();
}

void HostRank::ReleaseMemory() {
  for (auto* left : {&buffers_, &host_buffers_, &freed_host_buffers_}) {
    for (const auto& [ptr, bytes] : *left) {
      FreeGuarded(ptr);
      CountReleased(bytes);
    }
    left->clear();
  }
  live_.store(0, std::memory_order_relaxed);
}

void HostRank::Trim() {
  // A waiting thread costs little and saves a start, but a case that had many must not leave them all.
  std::vector<std::unique_ptr<HostStream>> ended;  // destroyed outside of the lock: that waits
  {
    std::lock_guard lock(progress_mutex_);
    while (idle_.size() > kSpareThreads) {
      ended.push_back(std::move(idle_.back()));
      idle_.pop_back();
    }
  }
  // The heap is the process's, not the rank's: once is enough.
  if (rank_ == 0) malloc_trim(0);
}

MemoryInfo HostRank::Memory() const {
  MemoryInfo info;
  info.held_bytes = held_bytes_.load(std::memory_order_relaxed);
  info.live_allocations = live_.load(std::memory_order_relaxed);
  info.free_bytes = world_->memory().Free();  // all ranks share it
  return info;
}

LiveMemory HostRank::Live() const {
  LiveMemory live{buffers_.size() + host_buffers_.size()};
  for (const auto& [ptr, bytes] : buffers_) live.device_bytes += bytes;
  for (const auto& [ptr, bytes] : host_buffers_) live.host_bytes += bytes;
  return live;
}

std::set<int> HostRank::Threads() const {
  std::lock_guard lock(progress_mutex_);
  std::set<int> threads;
  for (const auto* streams : {&streams_, &retired_, &idle_})
    for (const auto& stream : *streams) threads.insert(stream->thread());
  return threads;
}

bool HostRank::Idle() const {
  std::lock_guard lock(progress_mutex_);
  const auto idle = [](const auto& stream) { return stream->Idle(); };
  return std::all_of(streams_.begin(), streams_.end(), idle) &&
         std::all_of(retired_.begin(), retired_.end(), idle);
}

// ---- memory

// Allocates memory that does not count as touched yet.
void* HostRank::Take(std::size_t bytes) {
  MemoryGate& memory = world_->memory();
  if (memory.Reserve(bytes)) {
    if (void* ptr = AllocateGuarded(bytes)) {
      live_.fetch_add(1, std::memory_order_relaxed);
      held_bytes_.fetch_add(bytes, std::memory_order_relaxed);
      return ptr;
    }
    memory.Touched(bytes);
  }
  throw RuntimeError(CPPOOL_OUT_OF_MEMORY, "an allocation of " + std::to_string(bytes) +
                                               " bytes does not fit: " + std::to_string(memory.Free()) +
                                               " are free");
}

// In pieces: memory of many gigabytes takes seconds, in which an aborted rank would not return, and the
// system counts each piece as used from here on. `untouched`: the memory gate still counts it.
void HostRank::Poison(void* ptr, std::size_t bytes, bool untouched) const noexcept {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    const std::size_t size = std::min(kPiece, bytes - at);
    if (!world_->aborted()) std::memset(static_cast<char*>(ptr) + at, kPoison, size);
    if (untouched) world_->memory().Touched(size);
  }
}

void* HostRank::Allocate(std::size_t bytes, cppool_stream stream) {
  const TraceRecorder::Call call(trace_.get(), "allocate");
  HostStream& at = At(stream);
  if (bytes == 0) return nullptr;
  void* ptr = Take(bytes);
  buffers_.emplace(ptr, bytes);
  // On the stream, so that another stream that uses the memory without a wait races with the fill.
  at.Push(HostStream::Run::kAlways, [this, ptr, bytes] { Poison(ptr, bytes, true); });
  return ptr;
}

void HostRank::Free(void* ptr, cppool_stream stream) {
  if (!ptr) return;
  HostStream& at = At(stream);
  const auto it = buffers_.find(ptr);
  if (it == buffers_.end())
    throw RuntimeError(CPPOOL_INTERNAL,
                       "free of memory that this rank has not allocated, or has already freed");
  const std::size_t bytes = it->second;
  buffers_.erase(it);
  live_.fetch_sub(1, std::memory_order_relaxed);
  at.Push(HostStream::Run::kAlways, [this, ptr, bytes] {
    CheckGuards(ptr, bytes);
    Poison(ptr, bytes, false);
    FreeGuarded(ptr);
    CountReleased(bytes);
  });
}

// Runs on any of the rank's threads. A write out of bounds becomes the rank's failure.
void HostRank::CheckGuards(const void* ptr, std::size_t bytes) noexcept {
  const std::string damage = DamageAround(ptr, bytes);
  if (damage.empty()) return;
  failure_.Record({CPPOOL_INTERNAL, "wrote out of bounds: " + damage + " of an allocation of " +
                                        std::to_string(bytes) + " bytes"});
  world_->wake_up(rank_).Notify();
}

void HostRank::CountReleased(std::size_t bytes) { held_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

void* HostRank::AllocateHost(std::size_t bytes) {
  const TraceRecorder::Call call(trace_.get(), "allocate");
  if (bytes == 0) return nullptr;
  void* ptr = Take(bytes);
  Poison(ptr, bytes, true);
  host_buffers_.emplace(ptr, bytes);
  return ptr;
}

void HostRank::FreeHost(void* ptr) {
  if (!ptr) return;
  const auto it = host_buffers_.find(ptr);
  if (it == host_buffers_.end())
    throw RuntimeError(CPPOOL_INTERNAL,
                       "free_host of memory that this rank has not allocated, or has already freed");
  live_.fetch_sub(1, std::memory_order_relaxed);
  // Released with the case: a case that fails may free memory that its streams still write to.
  freed_host_buffers_.insert(host_buffers_.extract(it));
}

void HostRank::Copy(void* to, const void* from, std::size_t bytes, cppool_stream stream) {
  HostStream& at = At(stream);
  if (bytes == 0) return;
  if (!to || !from)
    throw RuntimeError(CPPOOL_INTERNAL, std::string("copy of ") + std::to_string(bytes) + " bytes " +
                                            (to ? "from" : "to") + " NULL");
  at.Push(HostStream::Run::kUnlessFailed, [=] { std::memcpy(to, from, bytes); });
}

void HostRank::Fill(void* to, int byte, std::size_t bytes, cppool_stream stream) {
  HostStream& at = At(stream);
  if (bytes == 0) return;
  if (!to) throw RuntimeError(CPPOOL_INTERNAL, "fill of " + std::to_string(bytes) + " bytes at NULL");
  at.Push(HostStream::Run::kUnlessFailed, [=] { std::memset(to, byte, bytes); });
}

// ---- streams and events

HostStream& HostRank::At(cppool_stream stream) const {
  for (const auto& known : streams_) {
    if (reinterpret_cast<cppool_stream>(known.get()) == stream) return *known;
  }
  throw RuntimeError(CPPOOL_INTERNAL, "not a stream of this rank, or a destroyed one");
}

HostRank::HostEvent& HostRank::At(cppool_event event) const {
  auto* known = reinterpret_cast<HostEvent*>(event);
  if (!events_.count(known))
    throw RuntimeError(CPPOOL_INTERNAL, "not an event of this rank, or a destroyed one");
  return *known;
}

// A new stream on the thread of a stream that this case has destroyed would be queued behind that stream's
// work, which may wait for it. Even when that work is done, the thread would order the two streams though the
// program does not, and hide a missing wait. So such threads are used again only when a case has destroyed
// more streams than may stay, to limit their number; then the oldest one without work.
std::unique_ptr<HostStream> HostRank::SpareStream() {
  std::lock_guard lock(progress_mutex_);
  auto* from = &idle_;
  auto at = idle_.begin();
  if (idle_.empty() && retired_.size() > kSpareThreads) {
    from = &retired_;
    at = std::find_if(retired_.begin(), retired_.end(), [](const auto& stream) { return stream->Done(); });
  }
  if (at == from->end()) return nullptr;
  auto stream = std::move(*at);
  from->erase(at);
  ProcessorFence();  // Done() has not ordered the last writes of the stream's thread
  stream->ForgetMarks();
  return stream;
}

cppool_stream HostRank::CreateStream() {
  auto stream = SpareStream();
  if (!stream) stream = NewStream(++streams_made_);
  std::lock_guard lock(progress_mutex_);
  stream->index = next_stream_++;
  stream->name = "stream " + std::to_string(stream->index);
  if (trace_) trace_->NameStream(stream->index, stream->name);
  streams_.push_back(std::move(stream));
  return reinterpret_cast<cppool_stream>(streams_.back().get());
}

void HostRank::DestroyStream(cppool_stream stream) {
  HostStream& at = At(stream);
  if (&at == streams_[0].get()) throw RuntimeError(CPPOOL_INTERNAL, "the main stream belongs to the runtime");
  // Neither waits for the work nor joins the thread: that would order this stream's work before all later
  // work of the rank.
  std::lock_guard lock(progress_mutex_);
  const auto it =
      std::find_if(streams_.begin(), streams_.end(), [&](const auto& known) { return known.get() == &at; });
  retired_.push_back(std::move(*it));
  streams_.erase(it);
}

void HostRank::Synchronize(cppool_stream stream) {
  const TraceRecorder::Call call(trace_.get(), "synchronize");
  At(stream).Synchronize();
  failure_.Throw();
}

cppool_event HostRank::CreateEvent() {
  return reinterpret_cast<cppool_event>(*events_.insert(new HostEvent).first);
}

void HostRank::DestroyEvent(cppool_event event) {
  HostEvent& at = At(event);
  events_.erase(&at);
  delete &at;  // its records stay: streams may wait for them
}

void HostRank::Record(cppool_event event, cppool_stream stream) {
  HostStream& at = At(stream);
  EventRecord* record = &records_.emplace_back(at.index);
  At(event).latest = record;
  at.Push(HostStream::Run::kAlways, [record] { record->Open(); });
}

void HostRank::WaitFor(cppool_stream stream, cppool_event event) {
  HostStream& at = At(stream);
  EventRecord* record = At(event).latest;
  if (!record) return;
  at.Push(HostStream::Run::kAlways, [&at, record] {
    at.waits.SetStream(record->stream);
    record->Wait();
    at.waits.ClearStream();
  });
}

void HostRank::Enqueue(cppool_stream stream, std::function<void()> work) {
  At(stream).Push(HostStream::Run::kUnlessFailed, std::move(work));
}

// ---- faults

void HostRank::Break(DeviceFault fault, void* byte, cppool_stream stream) {
  switch (fault) {
    case DeviceFault::kStall:
      Enqueue(stream, [] {  // does not end: the daemon's watchdog ends the process at the deadline
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
      });
      break;
    case DeviceFault::kTrap:
      Enqueue(stream, [] { std::raise(SIGTRAP); });
      break;
    case DeviceFault::kOutOfBounds: {
      constexpr std::size_t kBytes = 4096;
      auto* const memory = static_cast<std::byte*>(Allocate(kBytes, stream));
      Enqueue(stream, [memory] { std::memset(memory + kBytes, 0, sizeof(double)); });
      Free(memory, stream);
      break;
    }
    case DeviceFault::kFlipBit:
      Enqueue(stream, [at = static_cast<unsigned char*>(byte)] { *at ^= 0x40; });
      break;
  }
}

// ---- stages

void HostRank::MarkStage(cppool_stream stream, const char* stage) {
  HostStream& at = At(stream);
  const std::string* text = nullptr;
  if (stage) {
    const auto known = stages_.find(std::string_view(stage));
    text = known == stages_.end() ? nullptr : &*known;
  }
  if (stage) marked_ = stage;
  TraceRecorder::Change traced;
  if (trace_) {
    trace_->MarkCalls(stream, stage, iteration_);
    traced = trace_->MarkStage(at.index, stage, iteration_);
  }
  Mark* mark = nullptr;
  {
    std::lock_guard lock(progress_mutex_);
    if (stage && !text) text = &*stages_.emplace(stage).first;
    mark = &marks_.emplace_back(text, at.index, iteration_, traced);
  }
  at.marks_pushed.store(at.marks_pushed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  // After a failure the marks stay at the point where the work stopped.
  at.Push(HostStream::Run::kUnlessFailed, [&at, mark] {
    const std::int64_t now = TraceClockNs();
    mark->reached_ns.store(now, std::memory_order_relaxed);
    if (mark->traced.ended) mark->traced.ended->end_ns = now;
    if (mark->traced.begun) mark->traced.begun->begin_ns = now;
    if (mark->stage) at.last_stage.store(mark, std::memory_order_relaxed);
    at.in_stage.store(mark->stage != nullptr, std::memory_order_relaxed);
    at.marks_reached.store(at.marks_reached.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  });
  const auto delay = delays_.Next();
  if (delay.count() > 0)
    at.Push(HostStream::Run::kUnlessFailed, [delay] { std::this_thread::sleep_for(delay); });
}

StageTally HostRank::TallyMarks(std::int64_t now) const {
  // Backwards, so that each mark knows the next one of its stream: a stage lasts from one mark to the next.
  std::vector<std::int64_t> end(marks_.size());
  std::unordered_map<int, std::int64_t> next;
  for (std::size_t i = marks_.size(); i-- > 0;) {
    const auto later = next.find(marks_[i].stream);
    end[i] = later == next.end() ? now : later->second;
    next[marks_[i].stream] = marks_[i].reached_ns.load(std::memory_order_relaxed);
  }
  StageTally tally;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    const Mark& mark = marks_[i];
    if (!mark.stage || mark.iteration == StageTally::kWarmUp) continue;
    const double ms = static_cast<double>(end[i] - mark.reached_ns.load(std::memory_order_relaxed)) * 1e-6;
    tally.Add(mark.iteration, *mark.stage, mark.stream == 0, ms);
  }
  return tally;
}

// With the progress lock held. A destroyed stream may have work that others wait for.
std::string HostRank::NameOfStream(int index) const {
  for (const auto* streams : {&streams_, &retired_}) {
    for (const auto& stream : *streams) {
      if (stream->index == index) return stream->name;
    }
  }
  return "";
}

std::optional<std::string> HostRank::FailedInStage() const {
  if (failure_.set()) return std::nullopt;
  return marked_;
}

std::vector<StreamProgress> HostRank::Progress() const {
  std::lock_guard lock(progress_mutex_);
  std::vector<StreamProgress> all;
  for (const auto& stream : streams_) {
    StreamProgress progress;
    progress.stream = stream->name;
    const Mark* mark = stream->last_stage.load(std::memory_order_relaxed);
    if (mark) {
      progress.stage = *mark->stage;
      const std::int64_t since = mark->reached_ns.load(std::memory_order_relaxed);
      if (since) progress.seconds = static_cast<double>(TraceClockNs() - since) * 1e-9;
    }
    progress.thread = stream->thread();
    stream->waits.Describe(progress);
    progress.behind = NameOfStream(stream->waits.stream());
    const bool done = stream->Idle();
    const bool in_stage = stream->in_stage.load(std::memory_order_relaxed) ||
                          stream->marks_reached.load(std::memory_order_relaxed) !=
                              stream->marks_pushed.load(std::memory_order_relaxed);
    if (done && in_stage) progress.doing = "with no work left";
    progress.idle = done && !in_stage;
    all.push_back(std::move(progress));
  }
  if (auto wait = world_->meeting().WaitOf(rank_)) {  // the rank's thread: the main stream stands for it
    all[0].doing = std::move(wait->doing);
    all[0].awaits = std::move(wait->awaits);
    all[0].idle = false;
  }
  return all;
}

}  // namespace cppool::kernels::host

namespace cppool::kernels {

void Enqueue(cppool_runtime* rt, cppool_stream stream, std::function<void()> work) {
  if (std::string_view(rt->backend) != "host")
    throw RuntimeError(CPPOOL_INTERNAL, "Enqueue needs the host backend");
  static_cast<host::HostRank&>(RuntimeOf(rt)).Enqueue(stream, std::move(work));
}

}  // namespace cppool::kernels
