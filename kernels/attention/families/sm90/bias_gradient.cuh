// The gradient of a bias: ds = p (dout v^T - delta) with p = exp(scale q k^T + bias - lse), added to an fp32
// tensor that sequences or heads may share.
//
// A thread block has a tile of queries and one head, or all heads if they share the bias, and a share of the
// tile's blocks of keys. One thread copies with TMA; one or two warpgroups have 64 queries each: logits and
// dout v^T in registers, ds through shared memory to TMA, which adds it to memory. Of heads that share the
// bias the sum is made in registers, in the order of the heads. So every element gets one addition from a
// launch.
#pragma once

#include "kernels/attention/families/common/kernel_parameters.h"
#include "kernels/attention/families/sm90/bias.cuh"
#include "kernels/attention/families/sm90/bias_gradient_shared.cuh"
#include "kernels/attention/families/sm90/mask.cuh"
#include "kernels/attention/families/sm90/parameters.h"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

struct BiasGradientParameters {
  CUtensorMap q, dout, k, v;  // boxes of 64 rows
  CUtensorMap gradient;       // boxes of 64 queries and 32 keys
  BiasParameters bias;
  const Tile* tiles;
  const Range* ranges;
  int query_step, key_step;
  HeadMap map;
  const float* lse;    // [rows_q, heads]
  const float* delta;  // [rows_q, heads]
  float scale_log2;
  bool sum_heads;                    // heads share the gradient
  int head_factor, sequence_factor;  // of the gradient, as in BiasParameters
  Fp8Parameters fp8;                 // read by kernels for fp8 alone

  __device__ __forceinline__ int KvHead(int head) const {
    return (map.head0 + head) / map.group - map.kv_head0;
  }
  __device__ __forceinline__ int EndHead(int first) const { return sum_heads ? map.heads : first + 1; }
};

// One thread describes what this thread block does. blockIdx.x counts tiles times heads, or tiles; blockIdx.y
// shares out their blocks.
template <typename Config>
__device__ __forceinline__ void FindWork(const BiasGradientParameters& p,
                                         const BiasGradientShared<Config>& shared) {
  const int heads = p.sum_heads ? 1 : p.map.heads, item = static_cast<int>(blockIdx.x);
  const Tile& tile = p.tiles[item / heads];
  int blocks = 0;
  for (int i = tile.range_begin; i < tile.range_end; ++i)
    blocks += (p.ranges[i].length + Config::kBlock - 1) / Config::kBlock;
  const int own = blocks - static_cast<int>(blockIdx.y) + static_cast<int>(gridDim.y) - 1;
  const int row = static_cast<int>(tile.row);  // rows fit, see tensor_map.h
  shared.control->tile = {item % heads,       own / static_cast<int>(gridDim.y),
                          row / p.query_step, row % p.query_step,
                          tile.position,      tile.length,
                          tile.band.low,      tile.band.high};
  shared.control->sequence = tile.sequence;
}

template <typename Config>
__device__ __forceinline__ void ProduceForBiasGradient(const BiasGradientParameters& p,
                                                       const BiasGradientShared<Config>& shared) {
  const TileInfo tile = shared.control->tile;
  const int sequence = shared.control->sequence, end_head = p.EndHead(tile.head);
  const Tile& listed = p.tiles[static_cast<int>(blockIdx.x) / (p.sum_heads ? 1 : p.map.heads)];
  Ring<Config::kQueryStages> q;
  Ring<Config::kStages> k;
  Ring<Config::kBiasStages> bias;
  int turn = 0, loaded = -1;
#pragma unroll 1
  for (int i = listed.range_begin; i < listed.range_end; ++i) {
    const Range range = p.ranges[i];
    const int token = static_cast<int>(range.row) / p.key_step,
              member = static_cast<int>(range.row) % p.key_step;
#pragma unroll 1
    for (int at = 0; at < range.length; at += Config::kBlock, ++turn) {
      if (turn % static_cast<int>(gridDim.y) != static_cast<int>(blockIdx.y)) continue;
#pragma unroll 1
      for (int head = tile.head; head < end_head; ++head) {
        if (head != loaded) {
          loaded = head;
          ptx::Wait(shared.EmptyQ(q.stage), q.parity ^ 1);
          ptx::ArriveExpecting(shared.FullQ(q.stage), Config::kQueryBytes);
#pragma unroll 1
          for (int group = 0; group < Config::kConsumers; ++group) {
            const ptx::RowCoordinates from{tile.token + group * 64, tile.member, head};
            ptx::LoadBox(shared.Queries(group, q.stage), &p.q, from, shared.FullQ(q.stage));
            ptx::LoadBox(shared.Dout(group, q.stage), &p.dout, from, shared.FullQ(q.stage));
          }
          q.Advance();
        }
        if (head == tile.head || p.KvHead(head) != p.KvHead(head - 1)) {
          const ptx::RowCoordinates from{token + at, member, p.KvHead(head)};
          ptx::Wait(shared.EmptyK(k.stage), k.parity ^ 1);
          shared.control->blocks[k.stage] = {range.position + at, min(range.length - at, Config::kBlock)};
          ptx::ArriveExpecting(shared.FullK(k.stage), Config::kKeyBytes);
          ptx::LoadBox(shared.Keys(k.stage), &p.k, from, shared.FullK(k.stage));
          ptx::LoadBox(shared.Values(k.stage), &p.v, from, shared.FullK(k.stage));
          k.Advance();
        }
#pragma unroll 1
        for (int group = 0; group < Config::kConsumers; ++group) {
          const std::uint32_t full = shared.FullBias(group, bias.stage);
          ptx::Wait(shared.EmptyBias(group, bias.stage), bias.parity ^ 1);
          ptx::ArriveExpecting(full, kBiasBoxBytes);
          ptx::LoadBiasBox(shared.Bias(group, bias.stage), &p.bias.tensor,
                           {range.position + at, tile.position + group * 64, head * p.bias.head_factor,
                            sequence * p.bias.sequence_factor},
                           full);
        }
        bias.Advance();
      }
    }
  }
}

