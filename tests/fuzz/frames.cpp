// What a rank process sends: each line of the input is a frame.
#include <algorithm>
#include <cstdint>
#include <exception>

#include "daemon/process_frames.h"
#include "daemon/timeout_report.h"
#include "protocol/framing.h"
#include "protocol/request.h"
#include "tests/fuzz/property.h"

namespace cppool::fuzz {
namespace {

using daemon::RankReport;
using protocol::Json;

const kernels::Place kPlace(2);

// Requires that a report can be sent on: to JSON and back it stays the same.
void RequireSame(const RankReport& report) {
  const Json json = ToJson(report);
  const std::string text = protocol::JsonText(json);
  Require(IsUtf8(text), "a report is UTF-8");
  Require(ToJson(daemon::RankReportFrom(protocol::ParseJson(text, 200), kPlace)) == json,
          "a report is the same when it is written and read again", text);
}

void Take(const Json& frame) {
  const std::string name = daemon::TextOf(frame, "frame");
  if (name == "stacks") {
    RankReport report;
    report.phase = daemon::RankPhase::kRunning;
    report.stacks = daemon::StacksOf(frame);
    report.streams.emplace_back();
    for (const daemon::Collective& each : daemon::CollectivesOf(frame)) report.streams[0].doing = each.name;
    Require(!daemon::DescribeRank(report).empty(), "where a rank is has a text");
    return;
  }
  if (name == "mark" && !frame.contains("status")) return void(daemon::SamplesFrom(frame));
  if (name != "mark" && name != "report") return;
  RankReport report;
  report.failure = daemon::FailureFrom(frame);
  if (name == "report") daemon::ReadReport(frame, kPlace, report);
  if (frame.contains("trace")) daemon::TraceFrom(frame.at("trace"));
  RequireSame(report);
}

}  // namespace
}  // namespace cppool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cppool;
  protocol::LineReader lines(1 << 16);
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  for (std::size_t at = 0; at < size; at += 7) lines.Append(input.substr(at, 7));  // in pieces, as they come
  lines.Append("\n");
  daemon::StacksFrom(std::string(input));
  while (const auto line = lines.Next()) {
    if (line->overlong) return 0;  // the rank is killed
    protocol::Json frame;
    try {
      frame = protocol::ParseJson(line->text, 100);
    } catch (const protocol::InvalidRequest& error) {
      fuzz::RequireErrorText(error.what());
      return 0;  // likewise
    }
    if (!frame.is_object()) return 0;
    try {
      fuzz::Take(frame);
    } catch (const std::exception& error) {
      fuzz::Require(*error.what() != '\0', "an error has a text");
    }
  }
  return 0;
}
