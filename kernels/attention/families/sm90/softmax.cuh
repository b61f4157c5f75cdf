// Online softmax (Milakov and Gimelshein 2018) in tiles (FlashAttention-2, Dao 2023), in powers of 2, on the
// two rows of a warpgroup's accumulator that a thread shares with the three others of its quad. The running
// maximum follows only when a row of the warp has outgrown it by kSlack: exponentials stay below 2^kSlack,
// and most blocks need not rescale the output.
#pragma once

#include <cmath>
#include <type_traits>

#include "kernels/attention/families/sm90/mask.cuh"
#include "kernels/attention/families/sm90/ptx.cuh"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

// In fp8 it is 0: P is at most 1 then, and its cast has all of E4M3 for it.
template <typename Config>
inline constexpr float kSlack =
    Config::kNative && Config::kDimQk == 64 ? 2 : Config::kFp8 ? 0 : 8;

// Whether SoftmaxState::most is the maximum.
template <typename Config>
inline constexpr bool kMostIsLargest = Config::kNative && kSlack<Config> == 0;

// Registers of kLogits exponentials as an operand.
template <typename T, int kLogits>
inline constexpr int kOperandRegisters = std::is_same_v<T, E4M3> ? kLogits / 4 : kLogits / 2;

struct SoftmaxState {
  float most[2];     // running maximum of the unscaled logits; -inf before the first visible key
  float sum[2];      // of this thread's columns' exponentials
  float largest[2];  // visible unscaled logit of this thread's columns; native products have it in `most`

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = largest[half] = -INFINITY;
      sum[half] = 0;
    }
  }

  // Rows from `valid` on are no tokens and may hold anything: they never make the warp rescale, so that the
  // bits of the others do not depend on them. Their own results are not used.
  __device__ __forceinline__ void Ignore(int valid) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * 8 + static_cast<int>(threadIdx.x) % 32 / 4 >= valid) most[half] = INFINITY;
  }
};

// What the output so far is to be multiplied by.
struct Rescale {
  bool needed;  // the same in the whole warp
  float factor[2];

  template <int kCount>
  __device__ __forceinline__ void Apply(float (&out)[kCount]) const {
    if (!needed) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= factor[i / 2 % 2];
  }
};

// Lets the running maximum follow the logits, if they have outgrown it.
template <typename Config, int kCount>
__device__ __forceinline__ Rescale FollowMost(const float (&logits)[kCount], SoftmaxState& state,
                                              float scale_log2) {
  float most[2];  // of this thread's columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains: the latency of one would show.
    float a = fmaxf(logits[half * 2], logits[half * 2 + 1]);
    float b = fmaxf(logits[4 + half * 2], logits[4 + half * 2 + 1]);
#pragma unroll
    for (int n = 8; n < kCount; n += 8) {
      a = fmaxf(a, fmaxf(logits[n + half * 2], logits[n + half * 2 + 1]));
      b = fmaxf(b, fmaxf(logits[n + 4 + half * 2], logits[n + 4 + half * 2 + 1]));
    }
    most[half] = fmaxf(a, b);
    if constexpr (!kMostIsLargest<Config>) state.largest[half] = fmaxf(state.largest[half], most[half]);
  }
  Rescale rescale{false, {1, 1}};
  // -inf - -inf is NaN and compares false: a row that has seen nothing yet and sees nothing now does not
  // count.
  const bool outgrown = (most[0] - state.most[0]) * scale_log2 > kSlack<Config> ||
                        (most[1] - state.most[1]) * scale_log2 > kSlack<Config>;
  if (__any_sync(~0u, outgrown)) {
    rescale.needed = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = fmaxf(state.most[half], most[half]);
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      rescale.factor[half] = now == -INFINITY ? 1.0f : ptx::Exp2((state.most[half] - now) * scale_log2);
      state.most[half] = now;
      state.sum[half] *= rescale.factor[half];
    }
  }
  return rescale;
}

