// The attention case's parameters: models, derived values, relations, unsupported values. No attention is
// computed.
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/attention_case/attention_case.h"
#include "daemon/attention_case/files.h"
#include "daemon/attention_case/resolve.h"
#include "daemon/case_registry.h"
#include "daemon/prepare.h"
#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/daemon/fake_backend.h"
#include "tests/files.h"

static int flock_error = 0;  // what flock() fails with; 0: it locks

extern "C" int flock(int fd, int operation) noexcept {
  if (flock_error == 0) return static_cast<int>(syscall(SYS_flock, fd, operation));
  errno = flock_error;
  return -1;
}

namespace cppool::test {
namespace {

using protocol::FailureKind;
using protocol::Json;

std::shared_ptr<const daemon::PreparedRun> Prepared(const Json& params, int world_size = 2,
                                                    bool kwargs = false) {
  daemon::CaseRegistry registry;
  registry.Add(AttentionCase(), "built in");
  protocol::RunRequest request;
  request.params = params;
  request.from_kwargs = kwargs;
  return daemon::Prepare(registry, request, "host", world_size);
}

Json Resolved(const Json& params, int world_size = 2) { return Prepared(params, world_size)->params; }

kernels::AttentionSpec SpecOf(const Json& params, int world_size = 2) {
  return attention_case::ToSpec(Resolved(params, world_size), world_size);
}

// The same where no kernels do it yet: parameters, relations and the spec.
kernels::AttentionSpec RelatedSpecOf(const Json& params, int world_size = 2) {
  daemon::CaseRegistry registry;
  registry.Add(AttentionCase(), "built in");
  const Json resolved =
      attention_case::Resolve(protocol::ValidateParameters(params, registry.Find("attention")->schema),
                              [&](const std::string& name) { return params.contains(name); });
  attention_case::CheckRelations(resolved, world_size);
  return attention_case::ToSpec(resolved, world_size);
}

struct Refused {
  FailureKind kind;
  std::string text;
};

Refused RefusalOf(const Json& params, int world_size = 2) {
  try {
    Prepared(params, world_size);
  } catch (const daemon::Refusal& refusal) {
    return {refusal.kind(), refusal.what()};
  } catch (const protocol::InvalidRequest& error) {
    return {FailureKind::kInvalidRequest, error.what()};
  }
  FAIL("not refused: " << params);
  return {FailureKind::kInternal, ""};
}

void CheckRefused(FailureKind kind, const Json& params, const std::string& part, int world_size) {
  const Refused refused = RefusalOf(params, world_size);
  INFO(params << " -> " << refused.text << " (wanted: " << part << ")");
  CHECK(ToString(refused.kind) == ToString(kind));
  CHECK(refused.text.find(part) != std::string::npos);
}

void CheckInvalid(const Json& params, const std::string& part, int world_size = 2) {
  CheckRefused(FailureKind::kInvalidRequest, params, part, world_size);
}

void CheckInapplicable(const Json& params, const std::string& part, int world_size = 2) {
  CheckRefused(FailureKind::kInapplicable, params, part, world_size);
}

void CheckUnsupported(const Json& params, const std::string& part) {
  CheckRefused(FailureKind::kUnsupported, params, part, 2);
}

}  // namespace

TEST_CASE("the defaults are valid with every schedule and usual world size") {
  for (const int world_size : {1, 2, 4, 6, 8}) {
    CHECK(Resolved(Json::object(), world_size).at("max_seqlen_kv") == 384);
    CHECK(Resolved({{"cp_comm_type", "all_gather"}}, world_size).at("num_gqa_groups") == 8);
  }
  CHECK(Resolved({{"cp_comm_type", "a2a"}}, 8).at("head_dim_v") == 64);
  const Json params = Resolved({{"max_seqlen_q", 64}, {"num_heads", 4}, {"head_dim_qk", 128}});
  CHECK(params.at("max_seqlen_kv") == 64);
  CHECK(params.at("num_gqa_groups") == 4);
  CHECK(params.at("head_dim_v") == 128);
  CHECK(params.at("softmax_scale").get<double>() == Catch::Approx(1 / std::sqrt(128.0)));
  CHECK(Prepared(Json::object())->seed == 1234U);
  CHECK(Prepared({{"seed", 9223372036854775807LL}})->seed == 9223372036854775807ULL);
  CHECK(Prepared(Json::object())->bytes_per_rank > 1e5);
}

TEST_CASE("a model's row sets parameters, and given parameters override it") {
  Json params = Resolved({{"model", "cp_2_0"}});  // the same in both tables
  CHECK(params.at("num_heads") == 32);
  CHECK(params.at("num_gqa_groups") == 4);
  CHECK(params.at("max_seqlen_q") == 4096);
  CHECK(params.at("window_size") == Json{-1, 0});
  params = Resolved(
      {{"model", "cp_1_2"}, {"kernel_backend", "FlashAttention"}, {"batch_size", 1}, {"max_seqlen_q", 512}});
  CHECK(params.at("batch_size") == 1);
  CHECK(params.at("max_seqlen_q") == 512);
  CHECK(params.at("max_seqlen_kv") == 4096);
  CHECK(params.at("window_size") == Json{512, 0});
  CHECK(Resolved({{"model", "cp_5_1"}}).at("head_dim_v") == 256);  // in one table only
  CheckInvalid({{"model", "cp_1_2"}}, "kernel_backend");
  CheckInvalid({{"model", "cp_9_9"}}, "cp_");
  CheckInvalid({{"model", std::string("a\0b", 3) + std::string(1000, 'x')}}, R"("a\x00bxxx)");
  CheckInvalid({{"model", "cp_5_0"}, {"kernel_backend", "FlashAttention"}}, "cp_3_0");
  CheckInvalid({{"model", "cp_1_0"}, {"kernel_backend", "FlashAttenton"}}, "FlashAttention");
  CHECK(Resolved({{"model", "cp_4_1"}}).at("softmax_type") == "off-by-one");
  CHECK(Resolved({{"model", "cp_1_0"}, {"kernel_backend", "FusedAttention"}}).at("return_max_logit") == true);

  const Json flash = Resolved({{"model", "cp_3_3"}, {"kernel_backend", "FlashAttention"}});
  CHECK(flash.at("window_size") == Json{512, 512});
  CHECK(Resolved({{"model", "cp_3_4"}}).at("bias_shape") == "b1ss");
  CHECK(Resolved({{"model", "cp_2_4"}}).at("return_max_logit") == true);
}

TEST_CASE("thd implies a padding mask, and for models of the fused table padding between sequences") {
  using attention_case::Resolve;
  Json params = Resolved(Json::object());
  params["qkv_format"] = "thd";
  const auto given_nothing = [](const std::string&) { return false; };
  params["attn_mask_type"] = "causal";
  CHECK(Resolve(params, given_nothing).at("attn_mask_type") == "padding_causal");
  params["attn_mask_type"] = "no_mask";
  CHECK(Resolve(params, given_nothing).at("attn_mask_type") == "padding");
  CHECK(Resolve(params, given_nothing).at("pad_between_seqs") == false);
  params["model"] = "cp_1_0";
  params["kernel_backend"] = "FusedAttention";
  CHECK(Resolve(params, given_nothing).at("pad_between_seqs") == true);
  CHECK(Resolve(params, [](const std::string& name) {
          return name == "pad_between_seqs";
        }).at("pad_between_seqs") == false);
  params["kernel_backend"] = "FlashAttention";
  CHECK(Resolve(params, given_nothing).at("pad_between_seqs") == false);
}

TEST_CASE("the window is adjusted to the mask") {
  const auto window = [](const char* mask, const Json& given) {
    return Resolved({{"attn_mask_type", mask}, {"window_size", given}}).at("window_size");
  };
  CHECK(window("causal", {-1, -1}) == Json{-1, 0});
  CHECK(window("causal", {16, 5}) == Json{16, 0});
  CHECK(window("causal_bottom_right", {16, 5}) == Json{16, 0});
  CHECK(window("no_mask", {-1, 0}) == Json{-1, -1});
  CHECK(window("no_mask", {16, 5}) == Json{16, 5});
  CHECK(window("no_mask", {0, 0}) == Json{0, 0});
}

TEST_CASE("an AttentionSpec has every value of the parameters") {
  using namespace kernels;
  AttentionSpec spec = SpecOf({{"window_size", {16, 5}},
                               {"attn_mask_type", "no_mask"},
                               {"dtype", "fp16"},
                               {"qkv_format", "sbhd"},
                               {"cp_comm_type", "a2a"},
                               {"softmax_scale", 0.5}});
  CHECK(spec.window_left == 16);
  CHECK(spec.window_right == 5);
  CHECK(spec.dtypes == kernels::TensorDtypes(Dtype::kFp16));
  CHECK(spec.format == QkvFormat::kSbhd);
  CHECK(spec.comm == CpCommType::kA2a);
  CHECK(spec.mask == AttnMaskType::kNoMask);
  CHECK(spec.scale == 0.5);
  CHECK(spec.bias == BiasType::kNone);
  CHECK(spec.softmax == SoftmaxType::kVanilla);
  CHECK_FALSE(spec.max_logit);
  CHECK_FALSE(spec.deterministic);
  CHECK(spec.queries == UniformSequences(2, 384));
  CHECK(spec.keys == UniformSequences(2, 384));

  spec = SpecOf({{"qkv_format", "thd"},
                 {"pad_between_seqs", true},
                 {"attn_bias_type", "post_scale_bias"},
                 {"bias_shape", "b1ss"},
                 {"softmax_type", "learnable"},
                 {"return_max_logit", true},
                 {"deterministic", true},
                 {"batch_size", 6}});
  CHECK(spec.format == QkvFormat::kThd);
  CHECK(spec.mask == AttnMaskType::kPaddingCausal);
  CHECK(spec.pad_between_seqs);
  CHECK(spec.bias == BiasType::kPostScale);
  CHECK(spec.bias_shape == BiasShape{true, false, true});
  CHECK(spec.softmax == SoftmaxType::kLearnable);
  CHECK(spec.max_logit);
  CHECK(spec.deterministic);
  CHECK(spec.queries.length.size() == 6);
  CHECK(spec.queries.padded());
  CHECK(SpecOf({{"bias_shape", "1hss"}}).bias_shape == BiasShape{false, true, true});
  CHECK(SpecOf({{"bias_shape", "11ss"}}).bias_shape == BiasShape{false, false, true});
  CHECK(SpecOf({{"bias_shape", "bhss"}}).bias_shape == BiasShape{true, true, true});
  CHECK(SpecOf({{"bias_shape", "111s"}}).bias_shape == BiasShape{false, false, false});
  CHECK(SpecOf({{"attn_bias_type", "alibi"}}).bias == BiasType::kAlibi);
  CHECK(SpecOf({{"softmax_type", "off-by-one"}}).softmax == SoftmaxType::kOffByOne);
  CHECK(SpecOf({{"attn_mask_type", "padding_causal_bottom_right"}}).mask ==
        AttnMaskType::kPaddingCausalBottomRight);
  CHECK(SpecOf({{"attn_mask_type", "causal_bottom_right"}}).mask == AttnMaskType::kCausalBottomRight);
}

TEST_CASE("cu_seqlens parameters set the lengths and padded lengths of sequences") {
  using List = std::vector<std::int64_t>;
  const Json thd = {
      {"qkv_format", "thd"}, {"batch_size", 3}, {"max_seqlen_q", 16}, {"pad_between_seqs", true}};
  const auto with = [](Json params, const Json& more) {
    params.update(more);
    return params;
  };
  auto spec = SpecOf(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}}));
  CHECK(spec.queries.length == List{5, 0, 11});
  CHECK(spec.queries.room == List{8, 0, 12});
  CHECK(spec.queries.rows == 48);
  CHECK(spec.keys == spec.queries);
  spec = SpecOf(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_q_padded", {0, 8, 12, 28}}}));
  CHECK(spec.queries.length == List{5, 0, 11});
  CHECK(spec.queries.room == List{8, 4, 16});
  spec = SpecOf(
      with(thd, {{"max_seqlen_kv", 8}, {"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_kv", {0, 0, 8, 9}}}));
  CHECK(spec.keys.length == List{0, 8, 1});
  CHECK(spec.keys.room == List{0, 8, 4});
  CHECK(spec.keys.rows == 24);
  spec = SpecOf({{"attn_mask_type", "padding"}, {"max_seqlen_q", 16}, {"cu_seqlens_q", {0, 3, 19}}});
  CHECK(spec.queries.length == List{3, 16});
  CHECK(spec.queries.room == List{16, 16});
  spec = SpecOf(with(thd, {{"pad_between_seqs", false}, {"cu_seqlens_q", {0, 4, 4, 12}}}));
  CHECK(spec.queries.length == spec.queries.room);

  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5, 16}}}),
               "cu_seqlens_q has 3 entries and must have batch_size + 1");
  CheckInvalid(with(thd, {{"cu_seqlens_q", Json::array()}}), "cu_seqlens_q has 0 entries");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {1, 5, 5, 16}}}), "cu_seqlens_q begins with 1");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5, 4, 16}}}), "cu_seqlens_q falls from 5 to 4");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, -5, 4, 16}}}), "cu_seqlens_q");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5.5, 6, 16}}}), "cu_seqlens_q");
  CheckInvalid(with(thd, {{"cu_seqlens_q", "0, 5"}}), "cu_seqlens_q");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 17, 17, 17}}}),
               "cu_seqlens_q: sequence 0 has 17 tokens, more than max_seqlen_q, 16");
  CheckInvalid(
      with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_q_padded", {0, 4, 8, 20}}}),
      "cu_seqlens_q: sequence 0 has 5 tokens, beyond the padded length of 4 that cu_seqlens_q_padded");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_q_padded", {0, 7, 8, 20}}}),
               "cu_seqlens_q_padded: sequence 0 has 7 places");
  // Two places for each rank: what one rank could hold, two cannot divide.
  CheckInapplicable(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_q_padded", {0, 6, 8, 20}}}),
                    "cu_seqlens_q_padded: sequence 0 has 6 places");
  CheckInapplicable(with(thd, {{"cu_seqlens_q", {0, 6, 6, 12}}, {"pad_between_seqs", false}}),
                    "cu_seqlens_q: sequence 0 has 6 tokens of 8 places");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 6, 6, 11}}, {"pad_between_seqs", false}}),
               "cu_seqlens_q: sequence 2 has 5 tokens of 8 places");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_q_padded", {0, 8, 8, 52}}}),
               "cu_seqlens_q_padded takes 52 places, and there are batch_size * max_seqlen_q, which is 48");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"pad_between_seqs", false}}),
               "pad_between_seqs true");
  CheckInvalid(with(thd, {{"cu_seqlens_q_padded", {0, 8, 8, 20}}}),
               "cu_seqlens_q_padded is given without cu_seqlens_q");
  CheckInvalid(with(thd, {{"cu_seqlens_kv", {0, 8, 8, 20}}}), "cu_seqlens_kv is given without cu_seqlens_q");
  CheckInvalid(with(thd, {{"max_seqlen_kv", 8}, {"cu_seqlens_q", {0, 5, 5, 16}}}),
               "cu_seqlens_kv must be given");
  CheckInvalid(with(thd, {{"cu_seqlens_q", {0, 5, 5, 16}}, {"cu_seqlens_kv", {0, 5, 5, 50}}}),
               "cu_seqlens_kv: sequence 2 has 45 tokens");
  CheckInvalid({{"cu_seqlens_q", {0, 5, 16}}}, "attn_mask_type is 'causal'");
  CheckInvalid(
      {{"attn_mask_type", "padding"}, {"cu_seqlens_q", {0, 5, 16}}, {"cu_seqlens_q_padded", {0, 8, 16}}},
      "cu_seqlens_q_padded is for qkv_format 'thd'");
  CheckInvalid({{"pad_between_seqs", true}}, "pad_between_seqs is for qkv_format 'thd'");
  CHECK(Resolved({{"pad_between_seqs", false}, {"qkv_format", "sbhd"}}).at("qkv_format") == "sbhd");
}

