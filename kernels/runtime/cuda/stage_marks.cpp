#include "kernels/runtime/cuda/stage_marks.h"

#include <algorithm>
#include <cstring>

#include "kernels/runtime/common/stage_tally.h"
#include "kernels/runtime/cuda/check.h"
#include "kernels/runtime/cuda/stream_write.h"

namespace cppool::kernels::cuda {
namespace {

constexpr std::size_t kMaxStreams = 1024;
constexpr std::size_t kWordBytes = 64;    // a cache line each, so that streams do not share one
constexpr std::size_t kSettleFrom = 512;  // marks of a stream
constexpr std::size_t kEventsAtStart = 64;

}  // namespace

StageMarks::StageMarks(PageLockedHeap* heap)
    : heap_(heap), words_(static_cast<std::byte*>(heap->Allocate(kMaxStreams * kWordBytes))) {
  std::memset(words_, 0, kMaxStreams * kWordBytes);
  LoadWriteWord();
  for (std::size_t i = 0; i < kEventsAtStart; ++i) spare_events_.push_back(NewTimingEvent());
}

StageMarks::~StageMarks() {
  for (const Track& track : tracks_) {
    for (const Entry& entry : track.entries) cudaEventDestroy(entry.event);
  }
  for (cudaEvent_t event : spare_events_) cudaEventDestroy(event);
  heap_->Free(words_);
}

StageMarks::Track* StageMarks::Find(cudaStream_t stream) {
  for (std::size_t i = 0; i < used_tracks_; ++i) {
    if (tracks_[i].stream == stream) return &tracks_[i];
  }
  return nullptr;
}

void StageMarks::Announce(cudaStream_t stream, const std::string& name, bool main_stream) {
  if (!Find(stream)) AddTrack(stream, name, main_stream);
}

StageMarks::Track& StageMarks::AddTrack(cudaStream_t stream, const std::string& name, bool main_stream) {
  const std::lock_guard lock(mutex_);
  if (used_tracks_ == tracks_.size()) {
    if (tracks_.size() == kMaxStreams) {
      throw RuntimeError(CPPOOL_INTERNAL,
                         "a case uses more than " + std::to_string(kMaxStreams) + " streams");
    }
    tracks_.emplace_back();
    tracks_.back().word = reinterpret_cast<std::uint32_t*>(words_ + (tracks_.size() - 1) * kWordBytes);
  }
  Track& track = tracks_[used_tracks_++];
  track.stream = stream;
  track.name = name;
  track.main_stream = main_stream;
  return track;
}

StageMarks::Track& StageMarks::TrackOf(cudaStream_t stream) {
  if (Track* const known = Find(stream)) return *known;
  return AddTrack(stream, "own stream " + std::to_string(used_tracks_), false);
}

int StageMarks::NameIndex(const char* stage) {
  const auto found = std::find(names_.begin(), names_.end(), stage);
  if (found != names_.end()) return static_cast<int>(found - names_.begin());
  const std::lock_guard lock(mutex_);
  names_.emplace_back(stage);
  return static_cast<int>(names_.size()) - 1;
}

cudaEvent_t StageMarks::TakeEvent() {
  if (spare_events_.empty()) spare_events_.push_back(NewTimingEvent());
  const cudaEvent_t event = spare_events_.back();
  spare_events_.pop_back();
  return event;
}

void StageMarks::Mark(cudaStream_t stream, const char* stage, int iteration) {
  Track& track = TrackOf(stream);
  Entry entry;
  entry.stage = stage ? NameIndex(stage) : -1;
  entry.iteration = iteration;
  entry.order = next_order_++;
  entry.event = TakeEvent();
  entry.called = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    entry.sequence = ++track.last_sequence;
    track.entries.push_back(entry);
  }
  CheckCuda(cudaEventRecord(entry.event, stream), "recording a stage's time");
  WriteWord(stream, track.word, entry.sequence);
}

StagePoint StageMarks::HereOn(const Track& track) const {
  std::size_t index = 0;
  while (&tracks_[index] != &track) ++index;
  return {index, track.last_sequence};
}

