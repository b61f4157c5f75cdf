// A consumer warpgroup of the backward kernel: 64 keys of each tile.
//
// With p = exp(scale q k^T - lse): dv = p^T dout, ds = p (dout v^T - delta), dq = scale ds k, dk = scale ds^T q
// (FlashAttention-2, Dao 2023). Logits and dout v^T are made transposed, keys by queries, so that p^T and ds^T are left
// operands in registers for dv and dk (as in FlashAttention-3, Shah et al. 2024); ds goes through shared memory to both
// warpgroups for dq, of which each makes one half of the dims, for a thread of its own (backward_dq.cuh) to add to memory.
//
// The products of a step run under the arithmetic of its neighbours: while dq is handed over, dk and the next step's
// logits are under way, and the next step's exponentials fall under its dout v^T.
#pragma once

#include "kernels/attention/families/sm90/backward_shared.cuh"
#include "kernels/attention/families/sm90/mask.cuh"
#include "kernels/attention/families/sm90/softmax.cuh"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

// Named barriers: of both consumers, then one per consumer among its own warps.
inline constexpr int kDsBarrier = 1, kBackwardGroupBarrier = 2;

template <typename T, typename Config>
class BackwardConsumer {
 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParameters& p,
                                              const BackwardShared<Config>& shared)
      : p_(p),
        shared_(shared),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)),
        warp_row_(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {}

  __device__ __forceinline__ void Run() {
    while (true) {
      ptx::Wait(shared_.FullTile(tiles_.stage), tiles_.parity);
      if (tile().kv_head < 0) break;
      const int steps = tile().steps;
      if (tile().length < Config::kTileKeys) ClearKeys(tile().length);
      float dk[kDimQk / 2], dv[kDimV / 2];
#pragma unroll
      for (int i = 0; i < kDimQk / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) dv[i] = 0;
      float logits[kRows / 2], dp[kRows / 2];
      std::uint32_t operand[kRows / 4];

      ptx::Wait(shared_.FullQ(ring_.stage), ring_.parity);
      BeginProducts();
      StartLogits(logits, ring_.stage);
      ptx::Wait(shared_.FullDout(ring_.stage), ring_.parity);
      BeginProducts();
      StartDp(dp, ring_.stage);
      WaitForProducts<1>();
      Settle(logits);
      for (int step = 0; step < steps; ++step) {
        const StepInfo& now = shared_.control->steps[ring_.stage];
        if (now.length < kRows) ClearQueries(now.length);
        const bool visible = AllSeen(now);
        if (!visible) MaskTransposed(logits, now);
        Probabilities(logits);
        PackOperand<T>(logits, operand);
        Settle(operand);  // before the wait: under the product
        WaitForProducts<0>();
        Settle(dp);
        if (!visible) HideDp(logits, dp);
        BeginProducts();
        StartProduct<T, kRows, kDimV>(dv, operand, Operand::OverRows(shared_.Dout(ring_.stage), kRows));
        CommitProducts();
        std::uint32_t ds[kRows / 4];
        MakeDs(logits, dp, ds);
        StoreDs(ds);
        ptx::FenceShared();
        ptx::SyncNamed(kDsBarrier, 2 * kWarpgroup);
        WaitForProducts<0>();  // dv
        Settle(dv);
        Settle(operand);

        Ring<kStages> next = ring_;
        next.Advance();
        const bool more = step + 1 < steps;
        float dq[kDqDims / 2];
        BeginProducts();
        StartDq(dq);
        StartProduct<T, kRows, kDimQk>(dk, ds, Operand::OverRows(shared_.Queries(ring_.stage), kRows));
        CommitProducts();
        if (more) ptx::Wait(shared_.FullQ(next.stage), next.parity);
        // After a tile's last step these are for nothing: a branch would serialise the products.
        BeginProducts();
        StartLogits(logits, next.stage);
        WaitForProducts<2>();
        Settle(dq);
        HandOverDq(dq, now);
        ptx::Arrive(shared_.EmptyDout(ring_.stage));
        if (more) ptx::Wait(shared_.FullDout(next.stage), next.parity);
        BeginProducts();
        StartDp(dp, next.stage);
        WaitForProducts<1>();
        Settle(logits);
        Settle(dk);
        Settle(ds);
        if (threadIdx.x % 32 == 0) ptx::Arrive(shared_.EmptyQ(ring_.stage));
        ring_ = next;
        ds_buffer_ ^= 1;
      }
      WaitForProducts<0>();
      Settle(logits);
      Settle(dp);
      const KeyTileInfo info = tile();
      ptx::Arrive(shared_.EmptyTile(tiles_.stage));
      tiles_.Advance();
      const KeyRows rows = RowsOf(info.token, info.member, info.length, info.kv_head);
      Write<kDimQk>(rows, dk, p_.scale, p_.dk_sum, static_cast<T*>(p_.dk));
      Write<kDimV>(rows, dv, 1, p_.dv_sum, static_cast<T*>(p_.dv));
    }
    ptx::Wait(shared_.EmptyDq(group_), dq_parity_ ^ 1);
    if (threadIdx.x % kWarpgroup == 0) shared_.control->dq[group_].head = -1;
    ptx::Arrive(shared_.FullDq(group_));
  }

  // Tiles that nobody sees.
  __device__ __forceinline__ void RunEmptyTiles() {
    if (!p_.first && !p_.last) return;
    const int end = p_.work.tiles_count * p_.map.kv_heads;
    for (int item = p_.work.busy_tiles * p_.map.kv_heads + blockIdx.x; item < end; item += gridDim.x) {
      const KeyTile& tile = p_.work.tiles[item / p_.map.kv_heads];
      const KeyRows rows = RowsOf(tile.token, tile.member, tile.length, item % p_.map.kv_heads);
      float zeros[kDimQk / 2];
#pragma unroll
      for (int i = 0; i < kDimQk / 2; ++i) zeros[i] = 0;
      Write<kDimQk>(rows, zeros, 1, p_.dk_sum, static_cast<T*>(p_.dk));
      float values[kDimV / 2];
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) values[i] = 0;
      Write<kDimV>(rows, values, 1, p_.dv_sum, static_cast<T*>(p_.dv));
    }
  }

 private:
  static constexpr int kDimQk = Config::kDimQk, kDimV = Config::kDimV, kRows = Config::kRows;
  static constexpr int kStages = Config::kStages, kTileKeys = Config::kTileKeys;
  static constexpr int kDqDims = kDimQk / 2;  // of this warpgroup

  // A warp's keys of a tile.
  struct KeyRows {
    int token, member;
    int valid;  // of 16
    int kv_head;
  };

  __device__ __forceinline__ const KeyTileInfo& tile() const { return shared_.control->tiles[tiles_.stage]; }
  __device__ __forceinline__ KeyRows RowsOf(int token, int member, int length, int kv_head) const {
    const int first = group_ * 64 + warp_row_;
    return {token + first, member, min(max(length - first, 0), 16), kv_head};
  }
  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }

  // logits = k q^T, of this warpgroup's keys.
  __device__ __forceinline__ void StartLogits(float (&logits)[kRows / 2], int stage) const {
    StartTransposed<T, kDimQk, kRows, kTileKeys>(
        logits, Operand::OverDim(shared_.Keys(tiles_.stage) + group_ * (64 * kRowBytes)),
        Operand::OverDim(shared_.Queries(stage)));
    CommitProducts();
  }
  // dp = v dout^T
  __device__ __forceinline__ void StartDp(float (&dp)[kRows / 2], int stage) const {
    StartTransposed<T, kDimV, kRows, kTileKeys>(
        dp, Operand::OverDim(shared_.Values(tiles_.stage) + group_ * (64 * kRowBytes)),
        Operand::OverDim(shared_.Dout(stage)));
    CommitProducts();
  }
  // dq = ds k, of this warpgroup's dims.
  __device__ __forceinline__ void StartDq(float (&dq)[kDqDims / 2]) const {
    StartProductOverRows<T, kTileKeys, kDqDims>(
        dq, Operand::OverDim(shared_.Ds(ds_buffer_)),
        Operand::OverRows(shared_.Keys(tiles_.stage) + group_ * (kDqDims / 64 * kTileKeys * kRowBytes),
                          kTileKeys));
    CommitProducts();
  }

  // Rows from `rows` on of a tile [kDim / 64][kTileRows][64] become 0: they are not its own and may hold NaN, which a
  // weight of 0 does not hide.
  template <int kDim, int kTileRows>
  static __device__ __forceinline__ void ClearRows(std::uint32_t tile, int rows) {
    for (int i = threadIdx.x % kWarpgroup; i < (kTileRows - rows) * 8; i += kWarpgroup) {
#pragma unroll
      for (int d = 0; d < kDim / 64; ++d)
        ptx::StoreShared16(tile + (d * kTileRows + rows) * kRowBytes + i * 16, make_uint4(0, 0, 0, 0));
    }
  }
  // Each warpgroup does so for itself.
  __device__ __forceinline__ void ClearKeys(int rows) const {
    ClearRows<kDimQk, kTileKeys>(shared_.Keys(tiles_.stage), rows);
    ClearRows<kDimV, kTileKeys>(shared_.Values(tiles_.stage), rows);
    ptx::FenceShared();
    ptx::SyncNamed(kBackwardGroupBarrier + group_, kWarpgroup);
  }
  __device__ __forceinline__ void ClearQueries(int rows) const {
    ClearRows<kDimQk, kRows>(shared_.Queries(ring_.stage), rows);
    ClearRows<kDimV, kRows>(shared_.Dout(ring_.stage), rows);
    ptx::FenceShared();
    ptx::SyncNamed(kBackwardGroupBarrier + group_, kWarpgroup);
  }

  // Whether no pair of the block and this warpgroup's keys is hidden.
  __device__ __forceinline__ bool AllSeen(const StepInfo& block) const {
    const KeyTileInfo& now = tile();
    const int key = now.position + group_ * 64;
    return block.length == kRows && now.length == kTileKeys && key + 63 - block.position <= now.high &&
           key - (block.position + kRows - 1) >= now.low;
  }

  // Sets hidden logits to -inf.
  __device__ __forceinline__ void MaskTransposed(float (&logits)[kRows / 2], const StepInfo& block) const {
    const KeyTileInfo& now = tile();
    const int column = Lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group_ * 64 + warp_row_ + Lane() / 4 + half * 8;
      // Queries that see this key, less this thread's first one.
      const int shift = now.position + row - block.position;
      const int low = max(shift - now.high, 0) - column;
      const int high = row < now.length ? min(shift - now.low, block.length - 1) - column : -1;
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = n * 8 + i;
          if (at < low || at > high) logits[n * 4 + half * 2 + i] = -INFINITY;
        }
    }
  }

  // Rows of no token may hold NaN, which a probability of 0 does not hide.
  static __device__ __forceinline__ void HideDp(const float (&p)[kRows / 2], float (&dp)[kRows / 2]) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
      if (p[i] == 0) dp[i] = 0;
  }

  // p = exp(scale logits - lse)
  __device__ __forceinline__ void Probabilities(float (&logits)[kRows / 2]) const {
    const float* const lse = shared_.control->lse[ring_.stage] + Lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 offset = *reinterpret_cast<const float2*>(lse + n * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const at = &logits[n * 4 + half * 2];
        at[0] = ptx::Exp2(fmaf(at[0], p_.scale_log2, -offset.x));
        at[1] = ptx::Exp2(fmaf(at[1], p_.scale_log2, -offset.y));
      }
    }
  }

  // ds = p (dp - delta), as an operand.
  __device__ __forceinline__ void MakeDs(const float (&p)[kRows / 2], const float (&dp)[kRows / 2],
                                         std::uint32_t (&ds)[kRows / 4]) const {
    const float* const delta = shared_.control->delta[ring_.stage] + Lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 less = *reinterpret_cast<const float2*>(delta + n * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = n * 4 + half * 2;
        ds[n * 2 + half] = ptx::Pack<T>(p[at] * (dp[at] - less.x), p[at + 1] * (dp[at + 1] - less.y));
      }
    }
  }

  // To shared memory as queries by keys: [128 / 64][kRows][64], swizzled. This warp: 16 keys.
  __device__ __forceinline__ void StoreDs(const std::uint32_t (&ds)[kRows / 4]) const {
    const int lane = Lane();
    const int chunk = (warp_row_ / 8 + lane / 8 % 2) ^ (lane % 8);
    const std::uint32_t to = shared_.Ds(ds_buffer_) + group_ * (kRows * kRowBytes) +
                             (lane / 16 * 8 + lane % 8) * kRowBytes + chunk * 16;
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n)
      ptx::StoreMatrixTransposed(to + n * 16 * kRowBytes, ds[n * 4], ds[n * 4 + 1], ds[n * 4 + 2],
                                 ds[n * 4 + 3]);
  }

  // Hands dq to the thread that adds it to memory: as [., 32][kRows][32], a row's 16-byte chunk c at c ^ (row % 8).
  __device__ __forceinline__ void HandOverDq(const float (&dq)[kDqDims / 2], const StepInfo& block) {
    ptx::Wait(shared_.EmptyDq(group_), dq_parity_ ^ 1);
    dq_parity_ ^= 1;
    const int lane = Lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_ + lane / 4 + half * 8;
      const std::uint32_t line = shared_.Dq(group_) + row * kRowBytes + lane % 2 * 8;
#pragma unroll
      for (int n = 0; n < kDqDims / 8; ++n) {
        const std::uint32_t chunk = static_cast<std::uint32_t>((n % 4 * 2 + lane % 4 / 2) ^ (lane / 4));
        ptx::StoreShared8(line + n / 4 * (kRows * kRowBytes) + chunk * 16, dq[n * 4 + half * 2] * p_.scale,
                          dq[n * 4 + half * 2 + 1] * p_.scale);
      }
    }
    if (threadIdx.x % kWarpgroup == 0)
      shared_.control->dq[group_] = {block.token, block.member, block.head, block.turn + group_, block.order};
    ptx::FenceShared();
    ptx::Arrive(shared_.FullDq(group_));
  }

  template <int kDim>
  __device__ __forceinline__ void Write(const KeyRows& rows, const float (&gradient)[kDim / 2], float scale,
                                        float* sum, T* result) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + Lane() / 4;
      if (row >= rows.valid) continue;
      const std::int64_t at =
          ((static_cast<std::int64_t>(rows.token + row) * p_.work.key_step + rows.member) * p_.map.kv_heads +
           rows.kv_head) *
              kDim +
          Lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        float2 two = make_float2(gradient[n * 4 + half * 2] * scale, gradient[n * 4 + half * 2 + 1] * scale);
        float2* const so_far = reinterpret_cast<float2*>(sum + at + n * 8);
        if (!p_.first) {
          const float2 before = *so_far;
          two.x += before.x, two.y += before.y;
        }
        if (p_.last) {
          *reinterpret_cast<std::uint32_t*>(result + at + n * 8) = ptx::Pack<T>(two.x, two.y);
        } else {
          *so_far = two;
        }
      }
    }
  }

  const BackwardParameters& p_;
  const BackwardShared<Config>& shared_;
  const int group_;
  const int warp_row_;  // the warp's first row of the warpgroup's 64
  int ds_buffer_ = 0;
  std::uint32_t dq_parity_ = 0;
  Ring<Config::kTileStages> tiles_;
  Ring<kStages> ring_;  // of the step under way
};

}  // namespace cppool::kernels::cuda::sm90
