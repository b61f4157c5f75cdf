// Kernels of a user's own in CUDA: what the checks find out about bad ones, versions of one in a warm daemon,
// and --watch.
#include <algorithm>
#include <cstdio>
#include <set>
#include <string>

#include <cppool/compile.h>
#include <cppool/pool.h>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/client/watched_run.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/end_to_end/replacement.h"
#include "tests/environment.h"
#include "tests/files.h"
#include "tests/gpus.h"

namespace cppool::test {
namespace {

std::set<std::string> Against(const Json& answer, bool ok) {
  std::set<std::string> against;
  for (const Json& check : answer.at("checks"))
    if (check.at("ok") == ok) against.insert(check.at("against").get<std::string>());
  return against;
}

}  // namespace

TEST_CASE("the checks find what is wrong with kernels in CUDA that seem right, and say what") {
  if (!HasGpus()) return;
  DaemonProcess daemon({"--world-size", "1", "--backend", "cuda"});
  // With iterations before the one that is checked, since a kernel that does not wait for its inputs may not
  // find them in the first one.
  const auto run = [&](const std::string& name) {
    return daemon.Ask({{"op", "run"},
                       {"kernels", CPPOOL_BAD_KERNELS "," + name},
                       {"warmup", 3},
                       {"params",
                        {{"is_training", false},
                         {"deterministic", true},
                         {"batch_size", 1},
                         {"num_heads", 1},
                         {"max_seqlen_q", 34},
                         {"head_dim_qk", 64}}}});
  };
  const Json right = run("warp");
  INFO(right.dump());
  CHECK(right.at("status") == "passed");
  CHECK(Against(right, true) ==
        std::set<std::string>{"late_inputs", "no_cp", "oracle", "rerun", "strides", "workspace"});

  const Json devices = daemon.Ask({{"op", "hello"}}).at("devices");
  const bool starts_early = std::stod(devices.at(0).at("capability").get<std::string>()) >= 9;
  struct {
    const char *name, *against, *error;
    bool alone;  // no other check fails
  } const cases[] = {
      {"writes_behind", "", "kernel writes_behind wrote behind the end of out", false},
      {"keeps_workspace", "workspace",
       "kernel keeps_workspace: its results differ when its workspace holds NaN: it must write its workspace "
       "before",
       false},
      {"takes_packed", "strides",
       "kernel takes_packed: its results differ when its rows lie 64 bytes apart and its workspace holds "
       "zeros: it "
       "must use the strides",
       true},
      {"drifts", "rerun", "against rerun: ", false},
      {"early_launch", "late_inputs",
       "kernel early_launch: its results differ when its inputs are written right before the call, by a slow "
       "kernel "
       "on the same stream: it must wait for the work on its stream",
       true},
      {"own_stream", "late_inputs", "kernel own_stream: its results differ when ", false},
  };
  for (const auto& bad : cases) {
    if (bad.name == std::string("early_launch") && !starts_early) {
      WARN("early_launch is skipped: the device is older than sm_90");
      continue;
    }
    const Json answer = run(bad.name);
    INFO(answer.dump());
    CHECK(answer.at("status") == "failed");
    CHECK_FALSE(answer.contains("fatal"));
    CHECK(answer.at("error").get<std::string>().find(bad.error) != std::string::npos);
    const std::set<std::string> failed = Against(answer, false);
    if (*bad.against != 0) CHECK(failed.count(bad.against) == 1);
    if (bad.alone) CHECK(failed.size() == 1);
  }
  CHECK(run("warp").at("status") == "passed");
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a warm daemon on a GPU runs each version of a kernel, until it has loaded as many as it may") {
  if (!HasGpus()) return;
  PoolOptions options;
  options.daemon = CPPOOL_DAEMON;
  options.world_size = 2;
  options.backend = "cuda";
  options.retries = 0;
  CheckReplacement(options, CPPOOL_BAD_KERNELS, [](Pool& pool, const std::string& file) {
    RunOptions run;
    run.kernels = file + ",warp";
    return pool.Run({{"is_training", false}, {"max_seqlen_q", 32}, {"num_heads", 2}}, run);
  });
}

TEST_CASE(
    "bench --baseline on a GPU: an unchanged build is not slower, a slower one is, and other rows are "
    "missed") {
  if (!HasGpus()) return;
  const TemporaryFolder folder;
  const std::string saved = folder.File("saved.json");
  const auto bench = [](const std::string& options) {
    return RunChild("'" CPPOOL_COMMAND "' bench --backend cuda --world-size 1 --repeat 20 " + options);
  };
  const auto compare = [&](const std::string& options) {
    return bench("--baseline '" + saved + "' " + options);
  };
  REQUIRE(bench("--param max_seqlen_q=1k --save '" + saved + "'").exit_code == 0);
  const Child same = compare("--param max_seqlen_q=1k --slower-than 100");  // a test does not judge speed
  INFO(same.output);
  CHECK(same.exit_code == 0);
  CHECK(same.output.find(": 0 slower, 1 not, 0 not in it") != std::string::npos);
  const Child other = compare("--param max_seqlen_q=512");
  CHECK(other.exit_code == 4);
  CHECK(other.output.find("not in " + saved + ": W=1 {\"max_seqlen_kv\":512") != std::string::npos);

  Json file = Json::parse(ReadFile(saved));
  for (auto& [name, stage] : file["rows"][0]["measured"]["stages"].items())
    for (Json& round : stage["rounds"]) round = round.get<double>() / 1000;
  WriteFile(saved, file.dump());
  CHECK(compare("--param max_seqlen_q=1k --slower-than 100").exit_code == 3);
}

TEST_CASE("a crash on GPUs that does not come back is flaky, and the run goes on in a new daemon") {
  if (!HasGpus()) return;
  const TemporaryFolder folder;
  const Environment daemon("CPPOOL_DAEMON", CPPOOL_DAEMON);
  const std::string suite = folder.File("suite.json");
  WriteFile(suite, R"({"cells": [{"set": {"max_seqlen_q": 256}},
                                 {"case": "polluting", "set": {"dread": "", "by": "abort", "only": "x.", "log": ")" +
                       folder.File("log") + R"("}},
                                 {"set": {"max_seqlen_q": 512}}]})");
  const auto run = [&](const std::string& more) {
    std::remove(folder.File("log").c_str());
    return RunChild("'" CPPOOL_COMMAND "' run --backend cuda --transport peer --load '" CPPOOL_POLLUTING_CASE
                    "' --suite '" +
                    suite + "' " + more);
  };
  const Child failed = run("");
  INFO(failed.output);
  CHECK(failed.exit_code == 1);
  CHECK(failed.output.find("FLAKY polluting W=2\n  flaky (passed at attempt 2)\n") != std::string::npos);
  CHECK(failed.output.find("rank 0 crashed by signal 6 (Aborted) in case 'polluting'") != std::string::npos);
  CHECK(failed.output.ends_with("2 passed, 0 failed, 0 skipped, 1 flaky\n"));
  const Child allowed = run("--retries 1 --quiet");
  CHECK(allowed.exit_code == 0);
  CHECK(allowed.output.find("  flaky (passed at attempt 2)\n") != std::string::npos);
}

TEST_CASE("run --watch --kernels compiles a .cu at each save and runs the suite again on GPUs") {
  if (!HasGpus()) return;
  const TemporaryFolder folder;
  const Environment cache("CPPOOL_CACHE", folder.File("cache"));
  const Environment daemon("CPPOOL_DAEMON", CPPOOL_DAEMON);
  const std::string source = folder.File("forward.cu"), text = ReadFile(CPPOOL_EXAMPLE_KERNEL);
  WriteFile(source, text);
  try {
    Compile(source);
  } catch (const CompileError& error) {
    if (std::string(error.what()).starts_with("there is no compiler")) {
      WARN("skipped: " << error.what());
      return;
    }
    throw;
  }
  WatchedRun run({"--kernels", source, "--suite", "smoke", "--filter", "world_size=2", "--backend", "cuda",
                  "--param", "is_training=false"});
  CheckWatchRounds(run, source, Replaced(text, "most + logf(sum)", "most + logf(sum) + 1"));
  CHECK(run.End());
}

}  // namespace cppool::test
