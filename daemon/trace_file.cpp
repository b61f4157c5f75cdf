#include "daemon/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "base/new_file.h"
#include "daemon/log.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::daemon {
namespace {

using kernels::RankTrace;
using kernels::TraceSlice;
using protocol::Json;

constexpr int kDaemonProcess = 1;  // the ranks' processes follow it
constexpr std::size_t kFlushAt = std::size_t{1} << 20;

// A slice of one track of the file.
struct Event {
  std::string_view category;
  std::string name;
  std::int64_t begin_ns = 0, end_ns = 0;
  int depth = 0;     // orders slices with the same times: the outer one has the smaller number
  std::string args;  // JSON
};

class Writer {
 public:
  Writer(const std::string& path, std::int64_t begin_ns) : file_(path), begin_ns_(begin_ns) {}

  void Begin(const Json& about) {
    text_ = "{\"displayTimeUnit\": \"ms\",\n\"otherData\": " + protocol::JsonText(about) +
            ",\n\"traceEvents\": [";
  }
  void Process(int pid, const std::string& name, const std::string& label) {
    Metadata("process_name", pid, 0, "name", protocol::JsonText(name));
    Metadata("process_sort_index", pid, 0, "sort_index", std::to_string(pid));
    if (!label.empty()) Metadata("process_labels", pid, 0, "labels", protocol::JsonText(label));
  }
  // Tracks are shown in the order of their numbers, which are unique in the file: some viewers take them for
  // threads of the system.
  void Track(int pid, int number, const std::string& name, std::vector<Event> events) {
    const int tid = pid * 10000 + number;
    Metadata("thread_name", pid, tid, "name", protocol::JsonText(name));
    Metadata("thread_sort_index", pid, tid, "sort_index", std::to_string(number));
    // Viewers nest slices in this order.
    std::ranges::sort(events, [](const Event& a, const Event& b) {
      return std::tuple(a.begin_ns, -a.end_ns, a.depth) < std::tuple(b.begin_ns, -b.end_ns, b.depth);
    });
    for (const Event& event : events) {
      Line(fmt::format(
          R"({{"ph": "X", "cat": "{}", "name": {}, "ts": {}, "dur": {}, "pid": {}, "tid": {}, "args": {{{}}}}})",
          event.category, protocol::JsonText(event.name), Microseconds(event.begin_ns - begin_ns_),
          Microseconds(event.end_ns - event.begin_ns), pid, tid, event.args));
    }
  }
  void End() {
    text_ += "\n]}\n";
    file_.Write(text_);
    file_.Commit();
  }

 private:
  static std::string Microseconds(std::int64_t ns) {
    ns = std::max<std::int64_t>(ns, 0);
    return fmt::format("{}.{:03}", ns / 1000, ns % 1000);
  }
  void Metadata(std::string_view name, int pid, int tid, std::string_view key, const std::string& value) {
    Line(fmt::format(R"({{"ph": "M", "name": "{}", "ts": 0, "pid": {}, "tid": {}, "args": {{"{}": {}}}}})",
                     name, pid, tid, key, value));
  }
  void Line(const std::string& line) {
    text_ += first_ ? "\n" : ",\n";
    first_ = false;
    text_ += line;
    if (text_.size() < kFlushAt) return;
    file_.Write(text_);
    text_.clear();
  }

  base::NewFile file_;
  const std::int64_t begin_ns_;
  std::string text_;
  bool first_ = true;
};

std::vector<Event> ToEvents(const std::vector<HostSlice>& slices, std::int64_t shift_ns = 0) {
  std::vector<Event> events;
  for (const HostSlice& slice : slices)
    events.push_back({"daemon", slice.name, slice.begin_ns + shift_ns, slice.end_ns + shift_ns, 0, ""});
  return events;
}

std::string Place(const TraceSlice& slice) {
  std::string args = slice.iteration >= 0    ? fmt::format("\"iteration\": {}", slice.iteration)
                     : slice.iteration == -2 ? "\"iteration\": \"warmup\""
                                             : "";
  if (slice.unfinished) args += std::string(args.empty() ? "" : ", ") + "\"unfinished\": true";
  return args;
}

// The slices of a stream's stages. A stage "a/b" lies in a slice "a", which lasts as long as stages that
// begin with "a/" follow each other in one iteration.
class StageNester {
 public:
  explicit StageNester(std::vector<Event>* to) : to_(to) {}