template <typename T, typename Config>
class BiasGradientConsumer {
 public:
  __device__ __forceinline__ BiasGradientConsumer(const BiasGradientParameters& p,
                                                  const BiasGradientShared<Config>& shared)
      : p_(p),
        shared_(shared),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)),
        warp_row_(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {}

  __device__ __forceinline__ void Run() {
    const TileInfo& tile = shared_.control->tile;
    const int end_head = p_.EndHead(tile.head);
    const bool many = end_head - tile.head > 1;  // heads, so that the queries change with every step
    RowStates states = ReadStates(tile.head);
    for (int block = 0; block < tile.blocks; ++block) {
      float sum[kBlock / 2];
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) sum[i] = 0;
      BlockInfo now{};
      for (int head = tile.head; head < end_head; ++head) {
        if (many || block == 0) ptx::Wait(shared_.FullQ(q_.stage), q_.parity);
        if (head == tile.head || p_.KvHead(head) != p_.KvHead(head - 1)) {
          ptx::Wait(shared_.FullK(k_.stage), k_.parity);
          now = shared_.control->blocks[k_.stage];
        }
        float logits[kBlock / 2], dp[kBlock / 2];
        BeginProducts();
        StartTransposed<T, Config::kDimQk, kBlock>(logits,
                                                   Operand::OverDim(shared_.Queries(group_, q_.stage)),
                                                   Operand::OverDim(shared_.Keys(k_.stage)));
        CommitProducts();
        StartTransposed<T, Config::kDimV, kBlock>(dp, Operand::OverDim(shared_.Dout(group_, q_.stage)),
                                                  Operand::OverDim(shared_.Values(k_.stage)));
        CommitProducts();
        RowStates next = states;
        if (many) next = ReadStates(head + 1 < end_head ? head + 1 : tile.head);
        WaitForProducts<1>();
        Settle(logits);
        ptx::Wait(shared_.FullBias(group_, bias_.stage), bias_.parity);
        float inverse_scale = p_.bias.inverse_scale, scale_log2 = p_.scale_log2;
        if constexpr (Config::kFp8) inverse_scale /= LogitUnit(), scale_log2 *= LogitUnit();
        AddBiasTile<T, kBlock>(logits, shared_.Bias(group_, bias_.stage), true, inverse_scale);
        ptx::ReleaseToCopies(shared_.EmptyBias(group_, bias_.stage));
        bias_.Advance();
        const bool visible = MaskHidden(logits, tile, now);
#pragma unroll
        for (int i = 0; i < kBlock / 2; ++i)
          logits[i] = ptx::Exp2(fmaf(logits[i], scale_log2, -states.lse[i / 2 % 2]));
        WaitForProducts<0>();
        Settle(dp);
        if (many) {
          if (threadIdx.x % 32 == 0) ptx::Arrive(shared_.EmptyQ(q_.stage));
          q_.Advance();
        }
        if (head + 1 == end_head || p_.KvHead(head + 1) != p_.KvHead(head)) {
          ptx::Arrive(shared_.EmptyK(k_.stage));
          k_.Advance();
        }
        if constexpr (Config::kFp8) {
          const float unit = ForwardUnits::ScaleOf(p_.fp8.dout) * ForwardUnits::ScaleOf(p_.fp8.v);
#pragma unroll
          for (int i = 0; i < kBlock / 2; ++i) dp[i] *= unit;
        }
        if (!visible) {
          // Rows of no token may hold NaN, which a probability of 0 does not hide.
#pragma unroll
          for (int i = 0; i < kBlock / 2; ++i)
            if (logits[i] == 0) dp[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < kBlock / 2; ++i)
          sum[i] = fmaf(logits[i], dp[i] - states.delta[i / 2 % 2], sum[i]);
        states = next;
      }
      Add(sum, tile, now);
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::WaitForStores();
  }

 private:
  static constexpr int kBlock = Config::kBlock;
  static constexpr int kGroupBarrier = 1;  // one per consumer among its own warps

  // In fp8 operands are payloads, and neither P nor dS is cast: their sum is that of the values before.
  __device__ __forceinline__ float LogitUnit() const {
    return fmaxf(ForwardUnits::LogitUnit(p_.fp8), BiasedForwardUnits::kLeast);
  }
  // The state of this thread's two rows.
  struct RowStates {
    float lse[2];  // in base 2; +inf for rows that see no key or are no tokens
    float delta[2];
  };

  __device__ __forceinline__ int Row(int half) const {
    return group_ * 64 + warp_row_ + static_cast<int>(threadIdx.x) % 32 / 4 + half * 8;
  }

  __device__ __forceinline__ RowStates ReadStates(int head) const {
    const TileInfo& tile = shared_.control->tile;
    RowStates states{{INFINITY, INFINITY}, {0, 0}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (Row(half) >= tile.length) continue;
      const std::int64_t at =
          (static_cast<std::int64_t>(tile.token + Row(half)) * p_.query_step + tile.member) * p_.map.heads +
          head;
      const float lse = p_.lse[at];
      states.lse[half] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      states.delta[half] = p_.delta[at];
    }
    return states;
  }

  // Sets the logits of hidden pairs to -inf, and returns whether there are none.
  __device__ __forceinline__ bool MaskHidden(float (&logits)[kBlock / 2], const TileInfo& tile,
                                             const BlockInfo& block) const {
    const int query = tile.position + group_ * 64;
    if (tile.length - group_ * 64 >= 64 &&
        AllVisible<kBlock>(tile.low, tile.high, query, block.position, block.length))
      return true;
    Mask<kBlock>(logits, tile.low, tile.high, tile.position + Row(0), block.position, block.length);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (Row(half) < tile.length) continue;
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n)
        logits[n * 4 + half * 2] = logits[n * 4 + half * 2 + 1] = -INFINITY;
    }
    return false;
  }

  // Adds this warpgroup's part of a block to memory. Pairs that are hidden add 0.
  __device__ __forceinline__ void Add(const float (&sum)[kBlock / 2], const TileInfo& tile,
                                      const BlockInfo& block) const {
    const bool leader = threadIdx.x % kWarpgroup == 0;
    if (leader) ptx::WaitForStoresToRead();
    ptx::SyncNamed(kGroupBarrier + group_, kWarpgroup);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_ + lane / 4 + half * 8;
      // Chunk 0 or 1 of the row; chunk c * 2 further is at ^ (c * 32).
      const std::uint32_t line =
          shared_.Gradient(group_) + row * kRowBytes + lane % 2 * 8 + ((lane % 4 / 2) ^ (lane / 4)) * 16;
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n)
        ptx::StoreShared8((line ^ (n % 4 * 32)) + n / 4 * kBiasBoxBytes, sum[n * 4 + half * 2],
                          sum[n * 4 + half * 2 + 1]);
    }
    ptx::FenceShared();
    ptx::SyncNamed(kGroupBarrier + group_, kWarpgroup);
    if (!leader) return;
