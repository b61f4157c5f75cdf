// Which pairs of a warpgroup's 64 queries and a block of keys a band hides. Of a part of a block of which a
// warpgroup sees nothing it makes no exponentials. (Products for some parts alone, started in a branch, are
// put one after another by the assembler.)
#pragma once

#include <cmath>
#include <cstdint>

namespace cppool::kernels::cuda::sm90 {

// The parts of a block that are left out apart: halves of 64 keys, or the whole. A bit stands for each.
template <int kBlock>
inline constexpr int kParts = kBlock == 128 ? 2 : 1;
template <int kBlock>
inline constexpr unsigned kAllParts = (1u << kParts<kBlock>)-1;

// Whether a band lets all of `kBlock` keys from position `key` be seen by all of 64 queries from position
// `query`.
template <int kBlock>
__device__ __forceinline__ bool AllVisible(int low, int high, int query, int key, int keys) {
  return keys == kBlock && key + kBlock - 1 - query <= high && key - (query + 63) >= low;
}

// Returns the parts of which any of `queries` from position `query` sees a key.
template <int kBlock>
__device__ __forceinline__ unsigned SeenParts(int low, int high, int query, int queries, int key, int keys) {
  unsigned seen = 0;
#pragma unroll
  for (int part = 0; part < kParts<kBlock>; ++part) {
    constexpr int kKeys = kBlock / kParts<kBlock>;
    const int first = part * kKeys, last = min(first + kKeys, keys) - 1;
    if (queries > 0 && first <= last && key + first - (query + queries - 1) <= high &&
        key + last - query >= low)
      seen |= 1u << part;
  }
  return seen;
}

// Counts which of a row's columns 8 n and 8 n + 1, in this order, come before `column`, at most `kCount`.
template <int kCount>
__device__ __forceinline__ int ColumnsBefore(int column) {
  return column <= 0 ? 0 : min(column / 8 * 2 + min(column % 8, 2), kCount);
}

// Sets hidden logits to -inf, keys from `keys` on too. `query` is the position of this thread's first row,
// the second is 8 further. What a row sees are bits of one word: two instructions for a logit, whatever hides
// it.
template <int kBlock>
__device__ __forceinline__ void Mask(float (&logits)[kBlock / 2], int band_low, int band_high, int query,
                                     int key, int keys) {
  constexpr int kColumns = kBlock / 4;  // of this thread
  static_assert(kColumns <= 32);
  const int column = (threadIdx.x % 4) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Visible columns of the row, less this thread's first one: from `low` to before `end`.
    const int shift = query + half * 8 - key;
    const int low = band_low + shift - column, end = min(band_high + shift + 1, keys) - column;
    const std::uint32_t seen = static_cast<std::uint32_t>((1ull << ColumnsBefore<kColumns>(end)) - 1) &
                               ~static_cast<std::uint32_t>((1ull << ColumnsBefore<kColumns>(low)) - 1);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float& logit = logits[i / 2 * 4 + half * 2 + i % 2];
      if (!(seen >> i & 1)) logit = -INFINITY;
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90
