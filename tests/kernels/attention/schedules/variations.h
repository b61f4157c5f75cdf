// Cases that every schedule must run, whatever its kernels can do.
#pragma once

#include <functional>

#include "tests/kernels/attention/schedules/host_world.h"

namespace cppool::test {

// Runs the small case, as `vary` leaves it, under every schedule that the world can have.
inline void WithEverySchedule(HostWorld& world, const std::function<void(kernels::AttentionSpec&)>& vary) {
  for (const kernels::CpCommType comm : kComms) {
    if (!Possible(comm, world.size())) continue;
    kernels::AttentionSpec spec = Small(world.size(), comm);
    vary(spec);
    world.RequireAllHold(spec);
  }
}

// GQA in fp16 without a mask, with more keys than queries.
inline void UnequalGqa(kernels::AttentionSpec& spec, int ranks) {
  spec.mask = kernels::AttnMaskType::kNoMask;
  spec.kv_heads = 2;
  spec.dtypes = kernels::TensorDtypes(kernels::Dtype::kFp16);
  spec.dim_qk = 128;
  spec.seqlen_q = 6 * ranks;
  spec.seqlen_kv = 10 * ranks;
}

// MQA with a window to the left, sequences side by side.
inline void NarrowWindow(kernels::AttentionSpec& spec) {
  spec.window_left = 5;
  spec.kv_heads = 1;
  spec.format = kernels::QkvFormat::kSbhd;
}

// Packed sequences of different lengths with padding between them, and a softmax offset.
inline void PackedAndPadded(kernels::AttentionSpec& spec) {
  spec.format = kernels::QkvFormat::kThd;
  spec.pad_between_seqs = true;
  spec.batch = 5;
  spec.mask = kernels::AttnMaskType::kPaddingCausal;
  spec.softmax = kernels::SoftmaxType::kLearnable;
  spec.kv_heads = 2;
}

// Queries that see no key, with a softmax offset.
inline void BlindQueries(kernels::AttentionSpec& spec, int ranks) {
  spec.mask = kernels::AttnMaskType::kCausalBottomRight;
  spec.seqlen_q = 18 * ranks;
  spec.seqlen_kv = 4 * ranks;
  spec.softmax = kernels::SoftmaxType::kOffByOne;
}

}  // namespace cppool::test
