// A traced run of attention, for end-to-end tests of both runtimes: what the trace says agrees with the
// answer.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"
#include "tests/trace_check.h"

namespace cppool::test {

// Stages last as long as gpu_ms says: the sum over the stage's slices on all streams. On the main stream
// those of its parts count for it, too, and are in the slice. `resolution_ms`: of a time of a stream.
inline void CheckStageTimes(const CheckedTrace& trace, const Json& rank, double resolution_ms) {
  const std::string process = "rank " + std::to_string(rank.at("rank").get<int>());
  for (const auto& [stage, ms] : rank.at("gpu_ms").items()) {
    double sum = 0;
    int intervals = 0;  // that gpu_ms adds up
    for (const TracedTrack& track : trace.tracks) {
      if (track.process != process) continue;
      for (const TracedSlice& slice : track.slices) {
        if (slice.category != "stage" || slice.args.at("stage") != stage) continue;
        if (track.name != "main" && !slice.leaf) continue;
        sum += static_cast<double>(slice.end_ns - slice.begin_ns) * 1e-6;
        intervals += static_cast<int>(
            std::count_if(track.slices.begin(), track.slices.end(), [&](const TracedSlice& part) {
              return part.category == "stage" && part.leaf && part.begin_ns >= slice.begin_ns &&
                     part.end_ns <= slice.end_ns;
            }));
      }
    }
    INFO(process << " " << stage << ": " << intervals << " intervals of " << sum << " ms, gpu_ms " << ms);
    CHECK(intervals > 0);
    // The trace has the device's times at the rate of the host's clock, which differs by less than 1e-4.
    CHECK(std::abs(sum - ms.get<double>()) <= 2e-4 * ms.get<double>() + 4 * resolution_ms * intervals);
  }
}

// What each rank has sent to each other one has been received, as many bytes, and no receive ends before its
// send begins. Returns the number of messages.
inline std::size_t CheckMessages(const CheckedTrace& trace, int world_size, double clock_ns) {
  struct Messages {
    std::vector<std::int64_t> times;
    std::int64_t bytes = 0;
  };
  std::map<std::pair<int, int>, Messages> sent, received;  // by sender and receiver
  std::size_t count = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    for (const TracedSlice& slice : trace.Slices("rank " + std::to_string(rank), "transfer")) {
      INFO(slice.name << " " << slice.args);
      CHECK(slice.args.at("bytes") > 0);
      CHECK(slice.args.at("ranks") >= 1);
      if (!slice.args.contains("peer")) continue;
      const int peer = slice.args.at("peer");
      if (slice.name == "push to rank " + std::to_string(peer)) continue;  // under the receiver's kernel
      CHECK((peer >= 0 && peer < world_size && peer != rank));
      const bool send = slice.name == "send to rank " + std::to_string(peer);
      if (!send) CHECK(slice.name == "recv from rank " + std::to_string(peer));
      Messages& messages = send ? sent[{rank, peer}] : received[{peer, rank}];
      messages.times.push_back(send ? slice.begin_ns : slice.end_ns);
      messages.bytes += slice.args.at("bytes").get<std::int64_t>();
      ++count;
    }
  }
  CHECK(sent.size() == received.size());
  for (auto& [pair, from] : sent) {
    Messages& to = received[pair];
    CHECK(from.bytes == to.bytes);
    REQUIRE(from.times.size() == to.times.size());
    // Calls of one group begin together: in the order of their times the messages match.
    std::sort(from.times.begin(), from.times.end());
    std::sort(to.times.begin(), to.times.end());
    for (std::size_t i = 0; i < from.times.size(); ++i)
      CHECK(static_cast<double>(to.times[i]) >= static_cast<double>(from.times[i]) - clock_ns);
  }
  return count;
}