  void Add(const std::string& stage, const TraceSlice& slice) {
    std::vector<std::string> path;
    for (std::size_t at = 0; at <= stage.size();) {
      const std::size_t slash = std::min(stage.find('/', at), stage.size());
      path.push_back(stage.substr(at, slash - at));
      at = slash + 1;
    }
    std::size_t kept = 0;
    if (slice.begin_ns == end_ns_ && slice.iteration == iteration_) {
      while (kept < std::min(path.size(), open_.size()) && open_[kept].name == path[kept]) ++kept;
      if (kept == path.size() && kept == open_.size()) --kept;  // the same stage again is another slice
    }
    CloseTo(kept);
    for (std::size_t depth = kept; depth < path.size(); ++depth) {
      std::string whole = path[0];
      for (std::size_t i = 1; i <= depth; ++i) whole += "/" + path[i];
      const std::string place = Place(slice);
      open_.push_back({"stage", path[depth], slice.begin_ns, 0, static_cast<int>(depth),
                       "\"stage\": " + protocol::JsonText(whole) + (place.empty() ? "" : ", ") + place});
    }
    end_ns_ = slice.end_ns;
    iteration_ = slice.iteration;
  }
  void Close() { CloseTo(0); }

 private:
  void CloseTo(std::size_t count) {
    for (; open_.size() > count; open_.pop_back()) {
      to_->push_back(std::move(open_.back()));
      to_->back().end_ns = end_ns_;
    }
  }

  std::vector<Event>* to_;
  std::vector<Event> open_;  // by depth
  std::int64_t end_ns_ = 0;  // when the last stage ended
  int iteration_ = -1;
};

constexpr int kInStages = 1000;  // deeper than any stage

Event TransferEvent(const RankTrace& trace, const TraceSlice& slice) {
  std::string name = trace.names[static_cast<std::size_t>(slice.name)];
  std::string args = fmt::format("\"bytes\": {}, \"ranks\": {}", slice.bytes, slice.ranks);
  if (slice.peer != TraceSlice::kNoPeer) {
    args += fmt::format(", \"peer\": {}", slice.peer);
    name += fmt::format("{} rank {}", name == "recv" ? " from" : " to", slice.peer);
  }
  if (const std::string place = Place(slice); !place.empty()) args += ", " + place;
  return {"transfer", std::move(name), slice.begin_ns, slice.end_ns, kInStages, std::move(args)};
}

std::vector<Event> StreamEvents(const RankTrace& trace, int track) {
  std::vector<Event> events;
  std::vector<const TraceSlice*> stages;
  for (const TraceSlice& slice : trace.slices) {
    if (slice.kind == TraceSlice::Kind::kCall || slice.track != track) continue;
    if (slice.kind == TraceSlice::Kind::kStage) {
      stages.push_back(&slice);
    } else {
      events.push_back(TransferEvent(trace, slice));
    }
  }
  std::ranges::stable_sort(
      stages, [](const TraceSlice* a, const TraceSlice* b) { return a->begin_ns < b->begin_ns; });
  StageNester nester(&events);
  for (const TraceSlice* slice : stages)
    nester.Add(trace.names[static_cast<std::size_t>(slice->name)], *slice);
  nester.Close();
  return events;
}

std::vector<Event> CallEvents(const RunTrace::Rank& rank) {
  std::vector<Event> events = ToEvents(rank.host);
  for (const TraceSlice& slice : rank.work.slices) {
    if (slice.kind != TraceSlice::Kind::kCall) continue;
    events.push_back({"call", rank.work.names[static_cast<std::size_t>(slice.name)], slice.begin_ns,
                      slice.end_ns, 1, Place(slice)});
  }
  return events;
}

Json About(const RunTrace& trace, const std::string& node, const NodeClock& clock) {
  Json dropped = Json::array(), errors = Json::array();
  for (const auto& rank : trace.ranks) {
    dropped.push_back(rank.work.dropped);
    errors.push_back(rank.work.clock_error_us);
  }
  Json about = {{"program", "cppoold " + trace.version},
                {"request", trace.request},
                {"case", trace.case_name},
                {"world_size", trace.ranks.size()},
                {"backend", trace.backend},
                {"transport", trace.transport},
                {"begin_monotonic_ns", trace.begin_ns + clock.offset_ns},
                {"clock_error_us", std::move(errors)},
                {"most_slices", trace.limit},
                {"dropped_slices", std::move(dropped)}};
  if (!node.empty())
    about.update(
        {{"node", node}, {"clock_offset_ns", clock.offset_ns}, {"clock_offset_error_ns", clock.error_ns}});
  return about;
}

// The ranks of one node; empty: of all.
void WriteTrace(const std::string& path, const RunTrace& trace, const std::string& node,
                const NodeClock& clock) {
  Writer writer(path, trace.begin_ns + clock.offset_ns);
  writer.Begin(About(trace, node, clock));
  writer.Process(kDaemonProcess, "cppoold", node.empty() ? "" : "the head, by this node's clock");
  writer.Track(kDaemonProcess, 1, "requests", ToEvents(trace.host, clock.offset_ns));
  for (std::size_t r = 0; r < trace.ranks.size(); ++r) {
    const RunTrace::Rank& rank = trace.ranks[r];
    if (!node.empty() && rank.node != node) continue;
    const int pid = kDaemonProcess + 1 + static_cast<int>(r);
    writer.Process(pid, "rank " + std::to_string(r), rank.device);
    writer.Track(pid, 1, "calls of the host", CallEvents(rank));
    for (std::size_t s = 0; s < rank.work.streams.size(); ++s) {
      if (rank.work.streams[s].empty()) continue;
      writer.Track(pid, 2 + static_cast<int>(s), rank.work.streams[s],
                   StreamEvents(rank.work, static_cast<int>(s)));
    }
  }
  writer.End();
}

std::string PathOfNode(const std::filesystem::path& path, std::string node) {
  for (char& c : node)
    if (c == '/' || c == ':') c = '-';
  return (path.parent_path() / (path.stem().string() + "." + node + path.extension().string())).string();
}

}  // namespace

