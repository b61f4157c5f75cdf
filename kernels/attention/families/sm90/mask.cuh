// Which pairs of a warpgroup's 64 queries and a block of keys a band hides.
#pragma once

#include <cmath>

namespace cppool::kernels::cuda::sm90 {

// Whether a band lets all of `kBlock` keys from position `key` be seen by all of 64 queries from position `query`.
template <int kBlock>
__device__ __forceinline__ bool AllVisible(int low, int high, int query, int key, int keys) {
  return keys == kBlock && key + kBlock - 1 - query <= high && key - (query + 63) >= low;
}

// Sets hidden logits to -inf, keys from `keys` on too. `query` is the position of this thread's first row, the
// second is 8 further.
template <int kBlock>
__device__ __forceinline__ void Mask(float (&logits)[kBlock / 2], int band_low, int band_high, int query,
                                     int key, int keys) {
  const int column = (threadIdx.x % 4) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Visible columns of the row, less this thread's first one.
    const int shift = query + half * 8 - key;
    const int low = max(band_low + shift, 0) - column, high = min(band_high + shift, keys - 1) - column;
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = n * 8 + i;
        if (at < low || at > high) logits[n * 4 + half * 2 + i] = -INFINITY;
      }
  }
}

}  // namespace cppool::kernels::cuda::sm90
