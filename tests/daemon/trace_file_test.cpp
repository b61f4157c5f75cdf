// Tests of the file that a trace is written to, and of what the dispatcher does with it.
#include "daemon/trace_file.h"

#include <filesystem>

#include "base/file_cache.h"
#include "tests/daemon/fake_case.h"
#include "tests/files.h"
#include "tests/trace_check.h"

namespace cppool::test {
namespace {

using kernels::TraceSlice;

TraceSlice Stage(int name, std::int64_t begin_ns, std::int64_t end_ns, int iteration = -1) {
  TraceSlice slice;
  slice.name = name;
  slice.begin_ns = begin_ns;
  slice.end_ns = end_ns;
  slice.iteration = iteration;
  return slice;
}

// A line for each slice of a track: name, begin and end in ns, depth.
std::vector<std::string> Lines(const CheckedTrace& trace, const std::string& process,
                               const std::string& name) {
  std::vector<std::string> lines;
  const TracedTrack* track = trace.Track(process, name);
  REQUIRE(track);
  for (const TracedSlice& slice : track->slices) {
    lines.push_back(slice.name + " " + std::to_string(slice.begin_ns) + " " + std::to_string(slice.end_ns) +
                    " " + std::to_string(slice.depth));
  }
  return lines;
}

}  // namespace

TEST_CASE("trace file: stages lie in their parents as long as one follows the other in an iteration") {
  daemon::RunTrace trace;
  trace.begin_ns = 1'000'000;
  daemon::RunTrace::Rank& rank = trace.ranks.emplace_back();
  rank.device = "a \"device\" \xff";
  rank.host.push_back({"run case", 1'000'100, 1'900'000});
  rank.work.streams = {"main"};
  rank.work.names = {"f/a", "f/a/waiting", "f/b", "inputs", "recv", "all_reduce"};
  const auto at = [](std::int64_t ns) { return 1'000'000 + ns; };
  rank.work.slices = {Stage(3, at(100), at(200)),    Stage(0, at(300), at(400), 0),
                      Stage(1, at(400), at(450), 0), Stage(0, at(450), at(500), 0),
                      Stage(2, at(500), at(600), 0), Stage(2, at(600), at(700), 0),
                      Stage(2, at(700), at(800), 1), Stage(2, at(900), at(1000), 1)};
  TraceSlice recv = Stage(4, at(300), at(400), 0), sum = Stage(5, at(1000), at(1000), -2);
  recv.kind = sum.kind = TraceSlice::Kind::kTransfer;
  recv.bytes = 12;
  recv.ranks = 2;
  recv.peer = 1;
  sum.unfinished = true;
  rank.work.slices.insert(rank.work.slices.begin(), {sum, recv});
  rank.work.dropped = 3;

  const TemporaryFolder folder;
  daemon::WriteTrace(folder.File("t"), trace);
  const CheckedTrace checked = CheckTrace(folder.File("t"));
  INFO(Json(checked.problems).dump(2));
  CHECK(checked.problems.empty());
  CHECK(Lines(checked, "rank 0", "main") ==
        std::vector<std::string>{"inputs 100 200 0", "f 300 700 0", "a 300 500 1",
                                 "recv from rank 1 300 400 2", "waiting 400 450 2", "b 500 600 1",
                                 "b 600 700 1", "f 700 800 0", "b 700 800 1", "f 900 1000 0", "b 900 1000 1",
                                 "all_reduce 1000 1000 2"});
  CHECK(checked.Track("rank 0", "main")->slices[3].args ==
        Json{{"bytes", 12}, {"ranks", 2}, {"peer", 1}, {"iteration", 0}});
  CHECK(checked.Track("rank 0", "main")->slices[4].args == Json{{"stage", "f/a/waiting"}, {"iteration", 0}});
  CHECK(checked.Track("rank 0", "main")->slices[11].args ==
        Json{{"bytes", 0}, {"ranks", 0}, {"iteration", "warmup"}, {"unfinished", true}});
  CHECK(checked.about.at("dropped_slices") == Json{3});
  CHECK(daemon::DescribeDropped(trace) ==
        "the trace has no room for all slices (65536 for each rank) and lacks 3 of rank 0: ask for fewer "
        "iterations");

  CHECK_THROWS_AS(daemon::WriteTrace(folder.File("none/t"), trace), base::FileError);
  REQUIRE(std::filesystem::create_directory(folder.File("d")));
  CHECK_THROWS_AS(daemon::WriteTrace(folder.File("d"), trace), base::FileError);
  CHECK_THROWS_WITH(daemon::WriteTrace("/proc/trace", trace),
                    "/proc/trace: cannot be written: no file can be made in /proc: name one elsewhere");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 2);
}

