// Reads a trace and checks it against Chrome's Trace Event Format, as far as cppoold uses it: the "JSON
// Object Format" with complete events (X) and metadata events (M). It shares no code with what writes traces.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/files.h"

namespace cppool::test {

struct TracedSlice {
  std::string category, name;
  std::int64_t begin_ns = 0, end_ns = 0;
  nlohmann::json args;
  int depth = 0;     // how many slices of its track it lies in
  bool leaf = true;  // without a stage in it
};

struct TracedTrack {
  std::string process, name;
  std::vector<TracedSlice> slices;  // in the order in which viewers nest them
};

struct CheckedTrace {
  std::vector<std::string> problems;  // none: the file is valid
  nlohmann::json about;               // otherData
  std::vector<std::string> processes;
  std::vector<TracedTrack> tracks;

  const TracedTrack* Track(const std::string& process, const std::string& name) const {
    for (const TracedTrack& track : tracks) {
      if (track.process == process && track.name == name) return &track;
    }
    return nullptr;
  }
  // The slices of this category on all tracks of the process.
  std::vector<TracedSlice> Slices(const std::string& process, const std::string& category) const {
    std::vector<TracedSlice> found;
    for (const TracedTrack& track : tracks) {
      for (const TracedSlice& slice : track.slices) {
        if (track.process == process && slice.category == category) found.push_back(slice);
      }
    }
    return found;
  }
};

class TraceChecker {
 public:
  CheckedTrace Check(const std::string& file) {
    const Json json = Json::parse(ReadFile(file), nullptr, false);
    Require(json.is_object(), "the file is no JSON object");
    if (!json.is_object()) return std::move(trace_);
    Require(json.value("displayTimeUnit", Json()) == "ms", "displayTimeUnit is not ms");
    trace_.about = json.value("otherData", Json());
    Require(trace_.about.is_object(), "otherData is no object");
    const Json events = json.value("traceEvents", Json());
    Require(events.is_array(), "traceEvents is no list");
    for (const Json& event : events) CheckEvent(event);
    for (auto& [place, slices] : slices_) AddTrack(place, std::move(slices));
    for (const auto& [pid, name] : processes_) trace_.processes.push_back(name);
    return std::move(trace_);
  }

 private:
  using Json = nlohmann::json;
  using Place = std::pair<std::int64_t, std::int64_t>;  // pid, tid

  void Require(bool holds, const std::string& problem) {
    if (!holds && trace_.problems.size() < 20) trace_.problems.push_back(problem);
  }

  void CheckEvent(const Json& event) {
    const std::string text = event.dump();
    const auto is = [&](const char* key, bool (Json::*type)() const noexcept) {
      const bool there = event.is_object() && event.contains(key) && (event.at(key).*type)();
      Require(there, std::string(key) + " is missing or of another type: " + text);
      return there;
    };
    if (!is("ph", &Json::is_string) || !is("name", &Json::is_string) ||
        !is("pid", &Json::is_number_integer) || !is("tid", &Json::is_number_integer) ||
        !is("ts", &Json::is_number) || !is("args", &Json::is_object))
      return;
    const Place place{event.at("pid"), event.at("tid")};
    Require(event.at("ts") >= 0, "ts is negative: " + text);
    if (event.at("ph") == "M") return CheckMetadata(event, place, text);
    Require(event.at("ph") == "X", "an unknown phase: " + text);
    if (!is("dur", &Json::is_number) || !is("cat", &Json::is_string)) return;
    Require(event.at("dur") >= 0, "dur is negative: " + text);
    TracedSlice slice{event.at("cat"), event.at("name"), std::llround(event.at("ts").get<double>() * 1e3), 0,
                      event.at("args")};
    slice.end_ns = slice.begin_ns + std::llround(event.at("dur").get<double>() * 1e3);
    slices_[place].push_back(std::move(slice));
  }

  void CheckMetadata(const Json& event, const Place& place, const std::string& text) {
    const std::string name = event.at("name");
    const bool sorts = name == "process_sort_index" || name == "thread_sort_index";
    const char* key = sorts ? "sort_index" : name == "process_labels" ? "labels" : "name";
    Require(sorts || name == "process_name" || name == "thread_name" || name == "process_labels",
            "unknown metadata: " + text);
    const Json value = event.at("args").value(key, Json());
    Require(sorts ? value.is_number_integer() : value.is_string(),
            std::string("args has no ") + key + ": " + text);
    if (!value.is_string()) return;
    if (name == "process_name")
      Require(processes_.emplace(place.first, value).second, "a process is named twice: " + text);
    if (name == "thread_name") {
      Require(threads_.emplace(place, value).second, "a thread is named twice: " + text);
      slices_[place];  // a track may be empty
    }
  }

  void AddTrack(const Place& place, std::vector<TracedSlice> slices) {
    const std::string where = std::to_string(place.first) + "/" + std::to_string(place.second);
    Require(processes_.count(place.first) == 1, "no process_name for " + where);
    Require(threads_.count(place) == 1, "no thread_name for " + where);
    TracedTrack track{processes_[place.first], threads_[place], {}};
    std::stable_sort(slices.begin(), slices.end(), [](const TracedSlice& a, const TracedSlice& b) {
      return std::tuple(a.begin_ns, -a.end_ns) < std::tuple(b.begin_ns, -b.end_ns);
    });
    std::vector<TracedSlice*> open;
    for (TracedSlice& slice : slices) {
      while (!open.empty() && open.back()->end_ns <= slice.begin_ns && open.back()->end_ns < slice.end_ns)
        open.pop_back();
      Require(open.empty() || slice.end_ns <= open.back()->end_ns,
              track.process + ", " + track.name + ": \"" + slice.name + "\" begins in \"" +
                  (open.empty() ? "" : open.back()->name) + "\" and ends after it");
      slice.depth = static_cast<int>(open.size());
      if (!open.empty() && slice.category == "stage") open.back()->leaf = false;
      open.push_back(&slice);
    }
    track.slices = std::move(slices);
    trace_.tracks.push_back(std::move(track));
  }

  CheckedTrace trace_;
  std::map<std::int64_t, std::string> processes_;
  std::map<Place, std::string> threads_;
  std::map<Place, std::vector<TracedSlice>> slices_;
};

inline CheckedTrace CheckTrace(const std::string& file) { return TraceChecker().Check(file); }

}  // namespace cppool::test