void WriteTrace(const std::string& path, const RunTrace& trace) {
  if (trace.clocks.empty()) WriteTrace(path, trace, "", {});
  for (const auto& [node, clock] : trace.clocks) WriteTrace(PathOfNode(path, node), trace, node, clock);
}

Json ToJson(const RunTrace::Rank& rank) {
  Json host = Json::array(), slices = Json::array();
  for (const HostSlice& slice : rank.host) host.push_back({slice.name, slice.begin_ns, slice.end_ns});
  for (const TraceSlice& slice : rank.work.slices)
    slices.push_back({static_cast<int>(slice.kind), slice.track, slice.name, slice.iteration, slice.begin_ns,
                      slice.end_ns, slice.unfinished, slice.peer, slice.ranks, slice.bytes});
  return {{"device", rank.device},
          {"host", std::move(host)},
          {"streams", rank.work.streams},
          {"names", rank.work.names},
          {"slices", std::move(slices)},
          {"dropped", rank.work.dropped},
          {"clock_error_us", rank.work.clock_error_us}};
}

RunTrace::Rank TraceRankFrom(const Json& json) {
  RunTrace::Rank rank;
  rank.device = json.at("device");
  for (const Json& slice : json.at("host")) rank.host.push_back({slice.at(0), slice.at(1), slice.at(2)});
  rank.work.streams = json.at("streams").get<std::vector<std::string>>();
  rank.work.names = json.at("names").get<std::vector<std::string>>();
  rank.work.dropped = json.at("dropped");
  rank.work.clock_error_us = json.at("clock_error_us");
  for (const Json& each : json.at("slices")) {
    TraceSlice slice;
    const int kind = each.at(0);
    if (kind < 0 || kind > static_cast<int>(TraceSlice::Kind::kCall))
      throw std::runtime_error("no kind of slice");
    slice.kind = static_cast<TraceSlice::Kind>(kind);
    slice.track = each.at(1);
    slice.name = each.at(2);
    slice.iteration = each.at(3);
    slice.begin_ns = each.at(4);
    slice.end_ns = each.at(5);
    slice.unfinished = each.at(6);
    slice.peer = each.at(7);
    slice.ranks = each.at(8);
    slice.bytes = each.at(9);
    rank.work.names.at(static_cast<std::size_t>(slice.name));
    rank.work.slices.push_back(slice);
  }
  return rank;
}

std::string DescribeDropped(const RunTrace& trace) {
  std::string lacks;
  for (std::size_t r = 0; r < trace.ranks.size(); ++r) {
    const auto dropped = trace.ranks[r].work.dropped;
    if (dropped > 0)
      lacks += (lacks.empty() ? "" : ", ") + std::to_string(dropped) + " of rank " + std::to_string(r);
  }
  if (lacks.empty()) return "";
  return "the trace has no room for all slices (" + std::to_string(trace.limit) +
         " for each rank) and lacks " + lacks + ": ask for fewer iterations";
}

}  // namespace cppool::daemon
