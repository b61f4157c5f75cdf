// Attention requests for end-to-end tests of both runtimes.
#pragma once

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"

namespace cppool::test {

// Runs every schedule with each kind of attention, in small sizes, on one daemon, and checks every answer.
inline void RunAttentionSmoke(DaemonProcess& daemon, int world_size) {
  const std::vector<Json> kinds = {
      Json::object(),
      {{"dtype", "fp16"}, {"qkv_format", "sbhd"}, {"attn_mask_type", "no_mask"}},
      {{"num_gqa_groups", 2}, {"head_dim_qk", 128}},
      {{"num_gqa_groups", 1}, {"max_seqlen_kv", 96}, {"attn_mask_type", "no_mask"}},
      {{"head_dim_qk", 192}, {"head_dim_v", 128}},
      {{"head_dim_qk", 128}, {"head_dim_v", 64}, {"is_training", false}},
      {{"head_dim_qk", 256}, {"max_seqlen_kv", 96}, {"attn_mask_type", "causal_bottom_right"}},
      {{"window_size", {16, 0}}},
      {{"qkv_format", "thd"}, {"batch_size", 5}, {"pad_between_seqs", true}, {"softmax_type", "learnable"}},
      {{"attn_mask_type", "padding_causal"}, {"attn_bias_type", "post_scale_bias"}, {"bias_shape", "b1ss"}},
      {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "111s"}, {"return_max_logit", true}},
      {{"attn_bias_type", "alibi"}, {"softmax_type", "off-by-one"}, {"deterministic", true}},
  };
  for (const char* schedule : {"p2p", "all_gather", "a2a", "a2a+p2p"}) {
    if (std::string(schedule) == "a2a+p2p" && (world_size < 4 || world_size % 2)) continue;
    int number = 0;
    for (Json params : kinds) {
      params["cp_comm_type"] = schedule;
      // The kinds alternate between exchanges of two ranks (the default) and of half the ranks.
      if (std::string(schedule) == "a2a+p2p" && number++ % 2) params["a2a_size"] = world_size / 2;
      params["max_seqlen_q"] = 48;
      if (!params.contains("max_seqlen_kv")) params["max_seqlen_kv"] = 48;
      params["num_heads"] = world_size == 6 ? 12 : 8;
      const Json answer =
          daemon.Ask({{"op", "run"}, {"id", params}, {"params", params}, {"warmup", 1}, {"repeat", 2}});
      INFO(answer);
      CHECK(answer.at("ok") == true);
      CHECK(answer.at("id") == params);
      CHECK(answer.at("status") == "passed");
      CHECK_FALSE(answer.contains("leaks"));
      CHECK(answer.at("ranks").size() == static_cast<std::size_t>(world_size));
      CHECK(answer.at("ranks").at(0).at("gpu_ms").at("forward").get<double>() > 0);
      CHECK(answer.at("tflops").at("forward").get<double>() > 0);
      const bool training = params.value("is_training", true);
      CHECK(answer.at("tflops").contains("backward") == training);
      CHECK(answer.at("checks").size() >= static_cast<std::size_t>(world_size) * (training ? 5 : 2));
    }
  }
  CHECK(daemon.Wait() == 0);
}

}  // namespace cppool::test
