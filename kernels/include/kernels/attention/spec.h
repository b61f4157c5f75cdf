// What attention is asked for: shapes, types, mask. The words of Transformer Engine's test matrix.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/attention/fp8_recipe.h"
#include "kernels/attention/tensor.h"

namespace cppool::kernels {

enum class QkvFormat { kBshd, kSbhd, kThd };  // thd: packed sequences
enum class CpCommType { kP2p, kAllGather, kA2a, kA2aP2p };
// How keys, values, heads and their gradients go from rank to rank: by calls on the world's communicators, or
// by copies between devices. kAuto: by copies where all devices reach each other.
enum class Transfers { kAuto, kComm, kPeer };
// Of the forward pass of a ring: a launch of the kernel for each step, or one of a kernel that keys arrive
// under.
enum class Launches { kAuto, kSteps, kOne };
enum class AttnMaskType {
  kNoMask,
  kCausal,
  kCausalBottomRight,
  kPadding,  // these three: sequences have lengths of their own
  kPaddingCausal,
  kPaddingCausalBottomRight
};
enum class BiasType { kNone, kPostScale, kAlibi };  // added to the scaled logits
enum class SoftmaxType { kVanilla, kOffByOne, kLearnable };

constexpr bool IsCausal(AttnMaskType mask) {
  return mask != AttnMaskType::kNoMask && mask != AttnMaskType::kPadding;
}
constexpr bool IsPadding(AttnMaskType mask) { return mask >= AttnMaskType::kPadding; }

// Over which axes a bias differs; over the others it is broadcast. It always differs by key. "1hss" is heads
// and queries, "111s" neither.
struct BiasShape {
  bool batch = false;
  bool heads = true;
  bool queries = true;
  bool operator==(const BiasShape&) const = default;
};

// The sequences of one side, queries or keys. Sequence i has length[i] tokens in room[i] places of the buffer
// (a multiple of 2 * world size); places without a token are padding: nothing reads them, and what is written
// there is zero.
struct Sequences {
  std::vector<std::int64_t> length;
  std::vector<std::int64_t> room;  // bshd, sbhd: all the same
  std::int64_t rows = 0;  // of the whole buffer: batch * max_seqlen, which in thd may exceed the rooms' sum
  bool operator==(const Sequences&) const = default;

  bool padded() const;  // whether any row holds no token
};
// Returns `batch` sequences of `length` tokens, without padding.
Sequences UniformSequences(std::int64_t batch, std::int64_t length);

// Key j is visible to query i exactly when low <= j - i <= high (positions in the sequence).
struct Band {
  std::int32_t low;
  std::int32_t high;
  std::int32_t diagonal = 0;  // j - i where the mask is anchored: ALiBi's distance is counted from there
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
  TensorDtypes dtypes;
  std::optional<Fp8Recipe> fp8;  // `dtypes` are then bf16; what is quantized follows from the recipe
  // mxfp8: blocks along tokens keep to the chunks of so many ranks, with CP and without.
  int mx_world_size = 1;
  QkvFormat format = QkvFormat::kBshd;
  CpCommType comm = CpCommType::kP2p;
  int a2a_size =
      2;  // kA2aP2p: how many adjacent ranks exchange heads; 1 < a2a_size < world size, which it divides
  Transfers transfers = Transfers::kAuto;
  Launches launches = Launches::kAuto;
  AttnMaskType mask = AttnMaskType::kCausal;
  Sequences queries, keys;        // of `batch` sequences each; DrawSequences or the request says
  bool pad_between_seqs = false;  // thd: sequences do not fill their rooms
  BiasType bias = BiasType::kNone;
  BiasShape bias_shape;
  SoftmaxType softmax = SoftmaxType::kVanilla;
  bool max_logit = false;
  bool deterministic = false;     // run twice and compare the bits
  std::int64_t window_left = -1;  // -1: open
  std::int64_t window_right = -1;
  double scale = 0;  // of the logits; the case's default is 1/sqrt(dim_qk)
  bool training = true;
  std::uint64_t seed = 1234;
};

// The rule on positions that mask and window of `spec` mean for a sequence of these lengths.
Band BandOf(const AttentionSpec& spec, std::int64_t seqlen_q, std::int64_t seqlen_kv);
std::vector<Band> BandsOf(const AttentionSpec& spec);  // by sequence

// Fills spec.queries and spec.keys. Without `padding` and thd every sequence has seqlen_q and seqlen_kv
// tokens. With them lengths are drawn from the seed, the same for both sides when seqlen_q == seqlen_kv: one
// sequence is longer than half, and of four or more one is empty and one has a single token. thd rounds each
// room up to 2 * world_size, and without pad_between_seqs fills it.
void DrawSequences(AttentionSpec& spec, int world_size);

// ALiBi's slope of each head (Press et al. 2021): 2^(-8 (h+1) / n) for n a power of two, else those of the
// largest power of two below, followed by every other one of the next.
std::vector<float> AlibiSlopes(int heads);

}  // namespace cppool::kernels
