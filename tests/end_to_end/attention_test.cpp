#include "tests/end_to_end/attention_smoke.h"
#include "tests/files.h"

namespace cppool::test {

namespace {

void RunOnHost(int world_size) {
  DaemonProcess daemon(Host(world_size));
  RunAttentionSmoke(daemon, world_size);
}

}  // namespace

TEST_CASE("attention on the host, every schedule, 1 rank") { RunOnHost(1); }
TEST_CASE("attention on the host, every schedule, 2 ranks") { RunOnHost(2); }
TEST_CASE("attention on the host, every schedule, 4 ranks") { RunOnHost(4); }
#ifndef CPPOOL_TEST_SANITIZED  // ten times slower; the schedules' own tests run at every world size there too
TEST_CASE("attention on the host, every schedule, 6 ranks") { RunOnHost(6); }
TEST_CASE("attention on the host, every schedule, 8 ranks") { RunOnHost(8); }
#endif

TEST_CASE("a run without checks has no checks in its answer, and the same seed gives the same checks") {
  DaemonProcess daemon(Host(2));
  const auto run = [&](bool checks) {
    Json answer =
        daemon.Ask({{"op", "run"}, {"checks", checks}, {"params", {{"max_seqlen_q", 32}, {"seed", 7}}}});
    CHECK(answer.at("status") == "passed");
    CHECK(answer.at("seed") == 7);
    return answer.at("checks");
  };
  CHECK(run(false).empty());
  const Json first = run(true);
  CHECK_FALSE(first.empty());
  CHECK(run(true) == first);
}

TEST_CASE("attention on the host goes by the transport's calls, and copies between GPUs are skipped") {
  DaemonProcess daemon(Host(2));
  const auto run = [&](const char* transfers) {
    return daemon.Ask({{"op", "run"}, {"params", {{"max_seqlen_q", 32}, {"transfers", transfers}}}});
  };
  for (const char* transfers : {"auto", "comm"}) {
    const Json answer = run(transfers);
    CHECK(answer.at("status") == "passed");
    for (const Json& rank : answer.at("ranks")) CHECK(rank.at("transfers") == "comm");
  }
  const Json refused = run("peer");
  CHECK(refused.at("status") == "skipped");
  CHECK(refused.at("error") == "transfers 'peer' copies between GPUs, and the backend is host");
  const Json wrong = run("nvlink");
  CHECK(wrong.at("failure").at("kind") == "invalid_request");
}

TEST_CASE(
    "a request with parameters as strings, as Transformer Engine's worker gets them, passes without a "
    "sentinel") {
  DaemonProcess daemon(Host(2, {"--sentinel", ""}));
  const Json kwargs = {{"num_heads", "4"},        {"max_seqlen_q", "32"},  {"dtype", "fp16"},
                       {"qkv_format", "sbhd"},    {"is_training", "True"}, {"window_size", "(-1, 0)"},
                       {"softmax_scale", "None"}, {"fp8_bwd", "False"},    {"fa_pad_between_seqs", "False"},
                       {"log_level", "30"}};
  daemon.Send(Json{{"op", "run"}, {"kwargs", kwargs}}.dump());
  const auto line = daemon.ReadLine();
  REQUIRE(line);
  CHECK(Json::parse(*line).at("status") == "passed");
}

TEST_CASE("one launch on the host has to be asked for, and is refused where it cannot be") {
  DaemonProcess daemon(Host(2));
  const auto run = [&](Json params) {
    params["max_seqlen_q"] = 32;
    return daemon.Ask({{"op", "run"}, {"params", params}});
  };
  for (const char* launches : {"auto", "steps", "one"}) {
    for (const char* comm : {"p2p", "all_gather"}) {
      const Json answer = run({{"launches", launches}, {"cp_comm_type", comm}});
      CHECK(answer.at("status") == "passed");
      for (const Json& rank : answer.at("ranks"))
        CHECK(rank.at("launches") == (launches == std::string("one") ? "one" : "steps"));
    }
  }
  const auto refused = [&](Json params) {
    params["launches"] = "one";
    const Json answer = run(params);
    CHECK(answer.at("status") == "skipped");
    return answer.at("error").get<std::string>();
  };
  CHECK(refused({{"cp_comm_type", "a2a"}}) ==
        "launches 'one': it is for cp_comm_type 'p2p' and 'all_gather'");
  CHECK(refused({{"transfers", "comm"}}) ==
        "launches 'one': keys then come by calls of the transport (transfers 'comm')");
  CHECK(refused({{"dtype", "fp8"}, {"fp8_dpa", true}}) ==
        "launches 'one': the kernels 'host' do not take keys that arrive while they run here");
  CHECK(run({{"launches", "two"}}).at("failure").at("kind") == "invalid_request");
}

TEST_CASE("the report of a passed deadline names the piece of keys that a rank waits for") {
  DaemonProcess daemon(Host(2, {"--allow-faults"}));
  daemon.Ask({{"op", "hello"}});
  daemon.Send(Json{{"op", "run"},
                   {"deadline_ms", 1000},
                   {"fault", {{"kind", "stall"}, {"rank", 1}, {"stage", "forward/"}}},
                   {"params", {{"max_seqlen_q", 32}, {"launches", "one"}}}}
                  .dump());
  const Json answer = daemon.ReadAnswer();
  INFO(answer.dump(1));
  CHECK(answer.at("failure").at("kind") == "timeout");
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(Has(answer.at("error"),
            "rank 0: forward/p2p all steps, waiting for head 0 of keys and values from rank 1"));
}

}  // namespace cppool::test