TEST_CASE("unknown names, wrong types and values out of range are refused") {
  CheckInvalid({{"num_head", 4}}, "num_heads");
  CheckInvalid({{"dtype", "bf61"}}, "bf16");
  CheckInvalid({{"batch_size", "2"}}, "batch_size");
  CheckInvalid({{"batch_size", 0}}, "65536");
  CheckInvalid({{"batch_size", 65537}}, "65536");
  CheckInvalid({{"max_seqlen_q", (1 << 24) + 4}}, "16777216");
  CheckInvalid({{"num_heads", 1025}}, "1024");
  CheckInvalid({{"num_heads", 1.5}}, "num_heads");
  CheckInvalid({{"num_heads", -8}}, "1");
  CheckInvalid({{"window_size", {1, 2, 3}}}, "window_size");
  CheckInvalid({{"window_size", {-2, 0}}}, "-1");
  CheckInvalid({{"is_training", "True"}}, "is_training");
  CheckInvalid({{"seed", -1}}, "seed");
  CheckInvalid({{"softmax_scale", 0}}, "softmax_scale");
  CheckInvalid({{"softmax_scale", -0.5}}, "softmax_scale");
  CheckInvalid({{"softmax_scale", 1e300}}, "softmax_scale");
  CheckInvalid({{"softmax_scale", 1e-40}}, "\"softmax_scale\" must be a number from 1.17549435");
  // Ranges are checked before relations.
  CheckInvalid({{"softmax_scale", -1}, {"num_heads", 7}, {"num_gqa_groups", 2}}, "softmax_scale");
  CHECK(Resolved({{"softmax_scale", 1.2e-38}}).at("softmax_scale") == 1.2e-38);
  CHECK(Resolved({{"softmax_scale", 1024}}).at("softmax_scale") == 1024);
  CheckInvalid({{"softmax_scale", 1025}}, "softmax_scale");
}