#pragma unroll
    for (int part = 0; part < 2; ++part)
      ptx::AddBiasBox(&p_.gradient,
                      {block.position + part * 32, tile.position + group_ * 64, tile.head * p_.head_factor,
                       shared_.control->sequence * p_.sequence_factor},
                      shared_.Gradient(group_) + part * kBiasBoxBytes);
  }

  const BiasGradientParameters& p_;
  const BiasGradientShared<Config>& shared_;
  const int group_;
  const int warp_row_;  // the warp's first row of the warpgroup's 64
  Ring<Config::kQueryStages> q_;
  Ring<Config::kStages> k_;
  Ring<Config::kBiasStages> bias_;
};

template <typename T, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    BiasGradientKernel(const __grid_constant__ BiasGradientParameters p) {
  extern __shared__ unsigned char bytes[];
  const BiasGradientShared<Config> shared(bytes);
  if (threadIdx.x == 0) {
    shared.InitBarriers();
    FindWork(p, shared);
  }
  __syncthreads();
  if (threadIdx.x >= kWarpgroup) {
    BiasGradientConsumer<T, Config>(p, shared).Run();
  } else if (threadIdx.x == 0) {
    ProduceForBiasGradient(p, shared);
  }
}

}  // namespace cppool::kernels::cuda::sm90
