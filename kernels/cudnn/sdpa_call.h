// One call of cppool/attention.h in the terms of cuDNN's scaled dot-product attention (SDPA). Without cuDNN.
#pragma once

#include <cppool/attention.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace cppool::kernels::cudnn {

enum class ElementType { kFp16, kBf16 };

// [batch, heads, tokens, dim], of a bias [batch or 1, heads or 1, queries or 1, keys]; in elements. All zero:
// there is no such tensor.
struct TensorForm {
  std::array<std::int64_t, 4> dims{}, strides{};
  bool operator==(const TensorForm&) const = default;
};

struct SdpaCall {
  bool backward = false, deterministic = false;
  ElementType type = ElementType::kBf16;  // of all these tensors but `stats`, which is fp32
  bool fp8 = false;                       // q, k, v and out are E4M3; out's scale is v's
  float p_scale = 0;                      // with fp8
  double scale = 1;
  // A query sees the keys from diagonal - left_bound + 1 to diagonal + right_bound; the diagonal is that of
  // cppool_attention_anchor. Nothing: no limit on that side.
  bool bottom_right = false;
  std::optional<std::int64_t> left_bound, right_bound;
  TensorForm q, k, v, out, stats;  // stats: cuDNN's word for lse, [batch, heads, tokens, 1]
  TensorForm dout, dq, dk, dv;     // of the backward pass alone
  TensorForm bias, dbias;          // dbias is packed
  // -slope * |key - query - alibi_diagonal| is added to the logits; there is a slope in fp32 for each head.
  bool alibi = false;
  std::int64_t alibi_diagonal = 0;
  // The forward pass writes the largest logit of each row too, in the form of `stats`, which is packed then.
  bool max_logit = false;
  bool operator==(const SdpaCall&) const = default;
};

// Fills `to`; or the reason why cuDNN is not given this call.
std::optional<std::string> ReadCall(const cppool_attention_call& call, SdpaCall& to);

}  // namespace cppool::kernels::cudnn
