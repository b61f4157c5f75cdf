#include "resolve.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "models.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::attention_case {
namespace {

using kernels::AttentionSpec;
using kernels::AttnMaskType;
using kernels::CpCommType;
using kernels::Dtype;
using kernels::QkvFormat;

[[noreturn]] void Invalid(const std::string& why) { throw Refused(false, why); }

std::string Text(const Json& params, const char* name) { return params.at(name).get<std::string>(); }
std::int64_t Int(const Json& params, const char* name) { return params.at(name).get<std::int64_t>(); }
bool IsCausal(const std::string& mask) { return mask.find("causal") != std::string::npos; }

std::pair<const ModelRow*, ModelTable> FindRow(const Json& params) {
  const std::string name = Text(params, "model");
  const ModelRow* flash = FindModel(ModelTable::kFlash, name);
  const ModelRow* fused = FindModel(ModelTable::kFused, name);
  std::vector<std::string> known;
  if (params.at("kernel_backend").is_null()) {
    if (flash && fused && !(*flash == *fused)) {
      Invalid("model '" + name +
              "' is another one for FlashAttention than for FusedAttention: give kernel_backend too");
    }
    if (flash) return {flash, ModelTable::kFlash};
    if (fused) return {fused, ModelTable::kFused};
    known =
        ModelNames(ModelTable::kFused);  // the longer table; every name of the other one is in it or near one
  } else {
    const ModelTable table =
        Text(params, "kernel_backend") == "FusedAttention" ? ModelTable::kFused : ModelTable::kFlash;
    if (const ModelRow* row = table == ModelTable::kFused ? fused : flash) return {row, table};
    known = ModelNames(table);
  }
  std::string list;
  for (const std::string& other : known) list += (list.empty() ? "" : ", ") + other;
  const auto nearest = protocol::Nearest(name, known);
  Invalid("there is no model " + protocol::Quoted(name) +
          (nearest ? "; did you mean '" + *nearest + "'?" : ";") + " there are: " + list);
}

void ApplyModel(Json& params, const std::function<bool(const std::string&)>& given) {
  const auto [row, table] = FindRow(params);
  const auto set = [&](const char* name, Json value) {
    if (!given(name)) params[name] = std::move(value);
  };
  set("batch_size", row->batch_size);
  set("max_seqlen_q", row->max_seqlen_q);
  set("max_seqlen_kv", row->max_seqlen_kv);
  set("num_heads", row->num_heads);
  set("num_gqa_groups", row->num_gqa_groups);
  set("head_dim_qk", row->head_dim_qk);
  set("head_dim_v", row->head_dim_v);
  set("attn_mask_type", row->attn_mask_type);
  set("window_size", row->window_size);
  set("attn_bias_type", row->attn_bias_type);
  set("bias_shape", row->bias_shape);
  set("softmax_type", row->softmax_type);
  set("return_max_logit", row->return_max_logit);
  if (table == ModelTable::kFused && params.at("qkv_format") == "thd") set("pad_between_seqs", true);
}

void CheckDivides(const char* name, std::int64_t value, std::int64_t divisor, const std::string& why) {
  if (value % divisor == 0) return;
  Invalid(std::string(name) + " is " + std::to_string(value) + " and must be divisible by " +
          std::to_string(divisor) + ": " + why);
}

}  // namespace

Json Resolve(Json params, const std::function<bool(const std::string&)>& given) {
  if (!params.at("model").is_null()) ApplyModel(params, given);
  const auto derive = [&](const char* name, const char* from) {
    if (params.at(name).is_null()) params[name] = params.at(from);
  };
  derive("max_seqlen_kv", "max_seqlen_q");
  derive("num_gqa_groups", "num_heads");
  derive("head_dim_v", "head_dim_qk");
  if (params.at("softmax_scale").is_null()) {
    params["softmax_scale"] = 1 / std::sqrt(static_cast<double>(Int(params, "head_dim_qk")));
  }

  std::string mask = Text(params, "attn_mask_type");
  if (params.at("qkv_format") == "thd") {
    if (mask == "no_mask") mask = "padding";
    if (mask == "causal") mask = "padding_causal";
    if (mask == "causal_bottom_right") mask = "padding_causal_bottom_right";
    params["attn_mask_type"] = mask;
  }
  Json& window = params.at("window_size");
  if (IsCausal(mask)) {
    window[1] = 0;
  } else if (window == Json{-1, 0}) {
    window[1] = -1;
  }
  return params;
}