TEST_CASE("the error for a violated relation between parameters names what is allowed") {
  CheckInvalid({{"num_heads", 8}, {"num_gqa_groups", 3}}, "num_gqa_groups");
  CheckInvalid({{"max_seqlen_q", 101}}, "max_seqlen_q is 101 and must be divisible by 8", 4);
  CheckInvalid({{"max_seqlen_kv", 7}}, "max_seqlen_kv is 7 and must be divisible by 2", 1);
  // Relations come before what this world cannot do, and both before what is not supported.
  CheckInvalid({{"max_seqlen_q", 100}, {"num_gqa_groups", 3}}, "num_gqa_groups", 4);
  CheckInvalid({{"max_seqlen_q", 100}, {"max_seqlen_kv", 7}}, "max_seqlen_kv", 4);
  CheckInvalid({{"max_seqlen_q", 62}, {"dtype", "fp8"}, {"num_heads", 3}, {"num_gqa_groups", 2}},
               "num_heads");
  CheckInvalid({{"max_seqlen_q", 62}, {"dtype", "fp8"}}, "fp8_dpa");
  CheckInapplicable({{"max_seqlen_q", 62}, {"dtype", "fp8"}, {"fp8_dpa", true}}, "max_seqlen_q");
  CheckInapplicable({{"qkv_format", "thd"}, {"max_seqlen_q", 62}}, "max_seqlen_q");
}