template <typename Noted>
void StageMarks::NoteIn(std::deque<Staged<Noted>> Track::*notes, cudaStream_t stream, const Noted& what) {
  Track& track = TrackOf(stream);
  const std::lock_guard lock(mutex_);
  (track.*notes).push_back({track.last_sequence, what});
  if ((track.*notes).size() > kMostNotes) (track.*notes).pop_front();
}

void StageMarks::Note(cudaStream_t stream, const StageCall& call) { NoteIn(&Track::calls, stream, call); }
void StageMarks::NoteWait(cudaStream_t stream, const StagePoint& at) { NoteIn(&Track::waits, stream, at); }

void StageMarks::Close(cudaStream_t stream, int iteration) {
  const Track& track = TrackOf(stream);
  if (!track.entries.empty() && track.entries.back().stage >= 0) Mark(stream, nullptr, iteration);
}

void StageMarks::Fold(Track& track, bool whole) {
  const std::size_t count = track.entries.size();
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const Entry& entry = track.entries[i];
    if (entry.stage < 0) continue;
    if (trace_) TraceStage(track, i);
    if (entry.iteration == StageTally::kWarmUp) continue;
    float milliseconds = 0;
    CheckCuda(cudaEventElapsedTime(&milliseconds, entry.event, track.entries[i + 1].event),
              "reading a stage's time");
    intervals_.push_back({entry.order, entry.stage, entry.iteration, track.main_stream, milliseconds});
  }
  // The last one begins the next interval.
  const std::size_t gone = whole || count == 0 ? count : count - 1;
  for (std::size_t i = 0; i < gone; ++i) spare_events_.push_back(track.entries[i].event);
  const std::lock_guard lock(mutex_);
  ReadTrack(track, Clock::now());  // Progress still shows the last stage
  track.entries.erase(track.entries.begin(), track.entries.begin() + static_cast<std::ptrdiff_t>(gone));
}

bool StageMarks::TraceStage(const Track& track, std::size_t entry) {
  const Entry& begin = track.entries[entry];
  const int index = static_cast<int>(HereOn(track).track);
  trace_->recorder().NameStream(index, track.name);
  return trace_->AddStage(index, names_[begin.stage], begin.iteration, begin.event,
                          track.entries[entry + 1].event);
}

void StageMarks::TraceEnded() {
  for (std::size_t t = 0; t < used_tracks_; ++t) {
    for (std::size_t i = 0; i + 1 < tracks_[t].entries.size(); ++i) {
      if (tracks_[t].entries[i].stage >= 0 && !TraceStage(tracks_[t], i)) break;
    }
  }
}

void StageMarks::Settle(cudaStream_t stream) {
  Track* const track = Find(stream);
  if (track && track->entries.size() >= kSettleFrom) Fold(*track, false);
}

StageSamples StageMarks::Samples(cudaStream_t main_stream) {
  Fold(TrackOf(main_stream), false);
  StageTally tally;
  for (const Interval& i : intervals_) {
    if (i.main_stream) tally.Add(i.iteration, names_[i.stage], true, i.milliseconds);
  }
  return tally.Samples();
}

StageTimes StageMarks::Collect() {
  for (std::size_t i = 0; i < used_tracks_; ++i) Fold(tracks_[i], true);
  std::sort(intervals_.begin(), intervals_.end(),
            [](const Interval& a, const Interval& b) { return a.order < b.order; });
  StageTally tally;
  for (const Interval& i : intervals_) tally.Add(i.iteration, names_[i.stage], i.main_stream, i.milliseconds);
  intervals_.clear();
  return tally.Times();
}

void StageMarks::Reset() {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < used_tracks_; ++i) {
    Track& track = tracks_[i];
    for (const Entry& entry : track.entries) spare_events_.push_back(entry.event);
    track.entries.clear();
    track.calls.clear();
    track.waits.clear();
    track.seen_stage = -1;
    track.stream = nullptr;
    track.last_read = {};
  }
  used_tracks_ = 0;
  intervals_.clear();
  names_.clear();
}

