#include "tests/end_to_end/attention_smoke.h"

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

}  // namespace cppool::test
