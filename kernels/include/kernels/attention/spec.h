// What attention is asked for: shapes, types, mask. The words of Transformer Engine's test matrix.
#pragma once

#include <cstdint>
#include <vector>

namespace cppool::kernels {

enum class Dtype { kFp16, kBf16, kFp32, kFp64 };  // inputs and outputs of attention are kFp16 or kBf16
enum class QkvFormat { kBshd, kSbhd };
enum class CpCommType { kP2p, kAllGather, kA2a, kA2aP2p };
enum class AttnMaskType { kNoMask, kCausal, kCausalBottomRight };

constexpr std::size_t SizeOf(Dtype dtype) {
  return dtype == Dtype::kFp64 ? 8 : dtype == Dtype::kFp32 ? 4 : 2;
}

// Key j is visible to query i exactly when low <= j - i <= high (positions in the sequence).
struct Band {
  std::int32_t low;
  std::int32_t high;
  bool operator==(const Band&) const = default;
};
inline constexpr std::int32_t kOpen = 1 << 26;  // farther than any two positions (lengths end at 2^24)

struct AttentionSpec {
  std::int64_t batch = 2;
  std::int64_t seqlen_q = 4096;
  std::int64_t seqlen_kv = 4096;
  int heads = 16;     // query heads
  int kv_heads = 16;  // num_gqa_groups: divides heads
  int dim_qk = 128;
  int dim_v = 128;
  Dtype dtype = Dtype::kBf16;
  QkvFormat format = QkvFormat::kBshd;
  CpCommType comm = CpCommType::kP2p;
  AttnMaskType mask = AttnMaskType::kCausal;
  std::int64_t window_left = -1;  // -1: open
  std::int64_t window_right = -1;
  double scale = 0;  // of the logits; the case's default is 1/sqrt(dim_qk)
  bool training = true;
  std::uint64_t seed = 1234;
};

// The rule on positions that mask and window of `spec` mean for a sequence of these lengths.
Band BandOf(const AttentionSpec& spec, std::int64_t seqlen_q, std::int64_t seqlen_kv);

// The head dimensions that there are kernels for, on either runtime, and the same as text for a message.
bool SupportedHeadDims(int dim_qk, int dim_v);
inline constexpr const char* kSupportedHeadDims =
    "64, 128, 256, 192 with head_dim_v 128, 128 with head_dim_v 64";

}  // namespace cppool::kernels
