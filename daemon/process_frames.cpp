#include "daemon/process_frames.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/words.h"
#include "daemon/failure_kind.h"
#include "kernels/error.h"

namespace cppool::daemon {
namespace {

using protocol::Json;

constexpr std::size_t kMostStackLines = 200;

// Returns the objects of a list; another member has none.
std::vector<const Json*> ObjectsOf(const Json& frame, const char* member) {
  std::vector<const Json*> objects;
  const auto found = frame.is_object() ? frame.find(member) : frame.end();
  if (found == frame.end() || !found->is_array()) return objects;
  for (const Json& each : *found)
    if (each.is_object()) objects.push_back(&each);
  return objects;
}

// Returns the numbers of a list of integers; another member has none.
std::vector<std::int64_t> IntegersOf(const Json& json, const char* member) {
  const auto found = json.find(member);
  const bool integers =
      found != json.end() && found->is_array() &&
      std::ranges::all_of(*found, [](const Json& each) { return each.is_number_integer(); });
  return integers ? found->get<std::vector<std::int64_t>>() : std::vector<std::int64_t>();
}

}  // namespace

std::string TextOf(const Json& json, const char* member) {
  const auto found = json.find(member);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

void ReadReport(const Json& frame, const kernels::Place& place, RankReport& report) {
  Json json = ToJson(report);
  for (const char* same : {"checks", "gpu_ms", "samples", "warnings"})
    if (frame.contains(same)) json[same] = frame.at(same);
  for (const char* state : {"differed", "left"})
    if (frame.contains(state)) json[state] = frame.at(state);
  json["traceback"] = TextOf(frame, "traceback");
  RankReport read = RankReportFrom(json, place);
  read.failure = report.failure;
  read.node = report.node;
  const Json results = frame.value("results", Json::object());
  for (const auto& [name, value] : results.items()) read.extra[name] = value;
  for (const char* own : {"rank", "ok", "error", "gpu_ms", "samples", "traceback", "output", "stack"})
    if (read.extra.erase(own) > 0)
      read.warnings.push_back(std::string("the result '") + own +
                              "' is left out: the answer has a member of that name");
  for (const char* more : {"value", "pytest", "memory", "reset_ms"})
    if (frame.contains(more)) read.extra[more] = frame.at(more);
  report = std::move(read);
}

kernels::RankTrace TraceFrom(const Json& json) {
  kernels::RankTrace trace;
  trace.streams = {"main"};
  trace.names = json.at("names").get<std::vector<std::string>>();
  trace.dropped = json.at("dropped");
  trace.clock_error_us = json.at("clock_error_us");
  const auto add = [&](const char* member, kernels::TraceSlice::Kind kind) {
    for (const Json& each : json.at(member)) {
      kernels::TraceSlice slice;
      slice.kind = kind;
      slice.name = each.at(0);
      slice.iteration = each.at(1);
      slice.begin_ns = each.at(2);
      slice.end_ns = each.at(3);
      trace.names.at(static_cast<std::size_t>(slice.name));
      trace.slices.push_back(slice);
    }
  };
  add("host", kernels::TraceSlice::Kind::kCall);
  add("stream", kernels::TraceSlice::Kind::kStage);
  return trace;
}

RankFailure FailureFrom(const Json& frame) {
  RankFailure failure;
  failure.text = TextOf(frame, "error");
  failure.stage = TextOf(frame, "stage");
  failure.status =
      StatusOf(protocol::ParseFailureKind(TextOf(frame, "kind")).value_or(protocol::FailureKind::kInternal));
  failure.gave_reason = true;
  const bool own = frame.contains("culprit") && frame.at("culprit").is_number_integer();
  if (!own) failure.culprit = kernels::RuntimeError::kElsewhere;
  const Json checks = frame.value("checks", Json::array());
  const bool by_check =
      std::ranges::any_of(checks, [](const Json& check) { return !check.value("ok", true); });
  failure.origin = !own                                            ? FailureOrigin::kPropagated
                   : TextOf(frame, "status") == "skipped"          ? FailureOrigin::kSkip
                   : failure.status == CPPOOL_MISMATCH && by_check ? FailureOrigin::kMismatch
                                                                   : FailureOrigin::kOwn;
  return failure;
}

kernels::StageSamples SamplesFrom(const Json& mark) {
  kernels::StageSamples samples;
  for (const Json& stage : mark.value("samples", Json::array()))
    samples.emplace_back(stage.at(0).get<std::string>(), stage.at(1).get<std::vector<double>>());
  return samples;
}

std::vector<std::vector<std::string>> StacksOf(const Json& answer) {
  std::vector<std::vector<std::string>> stacks;
  for (const Json* thread : ObjectsOf(answer, "threads")) {
    std::vector<std::string> frames;
    for (const Json& frame : thread->value("frames", Json()))
      if (frame.is_string()) frames.push_back(frame);
    if (frames.empty()) continue;
    stacks.insert(TextOf(*thread, "name") == "MainThread" ? stacks.begin() : stacks.end(), std::move(frames));
  }
  return stacks;
}

std::vector<std::vector<std::string>> StacksFrom(const std::string& text) {
  std::vector<std::vector<std::string>> stacks;
  for (const std::string& line : base::Split(text, '\n')) {
    const std::size_t file = line.find("File \""), end = line.find("\", line ");
    if (line.find("hread 0x") != std::string::npos) stacks.emplace(stacks.begin());
    if (file == std::string::npos || end == std::string::npos || stacks.empty()) continue;
    const std::string path = line.substr(file + 6, end - file - 6),
                      rest = line.substr(end + 8);  // "12 in name"
    const std::size_t in_function = rest.find(" in ");
    if (path.find("/cppool/_ranks/") != std::string::npos || in_function == std::string::npos ||
        path.starts_with("<frozen"))
      continue;
    if (stacks.front().size() < kMostStackLines)
      stacks.front().push_back(path + ":" + rest.substr(0, in_function) + " " + rest.substr(in_function + 4));
  }
  std::erase_if(stacks, [](const auto& stack) { return stack.empty(); });
  return stacks;
}

std::vector<Collective> CollectivesOf(const Json& answer) {
  std::vector<Collective> collectives;
  for (const Json* each : ObjectsOf(answer, "collectives")) {
    const auto number = each->find("number");
    collectives.push_back(
        {number != each->end() && number->is_number_integer() ? number->get<std::int64_t>() : -1,
         TextOf(*each, "name"), TextOf(*each, "group"), TextOf(*each, "state") == "completed",
         IntegersOf(*each, "ranks")});
  }
  return collectives;
}

}  // namespace cppool::daemon