TEST_CASE("what another number of ranks could run is inapplicable, and names what this one needs") {
  CheckInapplicable({{"max_seqlen_q", 100}}, "divisible by 8", 4);
  CheckInapplicable({{"max_seqlen_q", 64}, {"max_seqlen_kv", 62}},
                    "max_seqlen_kv is 62 and must be divisible by 4");
  CheckInapplicable({{"cp_comm_type", "a2a"}, {"num_heads", 6}}, "divisible by 4", 4);
  CheckInapplicable({{"cp_comm_type", "a2a+p2p"}, {"num_heads", 3}}, "divisible by 2", 4);
  for (const int world_size : {1, 2, 3, 5})
    CheckInapplicable(
        {{"cp_comm_type", "a2a+p2p"}, {"max_seqlen_q", 60}},
        "needs a world_size with a divisor between 1 and itself (4, 6, 8, 9, ...), and this is " +
            std::to_string(world_size),
        world_size);
  CHECK(Resolved({{"cp_comm_type", "a2a+p2p"}}, 6).at("cp_comm_type") == "a2a+p2p");
}

TEST_CASE("a2a_size is a divisor of the world size, other than 1 and itself, and divides the heads") {
  const auto params = [](int a2a_size, int heads = 12) {
    return Json{{"cp_comm_type", "a2a+p2p"}, {"a2a_size", a2a_size}, {"num_heads", heads}};
  };
  CHECK(Resolved(Json::object()).at("a2a_size") == 2);
  CHECK(SpecOf({{"cp_comm_type", "a2a+p2p"}}, 4).a2a_size == 2);
  for (const auto& [world_size, a2a_size] : {std::pair{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}, {12, 6}})
    CHECK(SpecOf(params(a2a_size), world_size).a2a_size == a2a_size);
  CheckInapplicable(params(3), "a2a_size is 3 and must be one of 2, 4: it divides world_size 8", 8);
  CheckInapplicable(params(5), "one of 2, 3: it divides world_size 6", 6);
  for (const int world_size : {1, 2, 8})
    CheckInvalid(params(1), "from 2 to world_size / 2; for 1 use cp_comm_type 'p2p'", world_size);
  CheckInapplicable(params(8), "one of 2, 4: it divides world_size 8; for world_size use cp_comm_type 'a2a'",
                    8);
  CheckInapplicable({{"cp_comm_type", "a2a+p2p"}, {"max_seqlen_q", 36}}, "must be one of 3: it divides", 9);
  CheckInapplicable(params(4, 6), "num_heads is 6 and must be divisible by 4: that is a2a_size", 8);
  // Fewer key/value heads than ranks of an exchange are replicated.
  CHECK(Resolved({{"cp_comm_type", "a2a+p2p"}, {"a2a_size", 4}, {"num_gqa_groups", 1}}, 8).at("num_heads") ==
        8);
  // The range is checked before relations; other schedules ignore a2a_size.
  CheckInvalid(params(0), "a2a_size");
  CheckInvalid(params(65), "64");
  CheckInvalid({{"a2a_size", "4"}}, "a2a_size");
  CHECK(Resolved({{"cp_comm_type", "p2p"}, {"a2a_size", 3}}, 4).at("a2a_size") == 3);
}

