// Traces on the host: valid against the format, in agreement with the answer, of failed cases too, and
// refused where no file can be.
#include <sys/resource.h>
#include <sys/stat.h>

#include "tests/end_to_end/trace_smoke.h"

namespace cppool::test {
namespace {

constexpr double kHostResolutionMs = 1e-6;

}  // namespace

TEST_CASE("traces on the host, every schedule") {
  const int world_size = GENERATE(1, 2, 4);
  DaemonProcess daemon(Host(world_size));
  RunTraceSmoke(daemon, world_size, kHostResolutionMs);
}

TEST_CASE("a trace has the stages and transfers of a user's case, and of a failed one what ran") {
  DaemonProcess daemon(Host(2, {"--case", CPPOOL_ODD_CASE}));
  const CheckedTrace passed = RunTraced(daemon, 2, {{"case", "odd"}}, kHostResolutionMs);
  CHECK(passed.about.at("case") == "odd");
  const TracedTrack* main = passed.Track("rank 1", "main");
  REQUIRE(main);
  REQUIRE(main->slices.size() == 2);
  CHECK(main->slices[0].args == Json{{"stage", "meet"}});
  CHECK(main->slices[1].name == "all_reduce");
  CHECK(main->slices[1].depth == 1);
  CHECK(main->slices[1].args == Json{{"bytes", 4}, {"ranks", 2}});

  const TemporaryFolder folder;
  const Json answer = daemon.Ask({{"op", "run"},
                                  {"case", "odd"},
                                  {"params", {{"action", "wait"}}},
                                  {"trace", folder.File("trace.json")}});
  INFO(answer);
  CHECK(answer.at("status") == "error");
  CHECK_FALSE(answer.contains("fatal"));
  const CheckedTrace failed = CheckTrace(folder.File("trace.json"));
  INFO(Json(failed.problems).dump(2));
  CHECK(failed.problems.empty());
  CHECK(failed.Slices("rank 0", "stage").empty());
  const std::vector<TracedSlice> stages = failed.Slices("rank 1", "stage"),
                                 transfers = failed.Slices("rank 1", "transfer");
  REQUIRE((stages.size() == 1 && transfers.size() == 1));
  for (const TracedSlice& slice : {stages[0], transfers[0]}) CHECK(slice.args.at("unfinished") == true);
  RunTraced(daemon, 2, {{"case", "odd"}}, kHostResolutionMs);
}

TEST_CASE("a trace that cannot be written is refused before anything runs, with what to do") {
  DaemonProcess daemon(Host(1));
  const TemporaryFolder folder;
  REQUIRE(mkfifo(folder.File("fifo").c_str(), 0600) == 0);
  std::ofstream(folder.File("file")) << "kept";
  const auto error = [&](const std::string& op, const Json& trace) {
    const Json answer = daemon.Ask({{"op", op}, {"trace", trace}, {"params", {{"max_seqlen_q", 32}}}});
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK_FALSE(answer.contains("fatal"));
    return answer.at("error").get<std::string>();
  };
  for (const char* op : {"run", "validate"}) {
    CHECK(Has(error(op, folder.File("none/t.json")),
              "there is no folder " + folder.File("none") + ": make it, or name a file elsewhere"));
    CHECK(Has(error(op, folder.path().string()), "it is a folder: name a file in it"));
    CHECK(Has(error(op, folder.File("fifo")), "it exists and is no regular file: name another one"));
    CHECK(Has(error(op, folder.File("file/t.json")), "is not a folder: name a file elsewhere"));
    CHECK(Has(error(op, ""), "\"trace\" must be a file's path"));
    CHECK(Has(error(op, 7), "\"trace\" must be a file's path, not 7"));
    CHECK(Has(error(op, std::string("a\0b", 3)), "without a NUL character"));
    if (geteuid() != 0) {  // root may write anywhere
      REQUIRE(chmod(folder.path().c_str(), 0500) == 0);
      CHECK(Has(error(op, folder.File("t.json")), "Permission denied: change the permissions of"));
      REQUIRE(chmod(folder.path().c_str(), 0700) == 0);
    }
  }
  const Json valid = daemon.Ask({{"op", "validate"}, {"trace", folder.File("t.json")}});
  CHECK(valid.at("ok") == true);
  CHECK_FALSE(std::filesystem::exists(folder.File("t.json")));
  // A request that is not run leaves an earlier file as it is; one that runs replaces it.
  daemon.Ask({{"op", "run"}, {"trace", folder.File("file")}, {"params", {{"head_dim_qk", 7}}}});
  CHECK(ReadFile(folder.File("file")) == "kept");
  daemon.Ask({{"op", "run"}, {"trace", folder.File("file")}, {"params", {{"max_seqlen_q", 32}}}});
  CHECK(CheckTrace(folder.File("file")).problems.empty());
}

TEST_CASE("a trace that meets the end of the disk is an error of a run that passed, and leaves no file") {
  DaemonProcess daemon(Host(1));
  const TemporaryFolder folder;
  const Json request = {{"op", "run"}, {"trace", folder.File("t.json")}, {"params", {{"max_seqlen_q", 32}}}};
  const rlimit small{1000, RLIM_INFINITY}, none{RLIM_INFINITY, RLIM_INFINITY};
  REQUIRE(prlimit(daemon.pid(), RLIMIT_FSIZE, &small, nullptr) == 0);
  const Json answer = daemon.Ask(request);
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("kind") == "internal");
  CHECK(Has(answer.at("error"),
            "trace: " + folder.File("t.json") + ": cannot be written: File too large: raise the limit"));
  CHECK_FALSE(answer.at("checks").empty());
  CHECK(std::filesystem::is_empty(folder.path()));
  REQUIRE(prlimit(daemon.pid(), RLIMIT_FSIZE, &none, nullptr) == 0);
  CHECK(daemon.Ask(request).at("status") == "passed");
  CHECK(CheckTrace(folder.File("t.json")).problems.empty());
}

}  // namespace cppool::test
