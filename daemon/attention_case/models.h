// Named problems: the rows that `model` (with `kernel_backend`) stands for.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace cppool::attention_case {

enum class ModelTable { kFlash, kFused };

struct ModelRow {
  std::string_view name;
  int batch_size;
  int max_seqlen_q;
  int max_seqlen_kv;
  int num_heads;
  int num_gqa_groups;
  int head_dim_qk;
  int head_dim_v;
  std::string_view attn_mask_type;
  std::array<int, 2> window_size;
  std::string_view attn_bias_type;
  std::string_view bias_shape;
  std::string_view softmax_type;
  bool return_max_logit;
  bool operator==(const ModelRow&) const = default;
};

const ModelRow* FindModel(ModelTable table, std::string_view name);  // null: not in this table
std::vector<std::string> ModelNames(ModelTable table);

}  // namespace cppool::attention_case