TEST_CASE("a recipe of fp8 is resolved by what its scaling mode has") {
  using kernels::ScalingMode;
  struct Row {
    Json params;
    kernels::Fp8Recipe recipe;  // scaling_mode, dpa, mha, bwd, f16_o
  };
  for (const Row& row : std::vector<Row>{
           {{{"fp8_dpa", true}}, {ScalingMode::kDelayed, true, false, true, false}},
           {{{"fp8_mha", true}}, {ScalingMode::kDelayed, true, true, true, false}},
           {{{"fp8_mha", true}, {"fp8_dpa", false}, {"f16_O", false}},
            {ScalingMode::kDelayed, true, true, true, false}},
           {{{"fp8_dpa", true}, {"fp8_bwd", false}}, {ScalingMode::kDelayed, true, false, false, false}},
           {{{"scaling_mode", "current"}, {"fp8_dpa", true}},
            {ScalingMode::kCurrent, true, false, true, false}},
           {{{"scaling_mode", "current"}, {"fp8_mha", true}, {"f16_O", true}},
            {ScalingMode::kCurrent, true, true, true, true}},
           {{{"scaling_mode", "current"}, {"fp8_dpa", true}, {"fp8_bwd", false}, {"f16_O", true}},
            {ScalingMode::kCurrent, true, false, false, true}},
           {{{"scaling_mode", "mxfp8"}, {"fp8_dpa", true}}, {ScalingMode::kMxfp8, true, false, true, true}},
           {{{"scaling_mode", "mxfp8"}, {"fp8_dpa", true}, {"f16_O", true}, {"fp8_bwd", false}},
            {ScalingMode::kMxfp8, true, false, false, true}}}) {
    INFO(row.params);
    Json params = row.params;
    params["dtype"] = "fp8";
    const kernels::AttentionSpec spec = RelatedSpecOf(params);
    REQUIRE(spec.fp8.has_value());
    CHECK(*spec.fp8 == row.recipe);
    CHECK(spec.dtypes == kernels::TensorDtypes(kernels::Dtype::kBf16));
  }
  using kernels::Fp8Products;
  for (const auto& [word, products] : {std::pair{"auto", Fp8Products::kAuto},
                                       {"native", Fp8Products::kNative},
                                       {"bf16", Fp8Products::kBf16}})
    CHECK(RelatedSpecOf({{"dtype", "fp8"}, {"fp8_dpa", true}, {"fp8_products", word}}).fp8->products ==
          products);
  for (const char* dtype : {"bf16", "fp16"}) {
    // What says that nothing is fp8 is taken with every dtype, and the resolved parameters may be sent again.
    const Json none{{"dtype", dtype},   {"scaling_mode", nullptr}, {"fp8_dpa", false},
                    {"fp8_mha", false}, {"fp8_bwd", false},        {"f16_O", false}};
    CHECK_FALSE(SpecOf(none).fp8.has_value());
    CHECK_FALSE(SpecOf(Resolved({{"dtype", dtype}})).fp8.has_value());
  }
}

