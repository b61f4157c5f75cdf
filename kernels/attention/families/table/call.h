// One distinct shape of call to a kernel of cppool/attention.h: as values that can be compared and kept, and
// as the C structs that the kernel gets.
#pragma once

#include <cppool/attention.h>

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/families/table/packed_sequences.h"
#include "kernels/attention/families/table/rectangles.h"

namespace cppool::kernels::table {

enum CallTensor {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDelta,
  kDq,
  kDk,
  kDv,
  kBias,
  kDbias,
  kAlibiSlopes,
  kMaxLogit,
  kCuSeqlensQ,  // these four: of packed sequences
  kCuSeqlensKv,
  kSeqlensQ,
  kSeqlensKv,
  kQScale,  // these four: of fp8 payloads
  kKScale,
  kVScale,
  kDoutScale,
  kDsScale,
  kAmaxDs,
  kCallTensors
};
// Returns the name that cppool/attention.h has for it.
const char* NameOf(CallTensor tensor);
// Whether the pass writes it.
bool Writes(bool backward, CallTensor tensor);

struct TensorForm {
  int ndim = 0;                                    // 0: the call has no such tensor
  std::array<std::int64_t, 4> shape{}, strides{};  // in elements
  Dtype dtype = Dtype::kFp32;
  bool integers = false;  // int32 in place of the dtype

  std::int64_t element_bytes() const { return integers ? 4 : static_cast<std::int64_t>(SizeOf(dtype)); }
  bool operator==(const TensorForm&) const = default;
};

// The members mean what they mean in cppool_attention_call.
struct CallForm {
  bool backward = false, deterministic = false;
  cppool_attention_anchor anchor = CPPOOL_TOP_LEFT;
  std::int64_t window_left = -1, window_right = -1;
  std::int64_t alibi_diagonal = 0;
  std::int64_t batch = 1, queries = 0, keys = 0;
  std::int64_t heads = 1, kv_heads = 1, dim_qk = 0, dim_v = 0;
  double scale = 1, p_scale = 0;
  std::array<TensorForm, kCallTensors> tensors;
  bool operator==(const CallForm&) const = default;
};

using CallData = std::array<void*, kCallTensors>;  // where each tensor begins; NULL: none

// The C structs of a call. They point into this object, which a kernel may use for the time of one function.
class CallView {
 public:
  // `device`: the CUDA device, -1 on the host.
  CallView(const CallForm& form, int device, const CallData& data = {});
  CallView(const CallView&) = delete;
  CallView& operator=(const CallView&) = delete;
  const cppool_attention_call* call() const { return &call_; }
  const cppool_attention_tensors* tensors() const { return &tensors_; }

 private:
  CallForm form_;
  std::array<cppool_tensor, kCallTensors> each_{};
  cppool_attention_tensors tensors_{};
  cppool_attention_call call_{};
};

// Query heads head .. head + heads of a rank's, which read its key/value heads kv_head .. kv_head + kv_heads,
// equally many each.
struct HeadGroup {
  int head = 0, heads = 1, kv_head = 0, kv_heads = 1;
  bool operator==(const HeadGroup&) const = default;
};
// The whole shape as few groups: one, but where an exchange of heads has cut through the query heads of a
// key/value head.
std::vector<HeadGroup> HeadGroupsOf(const KernelShape& shape);

// How a kernel wants its lse, delta and maxima, and what it writes its results in.
struct ResultForm {
  bool fp32 = false;        // out and gradients; else as the shape has them
  bool packed_lse = false;  // [batch, heads, queries]; else as rows of the block
  bool fp8_out = false;     // out of forward calls in fp8 is E4M3
};

// The same call on tensors of its own: rows with gaps between them, batches with larger ones.
CallForm Strided(const CallForm& form);

// What one call computes: a rectangle, or several sequences of different lengths.
struct CallArea {
  CallArea(const Rectangle& rectangle, cppool_attention_anchor anchor);
  CallArea(PackedSequences packed);
  // Where the whole call is: packed sequences are one batch of 1 that holds the rows of all.
  Rectangle where;
  cppool_attention_anchor anchor;
  std::int64_t window_left, window_right;
  // Packed: each of them, in the order of their rows on both sides, with a batch of 1. Else empty.
  std::vector<Rectangle> sequences;
};

// The call of one pass for one group of heads: the strides are those of the block's buffers.
CallForm FormOf(bool backward, const KernelRequest& request, const CallArea& area, const HeadGroup& group,
                std::int32_t q_step, std::int32_t k_step, const ResultForm& results);

}  // namespace cppool::kernels::table
