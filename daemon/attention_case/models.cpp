#include "daemon/attention_case/models.h"

#include <algorithm>
#include <array>

namespace cppool::attention_case {
namespace {

// Transformer Engine's configurations of its context-parallel attention tests.
// name, batch, queries, keys, heads, groups, dim qk, dim v, mask, window, bias, bias shape, softmax, max logit
// clang-format off
const std::array<ModelRow, 12> kFlash{{
    {"cp_1_0", 2, 4096, 4096, 12, 12, 128, 128, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_1_1", 2, 4096, 4096, 12, 12, 128, 128, "no_mask", {-1, -1}, "no_bias", "1hss", "vanilla", false},
    {"cp_1_2", 2, 4096, 4096, 12, 12, 128, 128, "causal", {512, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_1_3", 2, 4096, 4096, 12, 12, 128, 128, "no_mask", {512, 512}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_0", 2, 4096, 4096, 32, 4, 128, 128, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_1", 2, 4096, 4096, 12, 2, 128, 128, "no_mask", {-1, -1}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_2", 2, 4096, 4096, 32, 32, 128, 128, "causal", {128, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_3", 2, 4096, 4096, 12, 2, 128, 128, "no_mask", {512, 512}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_0", 2, 4096, 4096, 128, 128, 192, 128, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_1", 2, 4096, 4096, 12, 12, 192, 128, "no_mask", {-1, -1}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_2", 2, 4096, 4096, 12, 12, 192, 128, "causal", {512, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_3", 2, 4096, 4096, 12, 12, 192, 128, "no_mask", {512, 512}, "no_bias", "1hss", "vanilla", false},
}};

const std::array<ModelRow, 24> kFused{{
    {"cp_1_0", 2, 4096, 4096, 12, 12, 128, 128, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", true},
    {"cp_1_1", 2, 4096, 4096, 12, 12, 128, 128, "no_mask", {-1, -1}, "no_bias", "1hss", "vanilla", true},
    {"cp_1_2", 2, 4096, 4096, 12, 12, 128, 128, "causal", {-1, 0}, "post_scale_bias", "1hss", "vanilla", false},
    {"cp_1_3", 2, 4096, 4096, 12, 12, 128, 128, "no_mask", {-1, -1}, "post_scale_bias", "1hss", "vanilla", false},
    {"cp_1_4", 2, 4096, 4096, 12, 12, 128, 128, "no_mask", {-1, -1}, "post_scale_bias", "bhss", "vanilla", false},
    {"cp_1_5", 2, 4096, 4096, 12, 12, 128, 128, "causal", {512, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_0", 2, 4096, 4096, 32, 4, 128, 128, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_1", 2, 4096, 4096, 32, 32, 128, 128, "causal", {128, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_2_2", 2, 4096, 4096, 12, 2, 128, 128, "causal", {-1, 0}, "post_scale_bias", "1hss", "vanilla", false},
    {"cp_2_3", 2, 4096, 4096, 12, 2, 128, 128, "causal", {-1, 0}, "post_scale_bias", "11ss", "vanilla", false},
    {"cp_2_4", 2, 4096, 4096, 12, 2, 128, 128, "causal", {-1, 0}, "post_scale_bias", "111s", "vanilla", true},
    {"cp_2_5", 2, 4096, 4096, 12, 2, 128, 128, "no_mask", {-1, -1}, "post_scale_bias", "1hss", "vanilla", false},
    {"cp_2_6", 2, 4096, 4096, 12, 2, 128, 128, "causal", {512, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_0", 2, 4096, 4096, 12, 12, 128, 64, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_1", 2, 4096, 4096, 128, 128, 192, 128, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_3_2", 2, 4096, 4096, 12, 12, 128, 64, "causal", {-1, 0}, "post_scale_bias", "1hss", "vanilla", false},
    {"cp_3_3", 2, 4096, 4096, 12, 12, 128, 64, "no_mask", {-1, -1}, "post_scale_bias", "1hss", "vanilla", false},
    {"cp_3_4", 2, 4096, 4096, 12, 12, 128, 64, "no_mask", {-1, -1}, "post_scale_bias", "b1ss", "vanilla", false},
    {"cp_4_0", 2, 4096, 4096, 64, 8, 64, 64, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_4_1", 2, 4096, 4096, 64, 8, 64, 64, "causal", {-1, 0}, "no_bias", "1hss", "off-by-one", false},
    {"cp_4_2", 2, 4096, 4096, 64, 8, 64, 64, "causal", {-1, 0}, "no_bias", "1hss", "learnable", false},
    {"cp_4_3", 2, 4096, 4096, 64, 64, 64, 64, "causal", {128, 0}, "no_bias", "1hss", "learnable", false},
    {"cp_5_0", 2, 1024, 1024, 16, 16, 256, 256, "causal", {-1, 0}, "no_bias", "1hss", "vanilla", false},
    {"cp_5_1", 2, 1024, 1024, 16, 16, 256, 256, "causal", {128, 0}, "no_bias", "1hss", "vanilla", false},
}};
// clang-format on

template <std::size_t N>
const ModelRow* FindIn(const std::array<ModelRow, N>& table, std::string_view name) {
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const ModelRow& row) { return row.name == name; });
  return found == table.end() ? nullptr : &*found;
}

}  // namespace

const ModelRow* FindModel(ModelTable table, std::string_view name) {
  return table == ModelTable::kFlash ? FindIn(kFlash, name) : FindIn(kFused, name);
}

std::vector<std::string> ModelNames(ModelTable table) {
  std::vector<std::string> names;
  if (table == ModelTable::kFlash) {
    for (const ModelRow& row : kFlash) names.emplace_back(row.name);
  } else {
    for (const ModelRow& row : kFused) names.emplace_back(row.name);
  }
  return names;
}

}  // namespace cppool::attention_case