TEST_CASE("what makes no recipe of fp8 is refused with the parameter and what is allowed") {
  const auto fp8 = [](Json params) {
    params["dtype"] = "fp8";
    return params;
  };
  CheckInvalid(fp8(Json::object()), "fp8_dpa and fp8_mha are both false: one must be true");
  CheckInvalid(fp8({{"scaling_mode", "current"}, {"fp8_bwd", true}}), "fp8_dpa and fp8_mha are both false");
  for (const bool dpa : {false, true})
    CheckInvalid(fp8({{"scaling_mode", "mxfp8"}, {"fp8_mha", true}, {"fp8_dpa", dpa}}),
                 "fp8_mha is true and must be false with scaling_mode 'mxfp8'");
  CheckInvalid(fp8({{"fp8_dpa", true}, {"f16_O", true}}),
               "f16_O is true and must be false or null with scaling_mode 'delayed'");
  CheckInvalid(fp8({{"fp8_dpa", true}, {"f16_O", false}, {"scaling_mode", "mxfp8"}}),
               "f16_O is false and must be true or null with scaling_mode 'mxfp8'");
  CheckInvalid(fp8({{"fp8_dpa", true}, {"scaling_mode", "block"}}),
               R"("scaling_mode" must be one of "delayed", "current", "mxfp8", not "block")");
  CheckInvalid(fp8({{"fp8_dpa", "True"}}), "\"fp8_dpa\" must be true or false");
  CheckInvalid(fp8({{"fp8_dpa", true}, {"scaling_mode", "mxfp8"}, {"fp8_products", "native"}}),
               "fp8_products is 'native' and must be 'auto' or 'bf16' with scaling_mode 'mxfp8'");
  for (const char* dtype : {"bf16", "fp16"}) {
    for (const auto& [name, value] : {std::pair<const char*, Json>{"scaling_mode", "current"},
                                      {"fp8_dpa", true},
                                      {"fp8_mha", true},
                                      {"fp8_bwd", true},
                                      {"f16_O", true},
                                      {"fp8_products", "bf16"}})
      CheckInvalid({{"dtype", dtype}, {name, value}},
                   std::string(", and dtype is '") + dtype + "': " + name + " is for dtype 'fp8' alone");
  }
}

TEST_CASE("blocks of 32 divide the head dimensions and chunks of mxfp8") {
  const auto mxfp8 = [](Json params) {
    params.update({{"dtype", "fp8"}, {"fp8_dpa", true}, {"scaling_mode", "mxfp8"}});
    return params;
  };
  CHECK(RelatedSpecOf(mxfp8({{"max_seqlen_q", 128}}), 2).fp8.has_value());
  CHECK(RelatedSpecOf(mxfp8({{"max_seqlen_q", 256}, {"max_seqlen_kv", 512}}), 4).fp8.has_value());
  CheckInvalid(mxfp8({{"head_dim_qk", 80}}), "head_dim_qk is 80 and must be divisible by 32");
  CheckInvalid(mxfp8({{"head_dim_qk", 64}, {"head_dim_v", 72}}),
               "head_dim_v is 72 and must be divisible by 32");
  CheckInvalid(mxfp8({{"max_seqlen_q", 96}}), "max_seqlen_q is 96 and must be divisible by 128");
  CheckInvalid(mxfp8({{"max_seqlen_q", 128}, {"max_seqlen_kv", 136}}), "max_seqlen_kv is 136 and must be");
  CheckInapplicable(mxfp8({{"max_seqlen_q", 64}}),
                    "max_seqlen_q is 64 and must be divisible by 128: that is 64 *");
  CheckInapplicable(mxfp8({{"max_seqlen_q", 256}, {"max_seqlen_kv", 128}}),
                    "max_seqlen_kv is 128 and must be divisible by 256", 4);
  // Packed sequences have lengths of their own, and scales of whole tensors have no blocks.
  CHECK(RelatedSpecOf(mxfp8({{"max_seqlen_q", 96}, {"qkv_format", "thd"}})).fp8.has_value());
  CHECK(RelatedSpecOf({{"dtype", "fp8"}, {"fp8_dpa", true}, {"max_seqlen_q", 12}, {"head_dim_qk", 72}})
            .fp8.has_value());
}

