// The mask of the oracle: for each query the range of keys that it sees; and its ALiBi. Written from the
// definitions and independent of BandOf and AlibiSlopes, so that a mistake in either one fails a check.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/spec.h"
#include "kernels/host_device.h"

namespace cppool::kernels {

struct KeyRange {
  std::int64_t begin;
  std::int64_t end;  // begin == end: the query sees no key
};

struct OracleMask {
  AttnMaskType mask;
  std::int64_t window_left;  // -1: open
  std::int64_t window_right;
  std::int64_t seqlen_q;  // the sequence's tokens, without padding
  std::int64_t seqlen_kv;

  // The key on the query's diagonal: the key at the query's position (top-left alignment) or at the same
  // distance from the end of the sequence (bottom-right alignment). May be outside the sequence.
  CPPOOL_HOST_DEVICE std::int64_t Own(std::int64_t query) const {
    switch (mask) {
      case AttnMaskType::kCausal:
      case AttnMaskType::kPaddingCausal:
        return query;
      case AttnMaskType::kNoMask:
      case AttnMaskType::kCausalBottomRight:
      case AttnMaskType::kPadding:
      case AttnMaskType::kPaddingCausalBottomRight:
        break;
    }
    return seqlen_kv - (seqlen_q - query);
  }

  // Returns ALiBi's distance.
  CPPOOL_HOST_DEVICE double Distance(std::int64_t query, std::int64_t key) const {
    const std::int64_t ahead = key - Own(query);
    return static_cast<double>(ahead < 0 ? -ahead : ahead);
  }

  CPPOOL_HOST_DEVICE KeyRange Keys(std::int64_t query) const {
    const bool causal = mask != AttnMaskType::kNoMask && mask != AttnMaskType::kPadding;
    const std::int64_t own = Own(query);
    std::int64_t begin = 0;
    std::int64_t end = seqlen_kv;
    if (causal) {
      end = own + 1;
      if (window_left >= 0) begin = own - window_left;
    } else if (!(window_left < 0 && window_right == 0)) {  // (-1, 0) without a causal mask means no window
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

// One slope per head (Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022, section 3): for n heads the
// geometric sequence with first element and ratio 2^(-8/n). If n is not a power of two, as in the authors'
// code: the sequence for the next lower power of two, then elements 1, 3, 5, ... (counted from 1) of the
// sequence for the next higher power.
std::vector<float> OracleAlibiSlopes(int heads);

}  // namespace cppool::kernels
