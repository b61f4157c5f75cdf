#include "kernels/runtime/common/trace_recorder.h"

#include <algorithm>

#include "kernels/runtime/common/stage_tally.h"

namespace cppool::kernels {

TraceRecorder::TraceRecorder(std::size_t limit) : slices_(limit) {}

int TraceRecorder::NameIndex(std::string_view name) {
  const auto known = name_index_.find(name);
  if (known != name_index_.end()) return known->second;
  names_.emplace_back(name);
  const int index = static_cast<int>(names_.size()) - 1;
  name_index_.emplace(name, index);
  return index;
}

TraceSlice* TraceRecorder::Add(TraceSlice::Kind kind, int track, std::string_view name, int iteration) {
  if (used_ == slices_.size()) {
    ++dropped_;
    return nullptr;
  }
  TraceSlice& slice = slices_[used_++];
  slice.kind = kind;
  slice.track = track;
  slice.name = NameIndex(name);
  slice.iteration = iteration;
  return &slice;
}

void TraceRecorder::NameStream(int track, const std::string& name) {
  const auto at = static_cast<std::size_t>(track);
  if (streams_.size() <= at) streams_.resize(at + 1);
  if (streams_[at].empty()) streams_[at] = name;
}

TraceRecorder::Change TraceRecorder::MarkStage(int track, const char* stage, int iteration) {
  const auto at = static_cast<std::size_t>(track);
  if (open_.size() <= at) open_.resize(at + 1);
  Change change;
  change.ended = open_[at];
  if (stage) change.begun = Add(TraceSlice::Kind::kStage, track, stage, iteration);
  open_[at] = change.begun;
  return change;
}

void TraceRecorder::EndStages(std::int64_t now) {
  for (TraceSlice*& slice : open_) {
    if (slice) slice->end_ns = now;
    slice = nullptr;
  }
}

TraceSlice* TraceRecorder::BeginCall(std::string_view what, int iteration) {
  TraceSlice* const slice = Add(TraceSlice::Kind::kCall, 0, what, iteration);
  if (slice) slice->begin_ns = TraceClockNs();
  return slice;
}

void TraceRecorder::MarkCalls(cppool_stream stream, const char* stage, int iteration) {
  if (enqueuing_) enqueuing_->end_ns = TraceClockNs();
  enqueuing_ = nullptr;
  const auto known = std::find_if(enqueued_.begin(), enqueued_.end(),
                                  [stream](const auto& one) { return one.first == stream; });
  if (known != enqueued_.end()) enqueued_.erase(known);
  if (stage) enqueued_.emplace_back(stream, stage);
  if (!enqueued_.empty()) enqueuing_ = BeginCall(enqueued_.back().second, iteration);
}

TraceRecorder::Call::Call(TraceRecorder* recorder, const char* what) {
  if (recorder) slice_ = recorder->BeginCall(what, StageTally::kOnce);
}

RankTrace TraceRecorder::Finish(bool failed) {
  const std::int64_t now = TraceClockNs();
  RankTrace trace;
  slices_.resize(used_);
  std::erase_if(slices_, [](const TraceSlice& slice) { return slice.begin_ns == 0; });
  for (TraceSlice& slice : slices_) {
    if (slice.end_ns != 0) continue;
    slice.end_ns = now;
    slice.unfinished = failed && slice.kind != TraceSlice::Kind::kCall;
  }
  trace.streams = std::move(streams_);
  trace.names = std::move(names_);
  trace.slices = std::move(slices_);
  trace.dropped = dropped_;
  used_ = 0;
  return trace;
}

}  // namespace cppool::kernels