TEST_CASE("a case names the kernels that it runs") {
  const Json kernels = Prepared(Json::object())->kernels;
  CHECK(kernels.at("name") == "cppool");
  CHECK(kernels.at("family") == "host");
  CHECK_FALSE(kernels.at("version").get<std::string>().empty());
  CHECK_FALSE(kernels.contains("fp8_products"));
  for (const char* products : {"auto", "bf16"})
    CHECK(Prepared({{"dtype", "fp8"}, {"fp8_dpa", true}, {"fp8_products", products}})
              ->kernels.at("fp8_products") == "bf16");
}

TEST_CASE(
    "unsupported values are refused with the reason, and all combinations of the matrix are supported") {
  CheckUnsupported({{"head_dim_qk", 96}}, "head_dim_qk 96 with head_dim_v 96");
  CheckUnsupported(
      {{"dtype", "fp8"}, {"fp8_dpa", true}, {"fp8_products", "native"}},
      "fp8_products is 'native', and the kernel family 'host' multiplies the values of payloads in bf16");
  CheckUnsupported({{"head_dim_qk", 64}, {"head_dim_v", 128}}, "128 with head_dim_v 64");
  for (const auto& [qk, v] : {std::pair{64, 64}, {128, 128}, {192, 128}, {128, 64}, {256, 256}}) {
    CHECK(Resolved({{"head_dim_qk", qk}, {"head_dim_v", v}, {"deterministic", true}}).at("head_dim_v") == v);
  }
  for (const char* format : {"bshd", "sbhd", "thd"}) {
    for (const char* mask : {"no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
                             "padding_causal_bottom_right"}) {
      for (const char* bias : {"no_bias", "post_scale_bias", "alibi"}) {
        for (const char* softmax : {"vanilla", "off-by-one", "learnable"}) {
          CHECK(Resolved({{"qkv_format", format},
                          {"attn_mask_type", mask},
                          {"attn_bias_type", bias},
                          {"softmax_type", softmax},
                          {"return_max_logit", true}})
                    .at("attn_bias_type") == bias);
        }
      }
    }
  }
}

TEST_CASE("the memory estimate includes biases and their gradients") {
  const auto bytes = [](const Json& params) { return Prepared(params)->bytes_per_rank; };
  const double plain = bytes(Json::object());
  const double matrix = 384.0 * 384 * 2;
  const double one = bytes({{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "11ss"}}) - plain;
  CHECK(one > 4 * matrix);  // bias and dbias, in the run and in the reference
  CHECK(bytes({{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "1hss"}}) - plain > 4 * 8 * matrix);
  CHECK(bytes({{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "11ss"}, {"is_training", false}}) <
        bytes({{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "11ss"}}));
}

namespace {

// The host's kernels with a workspace beside which the memory of the checks is small, so that the schedule's
// is what a rank needs.
class LargeWorkspace : public kernels::AttentionFamily {
 public:
  const char* kernels() const override { return host_.kernels(); }
  const char* version() const override { return host_.version(); }
  const char* name() const override { return host_.name(); }
  kernels::Capabilities capabilities(const kernels::KernelRequest& request) const override {
    return host_.capabilities(request);
  }
  std::optional<std::string> Refusal(const kernels::KernelRequest& request) const override {
    return host_.Refusal(request);
  }
  std::size_t WorkspaceBytes(const kernels::KernelRequest&, std::int64_t, std::int64_t) const override {
    return std::size_t{1} << 32;
  }
  std::size_t PlanBytes(const kernels::KernelRequest& request, const kernels::Layout& query,
                        const kernels::Layout& key) const override {
    return host_.PlanBytes(request, query, key);
  }
  std::unique_ptr<kernels::AttentionKernel> Open(cppool_runtime* runtime) const override {
    return host_.Open(runtime);
  }