TEST_CASE("the check of traces sees what is not valid") {
  const TemporaryFolder folder;
  const auto problems =
      [&](const std::string& events) {
        std::ofstream(folder.File("t"))
            << R"({"displayTimeUnit": "ms", "otherData": {}, "traceEvents": [)"
               R"({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "p"}},)"
               R"({"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "ts": 0, "args": {"name": "t"}})"
            << events << "]}";
        return CheckTrace(folder.File("t")).problems.size();
      };
  const auto slice = [](const std::string& members) {
    return R"(, {"ph": "X", "cat": "c", "name": "n", "pid": 1, "args": {}, )" + members + "}";
  };
  CHECK(problems("") == 0);
  CHECK(problems(slice(R"("tid": 2, "ts": 0, "dur": 1)") + slice(R"("tid": 2, "ts": 0.5, "dur": 0.5)") +
                 slice(R"("tid": 2, "ts": 1, "dur": 0)")) == 0);
  CHECK(problems(slice(R"("tid": 2, "ts": 0, "dur": 1)") + slice(R"("tid": 2, "ts": 0.5, "dur": 0.6)")) == 1);
  for (const char* members :
       {R"("tid": 2, "ts": 0)", R"("tid": 2, "ts": 0, "dur": -1)", R"("tid": 3, "ts": 0, "dur": 1)",
        R"("tid": 2, "ts": "0", "dur": 1)", R"("tid": 2, "ts": -1, "dur": 1)"})
    CHECK(problems(slice(members)) == 1);
  CHECK(problems(R"(, {"ph": "Y", "name": "n", "pid": 1, "tid": 2, "ts": 0, "args": {}})") > 0);
  CHECK(problems(
            R"(, {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "ts": 0, "args": {"name": "t"}})") ==
        1);
}

TEST_CASE("a run without `trace` records none, and with it the answer says what the trace lacks") {
  Inside inside;
  const TemporaryFolder folder;
  inside.Run({{"action", "pass"}});
  inside.fake->trace.dropped = 5;
  const auto begun = [&] {
    const std::lock_guard lock(inside.fake->mutex);
    return std::count_if(inside.fake->calls.begin(), inside.fake->calls.end(),
                         [](const std::string& call) { return call.find("trace") != std::string::npos; });
  };
  CHECK(begun() == 0);
  const Json request = {
      {"op", "run"}, {"case", "fake"}, {"params", {{"action", "pass"}}}, {"trace", folder.File("t")}};
  const Json answer = inside.Send(request);
  CHECK(answer.at("status") == "passed");
  CHECK(begun() == 4);
  REQUIRE(answer.at("warnings").size() == 1);
  CHECK(answer.at("warnings").at(0) ==
        "the trace has no room for all slices (65536 for each rank) and lacks 5 of rank 0, 5 of "
        "rank 1: ask for fewer iterations");
  CHECK(CheckTrace(folder.File("t")).problems.empty());
}

TEST_CASE("a trace that cannot be written is a warning of a run that failed") {
  Inside inside;
  const TemporaryFolder folder;
  inside.fake->on_end = [&] { std::filesystem::remove_all(folder.path()); };
  const auto run = [&](const char* action) {
    std::filesystem::create_directories(folder.path());
    return inside.Send(
        {{"op", "run"}, {"case", "fake"}, {"params", {{"action", action}}}, {"trace", folder.File("t")}});
  };
  const Json failed = run("check fails");
  CHECK(failed.at("status") == "failed");
  REQUIRE(failed.at("warnings").size() == 1);
  CHECK(Has(failed.at("warnings").at(0), "there is no folder"));
  const Json passed = run("pass");
  CHECK(passed.at("status") == "error");
  CHECK(passed.at("failure").at("kind") == "internal");
  CHECK_FALSE(passed.contains("fatal"));
}

}  // namespace cppool::test