// Exponentials as the left operand of the product with the values, kCount from kFirst on. In E4M3 four of two
// columns of 8 are in a register: in the order in which transposed payloads have their keys (transposed.h).
template <typename T, int kSize, int kFirst = 0, int kCount = kSize>
__device__ __forceinline__ void PackOperand(const float (&from)[kSize],
                                            std::uint32_t (&to)[kOperandRegisters<T, kSize>]) {
  if constexpr (std::is_same_v<T, E4M3>) {
#pragma unroll
    for (int i = kFirst / 4; i < (kFirst + kCount) / 4; ++i) {
      const int at = i / 2 * 8 + i % 2 * 2;
      to[i] = ptx::PackE4M3(from[at], from[at + 1], from[at + 4], from[at + 5]);
    }
  } else {
#pragma unroll
    for (int i = kFirst / 2; i < (kFirst + kCount) / 2; ++i)
      to[i] = ptx::Pack<T>(from[i * 2], from[i * 2 + 1]);
  }
}

// Makes of kCount logits from kFirst on exponentials relative to the running maximum. They are 2^lift times
// as large.
template <int kFirst, int kCount, int kSize>
__device__ __forceinline__ void ExponentiatePart(float (&logits)[kSize], SoftmaxState& state,
                                                 float scale_log2, float lift) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float offset = (state.most[half] == -INFINITY ? 0.0f : state.most[half] * scale_log2) - lift;
    float sums[2] = {0, 0};
#pragma unroll
    for (int n = kFirst; n < kFirst + kCount; n += 4)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& logit = logits[n + half * 2 + i];
        logit = ptx::Exp2(fmaf(logit, scale_log2, -offset));
        sums[i] += logit;
      }
    state.sum[half] += sums[0] + sums[1];
  }
}

// The same of those of a block's parts kFirst to kEnd that are in `seen`, see SeenParts; of the others 0.
template <int kFirst, int kEnd, int kCount>
__device__ __forceinline__ void ExponentiateParts(float (&logits)[kCount], SoftmaxState& state,
                                                  float scale_log2, float lift, unsigned seen) {
  constexpr int kPart = kCount / kParts<kCount * 2>;
  constexpr unsigned kThese = (1u << kEnd) - (1u << kFirst);
  if constexpr (kFirst == kEnd) return;
  if ((seen & kThese) == kThese) {
    ExponentiatePart<kFirst * kPart, (kEnd - kFirst) * kPart>(logits, state, scale_log2, lift);
  } else if constexpr (kEnd - kFirst == 2) {
    ExponentiateParts<kFirst, kFirst + 1>(logits, state, scale_log2, lift, seen);
    ExponentiateParts<kFirst + 1, kEnd>(logits, state, scale_log2, lift, seen);
  } else {
#pragma unroll
    for (int i = kFirst * kPart; i < kEnd * kPart; ++i) logits[i] = 0;
  }
}

// The same of all parts, packed as the left operand of the product with the values.
template <typename T, int kCount>
__device__ __forceinline__ void Exponentiate(float (&logits)[kCount], SoftmaxState& state, float scale_log2,
                                             float lift, unsigned seen,
                                             std::uint32_t (&to)[kOperandRegisters<T, kCount>]) {
  constexpr int kBlock = kCount * 2, kPart = kCount / kParts<kBlock>;
  if (seen == kAllParts<kBlock>) {
    ExponentiatePart<0, kCount>(logits, state, scale_log2, lift);
    PackOperand<T>(logits, to);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOperandRegisters<T, kCount>; ++i) to[i] = 0;
  if constexpr (kParts<kBlock> == 2) {
    if (seen == 1) {
      ExponentiatePart<0, kPart>(logits, state, scale_log2, lift);
      PackOperand<T, kCount, 0, kPart>(logits, to);
    }
    if (seen == 2) {
      ExponentiatePart<kPart, kPart>(logits, state, scale_log2, lift);
      PackOperand<T, kCount, kPart, kPart>(logits, to);
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90
