// The example kernels, built outside of the project against the installed prefix.
#include <string>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/end_to_end/user_case.h"
#include "tests/files.h"

namespace cppool::test {

TEST_CASE("a user's kernel in plain C, built against the installed prefix, under every schedule") {
  if (const std::string missing = UserCaseNeeds(); !missing.empty()) {
    WARN(missing);
    return;
  }
  const UserKernels& built = BuildUserKernels();
  for (const int world_size : {1, 2, 4}) {
    DaemonProcess daemon(Host(world_size), built.daemon);
    for (const char* comm : {"p2p", "all_gather", "a2a", "a2a+p2p"}) {
      if (std::string(comm) == "a2a+p2p" && world_size < 4) continue;
      Json params = {{"cp_comm_type", comm}, {"max_seqlen_q", 48},          {"num_heads", 4},
                     {"num_gqa_groups", 2},  {"softmax_type", "learnable"}, {"deterministic", true}};
      const Json answer = daemon.Ask({{"op", "run"}, {"kernels", built.naive}, {"params", params}});
      INFO(answer.dump());
      CHECK(answer.at("status") == "passed");
      CHECK(answer.at("kernels").at("name") == "naive");
      CHECK(answer.at("kernels").at("version") == "1.0");
      CHECK(answer.at("kernels").at("family") == "table");
      CHECK(answer.at("kernels").at("file") == built.naive);
      CHECK(answer.at("kernels").at("digest").get<std::string>().size() == 16);
      const Json more[] = {{{"attn_bias_type", "post_scale_bias"}, {"return_max_logit", true}},
                           {{"attn_bias_type", "alibi"}},
                           {{"qkv_format", "thd"}, {"batch_size", 5}, {"pad_between_seqs", true}},
                           {{"dtype", "fp8"}, {"scaling_mode", "current"}, {"fp8_dpa", true}},
                           {{"dtype", "fp8"}, {"scaling_mode", "delayed"}, {"fp8_mha", true}}};
      for (const Json& each : more) {
        Json with = params;
        with.update(each);
        const Json passed = daemon.Ask({{"op", "run"}, {"kernels", built.naive}, {"params", with}});
        INFO(passed.dump());
        CHECK(passed.at("status") == "passed");
      }
      Json blocks = params;
      blocks.update({{"dtype", "fp8"},
                     {"scaling_mode", "mxfp8"},
                     {"fp8_dpa", true},
                     {"max_seqlen_q", 64 * world_size}});
      const Json skipped = daemon.Ask({{"op", "validate"}, {"kernels", built.naive}, {"params", blocks}});
      CHECK(skipped.at("status") == "skipped");
      CHECK_THAT(skipped.at("error").get<std::string>(),
                 Catch::Matchers::StartsWith("naive: cppool/attention.h has no scales of blocks"));
      params["dtype"] = "fp16";
      const Json refused =
          daemon.Ask({{"op", "validate"}, {"kernels", built.naive + ",naive"}, {"params", params}});
      CHECK(refused.at("status") == "skipped");
      CHECK(refused.at("error") == "naive: dtypes bf16 and fp8 alone");
    }
    CHECK(daemon.Wait() == 0);
  }
  const std::string run = "'" + built.command + "' run --backend host --kernels '" + built.naive + "' ";
  const Child passed = RunChild(run + "--param max_seqlen_q=48");
  CHECK(passed.exit_code == 0);
  CHECK(Has(passed.output, "1 passed, 0 failed, 0 skipped"));
  const Child listed = RunChild(run + "--suite smoke --list --filter dtype=fp16");
  CHECK(Has(listed.output, "naive: dtypes bf16 and fp8 alone"));
  CHECK(Has(listed.output, "--kernels"));
}

}  // namespace cppool::test