// Runs a case with `trace` and checks the file.
inline CheckedTrace RunTraced(DaemonProcess& daemon, int world_size, Json request, double resolution_ms) {
  const TemporaryFolder folder;
  request["op"] = "run";
  request["trace"] = folder.File("trace.json");
  const Json answer = daemon.Ask(request);
  INFO(answer);
  REQUIRE(answer.at("status") == "passed");
  CheckedTrace trace = CheckTrace(folder.File("trace.json"));
  INFO(Json(trace.problems).dump(2));
  REQUIRE(trace.problems.empty());
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);  // nothing else was left

  std::vector<std::string> processes{"cppoold"};
  for (int rank = 0; rank < world_size; ++rank) processes.push_back("rank " + std::to_string(rank));
  CHECK(trace.processes == processes);
  CHECK(trace.about.at("dropped_slices") == Json(std::vector<int>(static_cast<std::size_t>(world_size), 0)));

  double clock_ns = 0;  // how far the clocks of two ranks may differ
  for (const Json& error : trace.about.at("clock_error_us"))
    clock_ns = std::max(clock_ns, 2e3 * error.get<double>());
  clock_ns += 2e6 * resolution_ms;
  const TracedTrack* requests = trace.Track("cppoold", "requests");
  REQUIRE(requests);
  const auto run = std::find_if(requests->slices.begin(), requests->slices.end(),
                                [](const TracedSlice& slice) { return slice.name == "run on all ranks"; });
  REQUIRE(run != requests->slices.end());
  CHECK(static_cast<double>(run->end_ns) * 1e-6 <= answer.at("wall_ms").get<double>());
  for (const TracedTrack& track : trace.tracks) {
    if (track.process == "cppoold") continue;
    for (const TracedSlice& slice : track.slices) {
      CHECK(static_cast<double>(slice.begin_ns) >= static_cast<double>(run->begin_ns) - clock_ns);
      CHECK(static_cast<double>(slice.end_ns) <= static_cast<double>(run->end_ns) + clock_ns);
    }
  }
  if (request.value("repeat", 1) == 1 && request.value("warmup", 0) == 0)
    for (const Json& rank : answer.at("ranks")) CheckStageTimes(trace, rank, resolution_ms);
  CheckMessages(trace, world_size, clock_ns);
  return trace;
}

// Every schedule.
inline void RunTraceSmoke(DaemonProcess& daemon, int world_size, double resolution_ms) {
  for (const char* schedule : {"p2p", "all_gather", "a2a", "a2a+p2p"}) {
    if (std::string(schedule) == "a2a+p2p" && (world_size < 4 || world_size % 2)) continue;
    INFO(schedule);
    const Json params = {
        {"cp_comm_type", schedule}, {"max_seqlen_q", 64}, {"num_heads", 8}, {"batch_size", 1}};
    const CheckedTrace trace = RunTraced(daemon, world_size, {{"params", params}}, resolution_ms);
    const std::vector<TracedSlice> transfers = trace.Slices("rank 0", "transfer");
    const auto messages = std::count_if(transfers.begin(), transfers.end(),
                                        [](const TracedSlice& slice) { return slice.args.contains("peer"); });
    CHECK((messages > 0) == (world_size > 1));
  }
  // Iterations, and what the main stream waits for.
  const CheckedTrace trace = RunTraced(
      daemon, world_size,
      {{"params", {{"max_seqlen_q", 64}}}, {"warmup", 1}, {"repeat", 2}, {"checks", false}, {"waits", true}},
      resolution_ms);
  std::map<std::string, int> forward, waiting;
  const TracedTrack* main = trace.Track("rank 0", "main");
  REQUIRE(main);
  for (const TracedSlice& slice : main->slices) {
    if (slice.category != "stage" || !slice.args.contains("iteration")) continue;
    forward[slice.args.at("iteration").dump()] += slice.args.at("stage") == "forward";
    waiting[slice.args.at("iteration").dump()] += slice.name == "waiting" && slice.depth == 2;
  }
  CHECK(forward == std::map<std::string, int>{{"\"warmup\"", 1}, {"0", 1}, {"1", 1}});
  for (const auto& [iteration, waits] : waiting) CHECK(waits > 0);
}

}  // namespace cppool::test