 private:
  const kernels::AttentionFamily& host_ = *kernels::AttentionFamilies("host").front();
};

// A rank whose devices copy to each other, and bring keys under a kernel.
class CopyingRank : public FakeRank {
 public:
  explicit CopyingRank(int world_size) : FakeRank(std::make_shared<FakeWorld>(), 0, world_size) {
    seam()->self = static_cast<kernels::RankRuntime*>(this);
  }
  kernels::Group CopyGroup(kernels::GroupShape) override {
    return {reinterpret_cast<cppool_comm>(this), 0, seam()->world_size};
  }
  std::optional<std::string> WhyNoRing() const override { return std::nullopt; }
};

}  // namespace

TEST_CASE("one launch is taken where memory holds its slots, and else steps") {
  using kernels::Launches;
  constexpr int kRanks = 8;
  const LargeWorkspace family;
  CopyingRank rank(kRanks);
  struct Decision {
    Launches launches;  // as the answer says
    double bytes;
  };
  const auto decide = [&](const char* launches, double room, bool on_host = false) {
    kernels::AttentionSpec spec = SpecOf({{"launches", launches}}, kRanks);
    const double bytes = attention_case::SetLaunches(spec, family, kRanks, on_host,
                                                     [&](double wanted) { return wanted <= room; });
    return Decision{kernels::LaunchesOf(rank.seam(), family, spec), bytes};
  };
  const double one = decide("one", 0).bytes, steps = decide("steps", 0).bytes;
  CHECK(one > steps);
  CHECK(decide("one", 0).launches == Launches::kOne);  // CheckMemory refuses it
  CHECK(decide("auto", one).launches == Launches::kOne);
  CHECK(decide("auto", one).bytes == one);
  for (const double room : {one - 1, steps}) {
    CHECK(decide("auto", room).launches == Launches::kSteps);
    CHECK(decide("auto", room).bytes == steps);
  }
  CHECK(decide("auto", 2 * one, true).launches == Launches::kSteps);
}

TEST_CASE("parameters in the string form of Transformer Engine's worker are accepted") {
  const auto run = Prepared({{"dtype", "bf16"},
                             {"model", "cp_1_0"},
                             {"qkv_format", "bshd"},
                             {"kernel_backend", "FlashAttention"},
                             {"cp_comm_type", "p2p"},
                             {"is_training", "True"},
                             {"deterministic", "False"},
                             {"fa_pad_between_seqs", "False"},
                             {"fp8_bwd", "True"},
                             {"fp8_mha", "False"},
                             {"log_level", "10"}},
                            2, true);
  CHECK(run->params.at("num_heads") == 12);
  CHECK(run->params.at("is_training") == true);
  CHECK(run->params.at("pad_between_seqs") == false);
  CHECK(run->warnings.empty());
}

TEST_CASE("fp8 without a recipe runs as bf16 in the string form, as that worker runs it, with a warning") {
  const auto run = Prepared(
      {{"dtype", "fp8"}, {"scaling_mode", "mxfp8"}, {"fp8_mha", "True"}, {"f16_O", "False"}}, 2, true);
  CHECK(run->params.at("dtype") == "bf16");
  REQUIRE(run->warnings.size() == 1);
  CHECK(run->warnings.at(0).find("ran as bf16") != std::string::npos);
}

TEST_CASE("dumps into the same folder, which does not exist yet, can be validated concurrently") {
  namespace fs = std::filesystem;
  const TemporaryFolder temporary;
  const fs::path folder = temporary / "dumps";
  const kernels::AttentionSpec spec = SpecOf(Json::object());
  std::atomic<int> refused{0};
  std::vector<std::thread> validators;
  for (const char* name : {"a", "b", "c"}) {
    validators.emplace_back([&refused, &spec, dump = (folder / "of" / name).string()] {
      for (int i = 0; i < 300; ++i) {
        try {
          attention_case::CheckDump(dump, nullptr, spec, 2);
        } catch (const attention_case::Refused&) {
          ++refused;
        }
      }
    });
  }
  for (std::thread& validator : validators) validator.join();
  CHECK(refused == 0);
  CHECK_FALSE(fs::exists(folder));
}

TEST_CASE("a dump is refused when its folder cannot be locked, but not on a file system without locks") {
  const TemporaryFolder folder;
  const kernels::AttentionSpec spec = SpecOf({{"max_seqlen_q", 16}, {"num_heads", 2}});
  const auto failure = [&](int error) -> std::string {
    attention_case::DumpFiles dump(folder.File("dump"), spec, 2, false, Json::object());
    flock_error = error;
    std::string what;
    try {
      dump.Begin();
    } catch (const kernels::RuntimeError& failed) {
      what = failed.what();
    }
    flock_error = 0;
    return what;
  };
  for (const int none : {0, ENOLCK, EOPNOTSUPP, ENOSYS}) CHECK(failure(none).empty());
  CHECK_THAT(failure(EWOULDBLOCK), Catch::Matchers::ContainsSubstring("another run is writing"));
  for (const int error : {EIO, EINTR, EBADF})
    CHECK_THAT(failure(error), Catch::Matchers::ContainsSubstring("dump: cannot be locked: "));
}

}  // namespace cppool::test
