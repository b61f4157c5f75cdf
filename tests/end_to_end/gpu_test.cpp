// The end-to-end requests on GPUs, in worlds for which there are enough GPUs.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/end_to_end/attention_smoke.h"
#include "tests/end_to_end/trace_smoke.h"
#include "tests/end_to_end/user_case_smoke.h"
#include "tests/environment.h"
#include "tests/files.h"
#include "tests/gpus.h"

namespace cppool::test {
namespace {

template <typename Function>
void ForEachWorld(Function&& function) {
  for (const int world_size : {1, 2, 4})
    if (HasGpus(world_size)) function(world_size);
}

}  // namespace

TEST_CASE("attention on GPUs, every schedule") {
  ForEachWorld([](int world_size) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"});
    const Json hello = daemon.Ask({{"op", "hello"}});
    CHECK(hello.at("backend") == "cuda");
    CHECK(hello.at("transport") == "nccl");
    RunAttentionSmoke(daemon, world_size);
  });
}

TEST_CASE("the steps of attention have the same bits by copies between GPUs and by NCCL") {
  if (!HasGpus(2)) return;
  DaemonProcess daemon({"--world-size", "2", "--backend", "cuda", "--transport", "nccl"});
  for (const char* schedule : {"p2p", "all_gather", "a2a"}) {
    std::vector<std::string> digests;
    for (const char* transfers : {"comm", "peer", "auto"}) {
      CAPTURE(schedule, transfers);
      const Json answer = daemon.Ask({{"op", "run"},
                                      {"params",
                                       {{"cp_comm_type", schedule},
                                        {"transfers", transfers},
                                        {"launches", "steps"},
                                        {"max_seqlen_q", 1024},
                                        {"deterministic", true}}}});
      // Some GPUs do not reach each other.
      if (transfers == std::string("peer") && answer.at("status") == "skipped") continue;
      REQUIRE(answer.at("status") == "passed");
      std::string all;
      for (const Json& rank : answer.at("ranks")) {
        all += rank.at("digest").get<std::string>();
        if (transfers != std::string("auto")) CHECK(rank.at("transfers") == transfers);
      }
      digests.push_back(all);
    }
    CHECK(std::set<std::string>(digests.begin(), digests.end()).size() == 1);
  }
}

// Enough keys for pieces of some heads.
TEST_CASE("attention in one launch has the same bits in every run, with both schedules and transports") {
  if (!HasGpus(2)) return;
  std::set<std::string> digests;
  for (const char* transport : {"nccl", "peer"}) {
    DaemonProcess daemon({"--world-size", "2", "--backend", "cuda", "--transport", transport});
    for (const char* schedule : {"p2p", "all_gather"}) {
      for (const char* launches : {"auto", "one"}) {
        CAPTURE(transport, schedule, launches);
        const Json answer = daemon.Ask({{"op", "run"},
                                        {"params",
                                         {{"cp_comm_type", schedule},
                                          {"launches", launches},
                                          {"batch_size", 1},
                                          {"num_heads", 16},
                                          {"num_gqa_groups", 16},
                                          {"head_dim_qk", 128},
                                          {"max_seqlen_q", 16384},
                                          {"deterministic", true}}}});
        CAPTURE(answer.value("error", ""));
        // Some GPUs do not reach each other, or are not Hopper's.
        if (launches == std::string("one") && answer.at("status") == "skipped") return;
        REQUIRE(answer.at("status") == "passed");
        if (answer.at("ranks").at(0).at("launches") == "steps") return;
        std::string all;
        for (const Json& rank : answer.at("ranks")) all += rank.at("digest").get<std::string>();
        digests.insert(all);
      }
    }
  }
  CHECK(digests.size() == 1);
}