void CheckRelations(const Json& params, int world_size) {
  const std::int64_t heads = Int(params, "num_heads");
  CheckDivides("num_heads", heads, Int(params, "num_gqa_groups"),
               "that is num_gqa_groups, and each group has as many query heads");
  const std::string chunks = "that is 2 * world_size, since each rank holds two chunks of every sequence";
  CheckDivides("max_seqlen_q", Int(params, "max_seqlen_q"), 2 * world_size, chunks);
  CheckDivides("max_seqlen_kv", Int(params, "max_seqlen_kv"), 2 * world_size, chunks);
  const std::string comm = Text(params, "cp_comm_type");
  if (comm == "a2a") {
    CheckDivides("num_heads", heads, world_size,
                 "that is world_size, since cp_comm_type 'a2a' gives each rank as many heads");
  } else if (comm == "a2a+p2p") {
    if (world_size < 4 || world_size % 2) {
      Invalid("cp_comm_type 'a2a+p2p' needs an even world_size from 4, and this is " +
              std::to_string(world_size));
    }
    CheckDivides("num_heads", heads, 2, "cp_comm_type 'a2a+p2p' gives each rank of a pair half of the heads");
  }
  const double scale = params.at("softmax_scale").get<double>();
  const float single = static_cast<float>(scale);
  if (!(scale > 0) || !std::isnormal(single)) {
    Invalid("softmax_scale is " + params.at("softmax_scale").dump() +
            " and must be above 0 and a normal number in single precision");
  }
}

void CheckSupported(const Json& params) {
  const auto unsupported = [](const std::string& what) {
    throw Refused(true, what + " is not supported yet");
  };
  if (params.at("dtype") == "fp8") unsupported("dtype 'fp8'");
  if (params.at("qkv_format") == "thd") unsupported("qkv_format 'thd'");
  if (Text(params, "attn_mask_type").starts_with("padding"))
    unsupported("attn_mask_type '" + Text(params, "attn_mask_type") + "'");
  if (params.at("attn_bias_type") != "no_bias")
    unsupported("attn_bias_type '" + Text(params, "attn_bias_type") + "'");
  if (params.at("softmax_type") != "vanilla")
    unsupported("softmax_type '" + Text(params, "softmax_type") + "'");
  if (params.at("return_max_logit") == true) unsupported("return_max_logit");
  const std::pair<std::int64_t, std::int64_t> dims{Int(params, "head_dim_qk"), Int(params, "head_dim_v")};
  constexpr std::array<std::pair<std::int64_t, std::int64_t>, 5> kDims{
      {{64, 64}, {128, 128}, {192, 128}, {128, 64}, {256, 256}}};
  if (std::find(kDims.begin(), kDims.end(), dims) != kDims.end()) return;
  unsupported("head_dim_qk " + std::to_string(dims.first) + " with head_dim_v " +
              std::to_string(dims.second) +
              " (there are kernels for 64/64, 128/128, 192/128, 128/64 and 256/256): it");
}

AttentionSpec ToSpec(const Json& params) {
  AttentionSpec spec;
  spec.batch = Int(params, "batch_size");
  spec.seqlen_q = Int(params, "max_seqlen_q");
  spec.seqlen_kv = Int(params, "max_seqlen_kv");
  spec.heads = params.at("num_heads").get<int>();
  spec.kv_heads = params.at("num_gqa_groups").get<int>();
  spec.dim_qk = params.at("head_dim_qk").get<int>();
  spec.dim_v = params.at("head_dim_v").get<int>();
  spec.dtype = params.at("dtype") == "fp16" ? Dtype::kFp16 : Dtype::kBf16;
  spec.format = params.at("qkv_format") == "sbhd" ? QkvFormat::kSbhd : QkvFormat::kBshd;
  const std::string comm = Text(params, "cp_comm_type");
  spec.comm = comm == "all_gather" ? CpCommType::kAllGather
              : comm == "a2a"      ? CpCommType::kA2a
              : comm == "a2a+p2p"  ? CpCommType::kA2aP2p
                                   : CpCommType::kP2p;
  const std::string mask = Text(params, "attn_mask_type");
  spec.mask = mask == "causal"                ? AttnMaskType::kCausal
              : mask == "causal_bottom_right" ? AttnMaskType::kCausalBottomRight
                                              : AttnMaskType::kNoMask;
  spec.window_left = params.at("window_size").at(0).get<std::int64_t>();
  spec.window_right = params.at("window_size").at(1).get<std::int64_t>();
  spec.scale = params.at("softmax_scale").get<double>();
  spec.training = params.at("is_training").get<bool>();
  spec.seed = params.at("seed").get<std::uint64_t>();
  return spec;
}

}  // namespace cppool::attention_case
