// Runs the attention case on four ranks of the host backend with a fault, as one place or as two places of
// two ranks each, whose reports cross as text, and prints the answer: place_run KIND PLACES. In a program of
// its own, since a fault may end the process or never end.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/attention_case/attention_case.h"
#include "daemon/case_run.h"
#include "daemon/crash_reporter.h"
#include "daemon/local_ranks.h"
#include "daemon/log.h"
#include "protocol/json_text.h"

namespace cppool::test {
namespace {

using daemon::LocalRanks;
using daemon::Meeting;
using daemon::RankReport;
using daemon::RankRunner;
using daemon::World;
using protocol::Json;

constexpr int kRanks = 4;
// After an abort and for the probe: more than any machine needs.
constexpr daemon::FailureLimits kLimits{std::chrono::milliseconds(200), std::chrono::seconds(20),
                                        std::chrono::seconds(20)};

// What a rank's report is on the other side of a pipe.
RankReport AsText(const RankReport& report, const kernels::Place& place) {
  return daemon::RankReportFrom(protocol::ParseJson(protocol::JsonText(ToJson(report))), place);
}

class RanksBehindText : public RankRunner {
 public:
  explicit RanksBehindText(std::shared_ptr<LocalRanks> ranks) : ranks_(std::move(ranks)) {}
  const kernels::Place& place() const override { return ranks_->place(); }
  void Start(std::shared_ptr<Meeting> meeting, Sink sink) override { ranks_->Start(meeting, Through(sink)); }
  void StartProbe(std::shared_ptr<Meeting> meeting, std::uint64_t round, Sink sink) override {
    ranks_->StartProbe(meeting, round, Through(sink));
  }
  void Recover(std::chrono::milliseconds limit) override { ranks_->Recover(limit); }
  void Abort(const std::string& reason) override { ranks_->Abort(reason); }
  void Profile(bool begin) override { ranks_->Profile(begin); }
  void Wait() override { ranks_->Wait(); }
  std::vector<RankReport> Snapshots(bool stacks) const override {
    std::vector<RankReport> reports;
    for (const RankReport& report : ranks_->Snapshots(stacks)) reports.push_back(AsText(report, place()));
    return reports;
  }
  daemon::CrashPlace PlaceOf(pid_t thread) const override { return ranks_->PlaceOf(thread); }
  void MoveTrace(daemon::RunTrace& trace) override { ranks_->MoveTrace(trace); }

 private:
  Sink Through(const Sink& sink) const {
    return [sink, place = place()](const RankReport& report) { sink(AsText(report, place)); };
  }
  const std::shared_ptr<LocalRanks> ranks_;
};

std::shared_ptr<daemon::PreparedRun> Prepared(const std::string& kind) {
  daemon::CaseRegistry registry;
  registry.Add(AttentionCase(), "built in");
  Json line = {{"op", "run"}, {"params", {{"max_seqlen_q", 64}, {"deterministic", true}}}, {"repeat", 3}};
  if (kind == "sampling")
    line["sampling"] = {{"precision", 0.9}, {"max_ms", 60000}};
  else if (kind != "none")
    line["fault"] = {{"kind", kind}, {"rank", 2}};
  const auto parsed = protocol::ParseRequest(line.dump());
  return daemon::Prepare(registry, std::get<protocol::RunRequest>(parsed.operation), "host", kRanks,
                         daemon::FaultMeans{"half an answer", [](std::string_view) {}});
}

int Run(const std::string& kind, int places) {
  const auto transport = kernels::CreateHostTransport(kRanks);
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<std::future<void>> opened;
  for (int place = 0; place < places; ++place) {
    const int ranks = kRanks / places;
    worlds.push_back(std::make_unique<World>(
        kernels::CreateHostBackend(kernels::Place(kRanks, place * ranks, ranks), transport)));
    opened.push_back(std::async(std::launch::async, [&world = *worlds.back()] {
      world.Open(World::Clock::now() + std::chrono::seconds(60));
    }));
  }
  for (auto& open : opened) open.get();
  const auto execute = [&](const std::string& what, std::chrono::milliseconds deadline) {
    const auto prepared = Prepared(what);
    daemon::RankRunners runners;
    for (const auto& world : worlds) {
      auto ranks = std::make_shared<LocalRanks>(*world, prepared, what);
      if (places == 1)
        runners.push_back(std::move(ranks));
      else
        runners.push_back(std::make_shared<RanksBehindText>(std::move(ranks)));
    }
    const auto run = std::make_shared<daemon::CaseRun>(runners, prepared,
                                                       std::make_shared<protocol::RunControl>(), kLimits);
    static daemon::CaseRun* current = nullptr;
    current = run.get();
    static const daemon::CrashReporter reporter(
        [](std::string_view line) { [[maybe_unused]] const auto n = write(1, line.data(), line.size()); },
        {[](pid_t thread) { return current->PlaceOf(thread); }, nullptr});
    auto result = std::async(std::launch::async, [&] { return run->Execute(); });
    const bool in_time = result.wait_for(deadline) == std::future_status::ready;
    const Json answer = protocol::ToJson(in_time ? result.get() : run->TimedOut(deadline), std::nullopt);
    std::printf("\nanswer: %s\n", protocol::JsonText(answer).c_str());
    std::fflush(stdout);
    if (answer.contains("fatal")) _exit(3);
  };
  const bool hangs = kind == "stall" || kind == "stall_host" || kind == "skip_collective";
  execute(kind, std::chrono::seconds(hangs ? 2 : 60));
  execute("none", std::chrono::seconds(60));  // on the same world
  return 0;
}

}  // namespace
}  // namespace cppool::test

// As in cppoold: what ends the process by it is reported.
extern "C" void exit(int code) noexcept { cppool::daemon::CrashReporter::EndByExit(code); }

int main(int argc, char** argv) {
  cppool::daemon::SetUpLog("off");
  return argc == 3 ? cppool::test::Run(argv[1], std::atoi(argv[2])) : 2;
}