namespace {

// Every recipe of fp8 with every schedule, and each kind of attention with one recipe of each mode.
void RunFp8(DaemonProcess& daemon, int world_size) {
  const std::vector<Json> recipes = {
      {{"scaling_mode", "delayed"}, {"fp8_mha", true}, {"fp8_bwd", true}},
      {{"scaling_mode", "delayed"}, {"fp8_mha", false}, {"fp8_bwd", true}},
      {{"scaling_mode", "delayed"}, {"fp8_mha", true}, {"fp8_bwd", false}},
      {{"scaling_mode", "current"}, {"fp8_mha", false}, {"fp8_bwd", true}, {"f16_O", true}},
      {{"scaling_mode", "current"}, {"fp8_mha", true}, {"fp8_bwd", true}, {"f16_O", false}},
      {{"scaling_mode", "current"}, {"fp8_mha", false}, {"fp8_bwd", false}},
      {{"scaling_mode", "mxfp8"}, {"fp8_bwd", true}},
      {{"scaling_mode", "mxfp8"}, {"fp8_bwd", false}},
  };
  const std::vector<Json> kinds = {
      Json::object(),
      {{"qkv_format", "sbhd"}, {"attn_mask_type", "no_mask"}, {"head_dim_qk", 128}},
      {{"num_gqa_groups", 2}, {"head_dim_qk", 192}, {"head_dim_v", 128}, {"window_size", {40, 0}}},
      {{"head_dim_qk", 256}, {"attn_mask_type", "causal_bottom_right"}, {"return_max_logit", true}},
      {{"qkv_format", "thd"}, {"batch_size", 5}, {"pad_between_seqs", true}, {"softmax_type", "learnable"}},
      {{"attn_bias_type", "post_scale_bias"},
       {"bias_shape", "1hss"},
       {"head_dim_qk", 128},
       {"head_dim_v", 64}},
      {{"is_training", false}, {"attn_bias_type", "alibi"}},
  };
  for (const char* schedule : {"p2p", "all_gather", "a2a", "a2a+p2p"}) {
    if (std::string(schedule) == "a2a+p2p" && (world_size < 4 || world_size % 2)) continue;
    for (std::size_t recipe = 0; recipe < recipes.size(); ++recipe) {
      for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
        if (kind > 0 && recipe != 1 && recipe != 4 && recipe != 6) continue;
        Json params = kinds[kind];
        params.update(recipes[recipe]);
        params.update({{"dtype", "fp8"},
                       {"fp8_dpa", true},
                       {"cp_comm_type", schedule},
                       {"max_seqlen_q", 64 * world_size},
                       {"max_seqlen_kv", 64 * world_size},
                       {"num_heads", 8}});
        const Json answer = daemon.Ask({{"op", "run"}, {"params", params}});
        INFO(params.dump() << ": " << answer.dump());
        CHECK(answer.at("status") == "passed");
        if (answer.at("status") != "passed") continue;
        CHECK(std::any_of(answer.at("checks").begin(), answer.at("checks").end(), [](const Json& check) {
          return check.at("against") == "bits" && check.at("tensor") == "v";
        }));
      }
    }
  }
  CHECK(daemon.Wait() == 0);
}

}  // namespace

TEST_CASE("fp8 on GPUs: every recipe with every schedule") {
  ForEachWorld([](int world_size) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"});
    RunFp8(daemon, world_size);
  });
}

TEST_CASE("fp8 on one GPU that the ranks share: every recipe with every schedule") {
  if (!HasGpus()) return;
  for (const int world_size : {2, 4}) {
    DaemonProcess daemon(
        {"--world-size", std::to_string(world_size), "--backend", "cuda", "--transport", "peer"});
    RunFp8(daemon, world_size);
  }
}

TEST_CASE("the answer says what fp8 has multiplied: payloads on Hopper, where that is faster or asked for") {
  if (!HasGpus()) return;
  DaemonProcess daemon({"--world-size", "1", "--backend", "cuda"});
  const Json hello = daemon.Ask({{"op", "hello"}});
  const bool hopper = hello.at("devices").at(0).at("capability") == "9.0";
  for (const auto& [given, native] :
       {std::pair{Json{{"scaling_mode", "delayed"}, {"head_dim_qk", 128}}, true},
        {{{"scaling_mode", "current"}, {"head_dim_qk", 128}}, true},
        {{{"scaling_mode", "delayed"}, {"head_dim_qk", 64}}, false},
        {{{"scaling_mode", "current"}, {"head_dim_qk", 64}}, false},
        {{{"scaling_mode", "mxfp8"}, {"head_dim_qk", 128}}, false},
        {{{"scaling_mode", "current"}, {"head_dim_qk", 128}, {"fp8_products", "bf16"}}, false},
        {{{"scaling_mode", "current"}, {"head_dim_qk", 128}, {"attn_bias_type", "post_scale_bias"}}, false},
        {{{"scaling_mode", "current"}, {"head_dim_qk", 64}, {"fp8_products", "native"}}, true}}) {
    Json params{{"dtype", "fp8"}, {"fp8_dpa", true}, {"max_seqlen_q", 256}, {"num_heads", 4}};
    params.update(given);
    const Json answer = daemon.Ask({{"op", "run"}, {"params", params}});
    INFO(answer.dump());
    if (!hopper && params.value("fp8_products", "") == "native") {
      CHECK(answer.at("status") == "skipped");
      continue;
    }
    CHECK(answer.at("status") == "passed");
    CHECK(answer.at("kernels").at("fp8_products") == (native && hopper ? "native" : "bf16"));
  }
  CHECK(daemon.Wait() == 0);
}

// The resolution of a CUDA event.
constexpr double kEventMs = 5e-4;

TEST_CASE("traces on GPUs, every schedule: valid, inside the request, and in agreement with its times") {
  ForEachWorld([](int world_size) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"});
    RunTraceSmoke(daemon, world_size, kEventMs);
  });
}

