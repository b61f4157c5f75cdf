// Cells of every schedule with the kernels "cudnn", on one GPU and on ranks that share it or have one each.
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/gpus.h"

namespace cppool::test {
namespace {

std::vector<Json> Kinds() {
  return {
      {{"dtype", "fp16"}, {"qkv_format", "sbhd"}, {"attn_mask_type", "no_mask"}},
      {{"num_gqa_groups", 2}, {"head_dim_qk", 128}},
      {{"num_gqa_groups", 1}, {"max_seqlen_kv", 192}, {"attn_mask_type", "no_mask"}},
      {{"head_dim_qk", 128}, {"head_dim_v", 64}, {"is_training", false}},
      {{"max_seqlen_kv", 192}, {"attn_mask_type", "causal_bottom_right"}},
      {{"window_size", {40, 0}}},
      {{"attn_mask_type", "no_mask"}, {"window_size", {40, 20}}},
      {{"qkv_format", "thd"}, {"batch_size", 3}, {"pad_between_seqs", true}, {"softmax_type", "learnable"}},
      {{"attn_mask_type", "padding_causal"}, {"deterministic", true}},
      {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "1hss"}},
      {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "bhss"}, {"attn_mask_type", "no_mask"}},
      {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "111s"}, {"is_training", false}},
      {{"attn_bias_type", "alibi"}},
      {{"attn_bias_type", "alibi"}, {"attn_mask_type", "no_mask"}, {"return_max_logit", true}},
      {{"return_max_logit", true}, {"qkv_format", "thd"}, {"batch_size", 3}},
  };
}

Json Run(DaemonProcess& daemon, const std::string& schedule, Json params) {
  params["cp_comm_type"] = schedule;
  params["max_seqlen_q"] = 96;
  if (!params.contains("max_seqlen_kv")) params["max_seqlen_kv"] = 96;
  params["num_heads"] = 8;
  return daemon.Ask({{"op", "run"}, {"id", params}, {"params", params}, {"kernels", "cudnn"}, {"repeat", 2}});
}

void ExpectPassed(const Json& answer, int world_size) {
  INFO(answer);
  REQUIRE(answer.at("status") == "passed");
  CHECK(answer.at("kernels").at("name") == "cudnn");
  CHECK(answer.at("kernels").at("version").get<std::string>().starts_with("9."));
  CHECK(answer.at("ranks").size() == static_cast<std::size_t>(world_size));
}

}  // namespace

TEST_CASE("cuDNN under every schedule") {
  if (!HasGpus()) return;
  for (const int world_size : {2, 4}) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"});
    std::vector<std::string> schedules = {"p2p", "all_gather", "a2a"};
    if (world_size == 4) schedules = {"a2a+p2p"};
    for (const std::string& schedule : schedules) {
      const Json answer = Run(daemon, schedule, Json::object());
      if (answer.at("status") == "skipped" &&
          answer.at("error").get<std::string>().find("not found") != std::string::npos) {
        WARN(answer.at("error"));
        return;
      }
      ExpectPassed(answer, world_size);
    }
    // The kinds with the schedules by turns.
    std::size_t next = 0;
    for (const Json& kind : Kinds())
      ExpectPassed(Run(daemon, schedules[next++ % schedules.size()], kind), world_size);

    const Json skipped =
        Run(daemon, schedules[0], {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "111s"}});
    INFO(skipped);
    CHECK(skipped.at("status") == "skipped");
    CHECK(skipped.at("error").get<std::string>().find("cudnn") != std::string::npos);
    CHECK(daemon.Wait() == 0);
  }
}

}  // namespace cppool::test
