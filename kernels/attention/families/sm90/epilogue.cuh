// How a consumer warp of the forward kernel reads the state that it continues from, and writes what it has
// made: its 16 query rows of one head.
#pragma once

#include <cmath>

#include "kernels/attention/families/sm90/shared.cuh"
#include "kernels/attention/families/sm90/softmax.cuh"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

// A warp's rows of a tile.
struct WarpRows {
  int token, member;  // of the first, see TileInfo
  int valid;          // of 16; others are no tokens of the tile
  int head;

  __device__ __forceinline__ std::int64_t State(const ForwardParameters& p, int row) const {
    return (static_cast<std::int64_t>(token + row) * p.work.query_step + member) * p.map.heads + head;
  }
};

__device__ __forceinline__ WarpRows RowsOf(const TileInfo& tile, int first) {
  return {tile.token + first, tile.member, min(max(tile.length - first, 0), 16), tile.head};
}

// Continues from the output and lse so far.
template <int kDimV>
__device__ __forceinline__ void ReadState(const ForwardParameters& p, const WarpRows& rows,
                                          SoftmaxState& state, float (&out)[kDimV / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    if (row >= rows.valid) continue;
    const std::int64_t at = rows.State(p, row);
    const float lse = p.lse[at];
    if (lse == -INFINITY) continue;
    state.most[half] = lse / p.scale;
    state.sum[half] = lane % 4 == 0 ? 1.0f : 0.0f;
    const float* from = p.accumulator + at * kDimV + (lane % 4) * 2;
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(from + n * 8);
      out[n * 4 + half * 2] = two.x;
      out[n * 4 + half * 2 + 1] = two.y;
    }
  }
}

// Writes lse, and scales the output to what is to be written.
template <int kDimV>
__device__ __forceinline__ void Normalise(const ForwardParameters& p, const WarpRows& rows,
                                          const SoftmaxState& state, float (&out)[kDimV / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = half * 8 + lane / 4;
    const bool unseen = sum == 0;  // NaN is not: it must reach the output
    const float lse = unseen ? -INFINITY : state.most[half] * p.scale + logf(sum);
    if (lane % 4 == 0 && row < rows.valid) p.lse[rows.State(p, row)] = lse;
    float factor = unseen ? 0.0f : 1.0f / sum;
    if (p.last && p.softmax_offset) factor /= 1.0f + expf(p.softmax_offset[rows.head] - lse);
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) {
      out[n * 4 + half * 2] *= factor;
      out[n * 4 + half * 2 + 1] *= factor;
    }
  }
}

// The same in fp8, where an earlier call's output is merged here instead of continued: P of this call is
// relative to its own maximum, so that its cast does not depend on other keys.
template <int kDimV>
__device__ __forceinline__ void NormaliseFp8(const ForwardParameters& p, const WarpRows& rows,
                                             const SoftmaxState& state, const ForwardUnits& units,
                                             float (&out)[kDimV / 2]) {
  constexpr float kLn2 = 0.6931471805599453f;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = half * 8 + lane / 4;
    const bool own = row < rows.valid, unseen = sum == 0;  // NaN is not: it must reach the output
    float lse = unseen ? -INFINITY : state.most[half] * units.scale + (logf(sum) - units.lift * kLn2);
    float factor = unseen ? 0.0f : units.v / sum, old_factor = 0;
    if (!p.first) {
      const float old = own ? p.lse[rows.State(p, row)] : -INFINITY;
      __syncwarp();  // all lanes of a row have read it
      const float top = lse > old ? lse : old;
      if (top != -INFINITY) {
        const float merged = top + logf(expf(old - top) + expf(lse - top));
        factor *= expf(lse - merged);
        old_factor = expf(old - merged);
        lse = merged;
      }
    }
    if (lane % 4 == 0 && own) p.lse[rows.State(p, row)] = lse;
    if (p.last && p.softmax_offset) {
      const float whole = 1.0f + expf(p.softmax_offset[rows.head] - lse);
      factor /= whole;
      old_factor /= whole;
    }
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) {
      out[n * 4 + half * 2] *= factor;
      out[n * 4 + half * 2 + 1] *= factor;
    }
    if (!own || old_factor == 0) continue;
    const float* from = p.accumulator + rows.State(p, row) * kDimV + (lane % 4) * 2;
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(from + n * 8);
      out[n * 4 + half * 2] = fmaf(two.x, old_factor, out[n * 4 + half * 2]);
      out[n * 4 + half * 2 + 1] = fmaf(two.y, old_factor, out[n * 4 + half * 2 + 1]);
    }
  }
}