TEST_CASE("traces on one GPU that the ranks share, every schedule") {
  if (!HasGpus()) return;
  DaemonProcess daemon({"--world-size", "4", "--backend", "cuda", "--transport", "peer"});
  RunTraceSmoke(daemon, 4, kEventMs);
}

TEST_CASE("a user's case, built against the installed prefix, on GPUs") {
  if (const std::string missing = UserCaseNeeds(); !missing.empty()) {
    WARN(missing);
    return;
  }
  ForEachWorld([](int world_size) { RunUserCase("cuda", world_size); });
}

// Work of a case runs on a thread of the driver's.
TEST_CASE("a case on GPUs that ends the process is named, a stack overflow on a stream too") {
  if (!HasGpus()) return;
  for (const auto& [action, what, function] :
       {std::tuple("exit everywhere", "called exit(42)", "Crash"),
        std::tuple("overflow", "crashed by signal 11", "Overflow"),
        std::tuple("overflow on stream", "crashed by signal 11", "Overflow")}) {
    DaemonProcess daemon(
        {"--world-size", "2", "--backend", "cuda", "--transport", "peer", "--case", CPPOOL_ODD_CASE});
    daemon.Send(Json{{"op", "run"}, {"case", "odd"}, {"params", {{"action", action}}}}.dump());
    const int code = daemon.Wait();
    INFO(action << ": " << code << ": " << daemon.Stderr());
    CHECK(code == (std::string(action) == "exit everywhere" ? 42 : 1000 + SIGSEGV));
    const std::vector<Json> crashes = daemon.CrashLines();
    REQUIRE(crashes.size() == 1);
    CHECK(crashes[0].at("library") == CPPOOL_ODD_CASE);
    CHECK(Has(crashes[0].at("error"), what));
    CHECK(Has(crashes[0].at("stack").dump(), function));
  }
}

TEST_CASE("attention on one GPU that the ranks share, every schedule") {
  if (!HasGpus()) return;
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string first = visible ? std::string(visible).substr(0, std::string(visible).find(',')) : "0";
  const Environment one("CUDA_VISIBLE_DEVICES", first);
  for (const int world_size : {2, 4, 8}) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"});
    const Json hello = daemon.Ask({{"op", "hello"}});
    CHECK(hello.at("transport") == "peer");
    REQUIRE(hello.at("devices").size() == static_cast<std::size_t>(world_size));
    for (const Json& device : hello.at("devices"))
      CHECK(device.at("uuid") == hello.at("devices").at(0).at("uuid"));
    RunAttentionSmoke(daemon, world_size);
  }
}

TEST_CASE("more ranks than devices share the devices, but not with NCCL") {
  if (!HasGpus()) return;
  const int devices = kernels::CountCudaDevices();
  const std::string more = std::to_string(devices + 1);
  DaemonProcess refused({"--world-size", more, "--transport", "nccl"});
  CHECK(refused.Wait() == 2);
  INFO(refused.Stderr());
  CHECK(Has(refused.Stderr(), "--world-size " + more));
  CHECK(Has(refused.Stderr(), "CUDA sees " + std::to_string(devices) + " device"));
  CHECK(Has(refused.Stderr(), "--transport peer"));
  DaemonProcess shared({"--world-size", more});
  const Json hello = shared.Ask({{"op", "hello"}});
  CHECK(hello.at("backend") == "cuda");
  CHECK(hello.at("transport") == "peer");
  CHECK(shared.Wait() == 0);
}

TEST_CASE("a user's kernels in CUDA, built against the installed prefix, under every schedule") {
  if (const std::string missing = UserCaseNeeds(); !missing.empty()) {
    WARN(missing);
    return;
  }
  const UserKernels& built = BuildUserKernels();
  ForEachWorld([&](int world_size) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"}, built.daemon);
    for (const char* comm : {"p2p", "all_gather", "a2a"}) {
      for (const bool training : {false, true}) {
        const Json params = {{"cp_comm_type", comm},  {"num_gqa_groups", 2},
                             {"head_dim_qk", 128},    {"softmax_type", "learnable"},
                             {"deterministic", true}, {"is_training", training}};
        const Json answer = daemon.Ask(
            {{"op", "run"}, {"kernels", training ? built.with_backward : built.forward}, {"params", params}});
        INFO(answer.dump());
        CHECK(answer.at("status") == "passed");
        CHECK(answer.at("kernels").at("name") == "warp");
      }
    }
    const Json refused = daemon.Ask({{"op", "validate"}, {"kernels", built.forward}});
    CHECK(refused.at("error") == "warp: it has no backward pass, and is_training is true");
    CHECK(daemon.Wait() == 0);
  });
}

}  // namespace cppool::test
