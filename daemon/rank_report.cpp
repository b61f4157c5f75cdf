#include "daemon/rank_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "daemon/failure_kind.h"

namespace cppool::daemon {
namespace {

using protocol::Json;

// In the order of the enumerators.
constexpr std::array<std::string_view, 6> kPhases = {"unknown", "waiting", "running",
                                                     "ready",   "ending",  "done"};
constexpr std::array<std::string_view, 6> kOrigins = {"own",      "skip",        "propagated",
                                                      "mismatch", "after_abort", "none"};

template <typename Enum>
Enum EnumFrom(const Json& json, const std::array<std::string_view, 6>& words) {
  const auto found = std::ranges::find(words, json.get<std::string>());
  if (found == words.end()) throw std::runtime_error("unknown word " + json.dump());
  return static_cast<Enum>(found - words.begin());
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Json Number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

double NumberFrom(const Json& json) {
  if (json == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (json == "inf" || json == "-inf") return json == "inf" ? kInfinity : -kInfinity;
  if (!json.is_number()) throw std::runtime_error(json.dump() + " is no number");
  return json.get<double>();
}

Json List(const std::vector<double>& values) {
  Json json = Json::array();
  for (const double value : values) json.push_back(Number(value));
  return json;
}

std::vector<double> ListFrom(const Json& json) {
  std::vector<double> values;
  for (const Json& value : json) values.push_back(NumberFrom(value));
  return values;
}

// Pairs of a stage and its value, in their order.
template <typename Value, typename Write>
Json Stages(const std::vector<std::pair<std::string, Value>>& stages, Write write) {
  Json json = Json::array();
  for (const auto& [stage, value] : stages) json.push_back(Json::array({stage, write(value)}));
  return json;
}

template <typename Value, typename Read>
void ReadStages(const Json& json, std::vector<std::pair<std::string, Value>>& stages, Read read) {
  for (const Json& stage : json) stages.emplace_back(stage.at(0).get<std::string>(), read(stage.at(1)));
}

protocol::Check CheckFrom(const Json& json) {
  protocol::Check check;
  json.at("tensor").get_to(check.tensor);
  json.at("against").get_to(check.against);
  json.at("rank").get_to(check.rank);
  check.max_abs_err = NumberFrom(json.at("max_abs_err"));
  check.rel_err = NumberFrom(json.at("rel_err"));
  check.tolerance = NumberFrom(json.at("tolerance"));
  json.at("ok").get_to(check.ok);
  if (json.contains("ratio")) check.ratio = NumberFrom(json.at("ratio"));
  if (json.contains("worst")) {
    const Json& worst = json.at("worst");
    check.worst =
        cppool::Worst{worst.at("index"), NumberFrom(worst.at("got")), NumberFrom(worst.at("wanted"))};
  }
  if (json.contains("bad")) check.bad = json.at("bad").get<std::uint64_t>();
  if (json.contains("where")) json.at("where").get_to(check.where);
  return check;
}

// Lists of names, by group.
Json StateFrom(const Json& json) {
  if (!json.is_object()) throw std::runtime_error(json.dump() + " is no object");
  for (const Json& names : json) std::ignore = names.get<std::vector<std::string>>();
  return json;
}

Json ToJson(const kernels::StreamProgress& stream) {
  return {{"stream", stream.stream}, {"stage", stream.stage},  {"seconds", Number(stream.seconds)},
          {"idle", stream.idle},     {"doing", stream.doing},  {"awaits", stream.awaits},
          {"behind", stream.behind}, {"thread", stream.thread}};
}

kernels::StreamProgress StreamFrom(const Json& json) {
  return {json.at("stream"), json.at("stage"), NumberFrom(json.at("seconds")),
          json.at("idle"),   json.at("doing"), json.at("awaits"),
          json.at("behind"), json.at("thread")};
}

RankReport ReadReport(const Json& json, const kernels::Place& place) {
  RankReport report;
  json.at("rank").get_to(report.rank);
  if (report.rank < place.first || report.rank >= place.first + place.ranks)
    throw std::runtime_error("rank " + std::to_string(report.rank) + " is not of the place");
  report.phase = EnumFrom<RankPhase>(json.at("phase"), kPhases);
  const Json& failure = json.at("failure");
  report.failure.status = static_cast<cppool_status>(failure.at("status").get<int>());
  failure.at("text").get_to(report.failure.text);
  failure.at("culprit").get_to(report.failure.culprit);
  failure.at("gave_reason").get_to(report.failure.gave_reason);
  failure.at("stage").get_to(report.failure.stage);
  report.failure.origin = EnumFrom<FailureOrigin>(failure.at("origin"), kOrigins);
  failure.at("order").get_to(report.failure.order);
  json.at("needs_probe").get_to(report.needs_probe);
  for (const Json& check : json.at("checks")) report.checks.push_back(CheckFrom(check));
  for (const protocol::Check& check : report.checks)
    if (check.rank != report.rank) throw std::runtime_error("a check is of another rank");
  ReadStages(json.at("gpu_ms"), report.times, NumberFrom);
  ReadStages(json.at("samples"), report.samples, ListFrom);
  ReadStages(json.at("work"), report.work, NumberFrom);
  report.extra = json.at("extra");
  if (!report.extra.is_object()) throw std::runtime_error("extra is no object");
  const Json& leaks = json.at("leaks");
  leaks.at("allocations").get_to(report.leaks.allocations);
  leaks.at("device_bytes").get_to(report.leaks.device_bytes);
  leaks.at("host_bytes").get_to(report.leaks.host_bytes);
  json.at("traceback").get_to(report.traceback);
  json.at("output").get_to(report.output);
  json.at("replace").get_to(report.replace);
  json.at("warnings").get_to(report.warnings);
  report.differed = StateFrom(json.at("differed"));
  report.left = StateFrom(json.at("left"));
  json.at("iterations").get_to(report.iterations);
  for (const Json& stream : json.at("streams")) report.streams.push_back(StreamFrom(stream));
  json.at("awaits").get_to(report.awaits);
  json.at("stacks").get_to(report.stacks);
  return report;
}

}  // namespace

FailureOrigin OriginOf(const CaseFailure& failure, bool after_abort) {
  if (failure.status == CPPOOL_MISMATCH) return FailureOrigin::kMismatch;
  if (after_abort) return FailureOrigin::kAfterAbort;
  if (failure.culprit != kernels::RuntimeError::kOwn || failure.status == CPPOOL_NCCL)
    return FailureOrigin::kPropagated;
  return IsSkip(ToFailureKind(failure.status)) ? FailureOrigin::kSkip : FailureOrigin::kOwn;
}

Json ToJson(const RankReport& report) {
  Json checks = Json::array(), streams = Json::array();
  for (const auto& check : report.checks) checks.push_back(protocol::ToJson(check, Number));
  for (const auto& stream : report.streams) streams.push_back(ToJson(stream));
  const RankFailure& failure = report.failure;
  return {{"rank", report.rank},
          {"phase", kPhases.at(static_cast<std::size_t>(report.phase))},
          {"failure",
           {{"status", static_cast<int>(failure.status)},
            {"text", failure.text},
            {"culprit", failure.culprit},
            {"gave_reason", failure.gave_reason},
            {"stage", failure.stage},
            {"origin", kOrigins.at(static_cast<std::size_t>(failure.origin))},
            {"order", failure.order}}},
          {"needs_probe", report.needs_probe},
          {"checks", std::move(checks)},
          {"gpu_ms", Stages(report.times, Number)},
          {"samples", Stages(report.samples, List)},
          {"work", Stages(report.work, Number)},
          {"extra", report.extra},
          {"leaks",
           {{"allocations", report.leaks.allocations},
            {"device_bytes", report.leaks.device_bytes},
            {"host_bytes", report.leaks.host_bytes}}},
          {"traceback", report.traceback},
          {"output", report.output},
          {"replace", report.replace},
          {"warnings", report.warnings},
          {"differed", report.differed},
          {"left", report.left},
          {"iterations", report.iterations},
          {"streams", std::move(streams)},
          {"awaits", report.awaits},
          {"stacks", report.stacks}};
}

RankReport RankReportFrom(const Json& json, const kernels::Place& place) {
  try {
    return ReadReport(json, place);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("a rank's report cannot be read: ") + error.what());
  }
}

}  // namespace cppool::daemon