// Stores from registers: the accumulator, or the output in T.
template <typename T, int kDimV>
__device__ __forceinline__ void WriteRows(const ForwardParameters& p, const WarpRows& rows,
                                          const float (&out)[kDimV / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    if (row >= rows.valid) continue;
    const std::int64_t at = rows.State(p, row) * kDimV + (lane % 4) * 2;
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) {
      const float x = out[n * 4 + half * 2], y = out[n * 4 + half * 2 + 1];
      if (p.last) {
        *reinterpret_cast<std::uint32_t*>(static_cast<T*>(p.out_rows) + at + n * 8) = ptx::Pack<T>(x, y);
      } else {
        *reinterpret_cast<float2*>(p.accumulator + at + n * 8) = make_float2(x, y);
      }
    }
  }
}

// The output in T through a buffer in shared memory, [kDimV / 64][16][64], swizzled, of this warp alone. All
// 16 rows leave by a tensor copy that still reads the buffer when this returns; fewer by plain stores.
template <typename T, int kDimV>
__device__ __forceinline__ void WriteRowsStaged(const ForwardParameters& p, const WarpRows& rows,
                                                const float (&out)[kDimV / 2], std::uint32_t buffer) {
  const int lane = threadIdx.x % 32;
  {
    const std::uint32_t line = buffer + lane % 16 * kRowBytes;
#pragma unroll
    for (int n = 0; n < kDimV / 16; ++n) {  // 16 columns: two 16-byte chunks of a row
      const std::uint32_t chunk = static_cast<std::uint32_t>((n % 4 * 2 + lane / 16) ^ (lane % 8));
      const float* from = &out[n * 8];
      ptx::StoreMatrix(line + n / 4 * (16 * kRowBytes) + chunk * 16, ptx::Pack<T>(from[0], from[1]),
                       ptx::Pack<T>(from[2], from[3]), ptx::Pack<T>(from[4], from[5]),
                       ptx::Pack<T>(from[6], from[7]));
    }
  }
  if (rows.valid == 16) {
    ptx::FenceShared();
    __syncwarp();
    if (lane == 0) ptx::StoreBox(&p.out, {rows.token, rows.member, rows.head}, buffer);
    return;
  }
  __syncwarp();
  constexpr int kChunks = kDimV / 8;  // of a row
  for (int i = lane; i < rows.valid * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const uint4 value =
        ptx::LoadShared16(buffer + chunk / 8 * (16 * kRowBytes) + row * kRowBytes + ((chunk ^ row) % 8) * 16);
    T* const to = static_cast<T*>(p.out_rows) + rows.State(p, row) * kDimV + chunk * 8;
    *reinterpret_cast<uint4*>(to) = value;
  }
  ptx::FenceShared();  // TMA reads the buffer next
  __syncwarp();
}

// Raises max_logit[head] by the rows that are tokens. The same bits in any order of warps.
__device__ __forceinline__ void RaiseMaxLogit(const ForwardParameters& p, const WarpRows& rows,
                                              const float (&largest)[2], float scale) {
  const int lane = threadIdx.x % 32;
  float most = -INFINITY;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (half * 8 + lane / 4 < rows.valid) most = fmaxf(most, largest[half]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  if (lane != 0 || most == -INFINITY) return;
  most *= scale;
  // The order of floats is that of integers for positive ones, and the reverse for negative ones.
  if (most >= 0) {
    atomicMax(reinterpret_cast<int*>(p.max_logit + rows.head), __float_as_int(most));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(p.max_logit + rows.head), __float_as_uint(most));
  }
}

}  // namespace cppool::kernels::cuda::sm90
