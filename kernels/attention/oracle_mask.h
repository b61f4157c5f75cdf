// The mask as the oracle reads it: for each query the range of keys it sees. Written from what the words of
// the mask mean and apart from BandOf, so that a mistake in either shows.
#pragma once

#include <cstdint>

#include "kernels/attention/host_device.h"
#include "kernels/attention/spec.h"

namespace cppool::kernels {

struct KeyRange {
  std::int64_t begin;
  std::int64_t end;  // begin == end: the query sees nothing
};

struct OracleMask {
  AttnMaskType mask;
  std::int64_t window_left;  // -1: open
  std::int64_t window_right;
  std::int64_t seqlen_q;
  std::int64_t seqlen_kv;

  CPPOOL_HOST_DEVICE KeyRange Keys(std::int64_t query) const {
    const bool causal = mask != AttnMaskType::kNoMask;
    // The key that the query stands on: its own position, or counted from the ends of both sequences.
    const std::int64_t own = mask == AttnMaskType::kCausal ? query : query + seqlen_kv - seqlen_q;
    std::int64_t begin = 0;
    std::int64_t end = seqlen_kv;
    if (causal) {
      end = own + 1;
      if (window_left >= 0) begin = own - window_left;
    } else if (!(window_left < 0 && window_right == 0)) {  // (-1, 0) without a causal mask asks for no window
      if (window_left >= 0) begin = own - window_left;
      if (window_right >= 0) end = own + window_right + 1;
    }
    if (begin < 0) begin = 0;
    if (end > seqlen_kv) end = seqlen_kv;
    if (begin > seqlen_kv) begin = seqlen_kv;
    if (end < begin) end = begin;
    return {begin, end};
  }
};

}  // namespace cppool::kernels