std::size_t StageMarks::Reached(const Track& track) const {
  if (track.entries.empty()) return 0;
  // Cyclic: the word is at one of the entries, or a few marks before the first.
  const auto passed = static_cast<std::int32_t>(__atomic_load_n(track.word, __ATOMIC_ACQUIRE) -
                                                track.entries.front().sequence);
  return passed < 0 ? 0 : std::min(static_cast<std::size_t>(passed) + 1, track.entries.size());
}

std::uint32_t StageMarks::ReachedSequence(const Track& track) const {
  const std::size_t reached = Reached(track);
  if (reached > 0) return track.entries[reached - 1].sequence;
  return track.entries.empty() ? track.last_sequence : track.entries.front().sequence - 1;
}

std::string StageMarks::CallsIn(const Track& track, std::uint32_t sequence) const {
  constexpr std::size_t kMostTold = 4;
  std::vector<std::string> texts;
  for (const auto& staged : track.calls) {
    if (staged.sequence != sequence) continue;
    std::string text = std::string(staged.what.what) + staged.what.before +
                       std::to_string(staged.what.number) + staged.what.after;
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(std::move(text));
  }
  std::string all;
  for (std::size_t i = 0; i < texts.size() && i < kMostTold; ++i) all += (i ? ", " : "with ") + texts[i];
  if (texts.size() > kMostTold) all += " and " + std::to_string(texts.size() - kMostTold) + " other calls";
  return all;
}

// The latest wait of the stage that may not be over: the other stream has not yet left the stage (or the gap
// between two stages) that the wait is for.
const StagePoint* StageMarks::AwaitedIn(const Track& track, std::uint32_t sequence) const {
  for (auto staged = track.waits.rbegin(); staged != track.waits.rend(); ++staged) {
    const Track& other = tracks_[staged->what.track];
    // The difference is cyclic, as the words are.
    const bool left = static_cast<std::int32_t>(ReachedSequence(other) - staged->what.sequence) > 0;
    if (staged->sequence == sequence && &other != &track && !left) return &staged->what;
  }
  return nullptr;
}

bool StageMarks::IsIdle(const Track& track) const {
  return track.entries.empty() || (Reached(track) == track.entries.size() && track.entries.back().stage < 0);
}

void StageMarks::ReadTrack(const Track& track, Clock::time_point now) const {
  for (std::size_t i = Reached(track); i > 0; --i) {
    const Entry& entry = track.entries[i - 1];
    if (entry.stage < 0) continue;
    if (track.seen_stage < 0 || entry.sequence != track.seen_sequence) {
      track.seen_stage = entry.stage;
      track.seen_sequence = entry.sequence;
      track.reached = std::max(track.last_read, entry.called);
    }
    break;
  }
  track.last_read = now;
}

void StageMarks::Read() const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  for (std::size_t i = 0; i < used_tracks_; ++i) ReadTrack(tracks_[i], now);
}

std::vector<StreamProgress> StageMarks::Progress(std::vector<cudaStream_t>* streams) const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::vector<StreamProgress> progress;
  for (std::size_t i = 0; i < used_tracks_; ++i) {
    const Track& track = tracks_[i];
    ReadTrack(track, now);
    StreamProgress& one = progress.emplace_back();
    if (streams) streams->push_back(track.stream);
    one.stream = track.name;
    if (track.seen_stage >= 0) {
      one.stage = names_[track.seen_stage];
      one.seconds = std::chrono::duration<double>(now - track.reached).count();
    }
    const std::uint32_t reached = ReachedSequence(track);
    one.doing = CallsIn(track, reached);
    if (const StagePoint* awaited = AwaitedIn(track, reached)) {
      const Track& other = tracks_[awaited->track];
      const std::string calls = CallsIn(other, awaited->sequence);
      if (!IsIdle(other)) {
        one.behind = other.name;
      } else if (one.doing.empty() && !calls.empty()) {  // calls outside of any stage: they may be over
        one.doing = calls + " on " + other.name;
      }
    }
    one.idle = IsIdle(track);
  }
  return progress;
}

}  // namespace cppool::kernels::cuda
