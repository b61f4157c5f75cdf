#include "daemon/attention_case/resolve.h"

#include <cstdint>
#include <string>

namespace cppool::attention_case {
namespace {

constexpr std::int64_t kBlock = 32;  // elements that share a scale in mxfp8 (OCP Microscaling Formats, 1.0)

[[noreturn]] void Contradiction(const std::string& why) { throw Refused(CPPOOL_INVALID_REQUEST, why); }

bool IsFp8(const Json& params) { return params.at("dtype") == "fp8"; }

// A flag that is false or null asks for nothing and is taken with every dtype.
void RefuseWithoutFp8(const Json& params) {
  for (const char* name : {"scaling_mode", "fp8_dpa", "fp8_mha", "fp8_bwd", "f16_O"}) {
    const Json& value = params.at(name);
    if (value.is_null() || value == false) continue;
    const std::string shown = value.is_string() ? "'" + value.get<std::string>() + "'" : value.dump();
    Contradiction(std::string(name) + " is " + shown + ", and dtype is '" +
                  params.at("dtype").get<std::string>() + "': " + name + " is for dtype 'fp8' alone");
  }
  if (params.at("fp8_products") != "auto") {
    Contradiction("fp8_products is '" + params.at("fp8_products").get<std::string>() + "', and dtype is '" +
                  params.at("dtype").get<std::string>() + "': fp8_products is for dtype 'fp8' alone");
  }
}

void CheckRecipe(const Json& params) {
  const std::string mode = params.at("scaling_mode");
  if (params.at("fp8_dpa") == false && params.at("fp8_mha") == false) {
    Contradiction(
        "dtype is 'fp8', and fp8_dpa and fp8_mha are both false: one must be true (fp8_dpa: 16-bit tensors "
        "in and out; fp8_mha: q, k, v arrive in fp8 and out leaves so)");
  }
  if (mode == "mxfp8" && params.at("fp8_mha") == true) {
    Contradiction(
        "fp8_mha is true and must be false with scaling_mode 'mxfp8', whose tensors are 16-bit outside: use "
        "fp8_dpa");
  }
  if (mode == "delayed" && params.at("f16_O") == true) {
    Contradiction(
        "f16_O is true and must be false or null with scaling_mode 'delayed', whose output is always fp8 "
        "(scaling_mode 'current' takes both)");
  }
  if (mode == "mxfp8" && params.at("f16_O") == false) {
    Contradiction(
        "f16_O is false and must be true or null with scaling_mode 'mxfp8', whose output is always 16-bit "
        "(scaling_mode 'current' takes both)");
  }
}

// Blocks of mxfp8 lie along the head dimension, and along the tokens of each chunk, so that payloads do not
// depend on how many ranks share a sequence. Packed sequences have any length: their last block may be
// shorter.
std::string CheckBlocks(const Json& params, int world_size) {
  for (const char* name : {"head_dim_qk", "head_dim_v"}) {
    const std::int64_t dim = params.at(name);
    if (dim % kBlock == 0) continue;
    Contradiction(std::string(name) + " is " + std::to_string(dim) + " and must be divisible by " +
                  std::to_string(kBlock) +
                  ": scaling_mode 'mxfp8' has a scale for each block of as many elements");
  }
  if (params.at("qkv_format") == "thd") return "";
  std::string impossible;
  for (const char* name : {"max_seqlen_q", "max_seqlen_kv"}) {
    const std::int64_t length = params.at(name);
    if (length % (2 * kBlock * world_size) == 0) continue;
    const std::string why =
        std::string(name) + " is " + std::to_string(length) + " and must be divisible by " +
        std::to_string(2 * kBlock * world_size) +
        ": that is 64 * world_size, since each rank holds two chunks of every sequence, and scaling_mode "
        "'mxfp8' has blocks of 32 tokens";
    if (length % (2 * kBlock) != 0) Contradiction(why);
    if (impossible.empty()) impossible = why;
  }
  return impossible;
}

}  // namespace

void ResolveFp8(Json& params) {
  if (!IsFp8(params)) return;
  const auto derive = [&](const char* name, const Json& value) {
    if (params.at(name).is_null()) params[name] = value;
  };
  derive("scaling_mode", "delayed");
  derive("fp8_bwd", true);
  derive("f16_O", params.at("scaling_mode") == "mxfp8");
  if (params.at("fp8_mha") == true) params["fp8_dpa"] = true;
}

std::string CheckFp8(const Json& params, int world_size) {
  if (!IsFp8(params)) {
    RefuseWithoutFp8(params);
    return "";
  }
  CheckRecipe(params);
  if (params.at("scaling_mode") == "mxfp8" && params.at("fp8_products") == "native") {
    Contradiction(
        "fp8_products is 'native' and must be 'auto' or 'bf16' with scaling_mode 'mxfp8': GPUs that have "
        "kernels "
        "here have no 8-bit products with scales of blocks");
  }
  return params.at("scaling_mode") == "mxfp8" ? CheckBlocks(params, world_size) : "";
}

std::optional<kernels::Fp8Recipe> RecipeOf(const Json& params) {
  using kernels::ScalingMode;
  if (!IsFp8(params)) return std::nullopt;
  const std::string mode = params.at("scaling_mode");
  kernels::Fp8Recipe recipe;
  recipe.scaling_mode = mode == "delayed"   ? ScalingMode::kDelayed
                        : mode == "current" ? ScalingMode::kCurrent
                                            : ScalingMode::kMxfp8;
  recipe.dpa = params.at("fp8_dpa");
  recipe.mha = params.at("fp8_mha");
  recipe.bwd = params.at("fp8_bwd");
  recipe.f16_o = params.at("f16_O");
  const std::string products = params.at("fp8_products");
  recipe.products = products == "auto"     ? kernels::Fp8Products::kAuto
                    : products == "native" ? kernels::Fp8Products::kNative
                                           : kernels::Fp8Products::kBf16;
  return recipe;
}

}  // namespace cppool::attention_case
