// What all kinds of consumer warpgroups of the backward kernel do with a step's logits and their gradients: a
// warpgroup has kColumns queries of a block, from FirstQuery() on, and 64 keys of a tile, from FirstKey() on.
// Accumulators are keys by queries.
#pragma once

#include "kernels/attention/families/sm90/backward_shared.cuh"
#include "kernels/attention/families/sm90/bias.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"
#include "kernels/attention/families/sm90/dq.cuh"
#include "kernels/attention/families/sm90/mask.cuh"
#include "kernels/attention/families/sm90/softmax.cuh"
#include "kernels/attention/families/sm90/wgmma.cuh"

namespace cppool::kernels::cuda::sm90 {

// Named barriers: of both consumers, when ds is shared; one per consumer among its own warps; one per
// consumer for which the other's arrival says that its products have read what they share; of both, when p is
// shared.
inline constexpr int kDsBarrier = 1, kBackwardGroupBarrier = 2, kFreeBarrier = 4, kPBarrier = 6;

template <typename T, typename Config>
class BackwardStep {
 protected:
  static constexpr int kDimQk = Config::kDimQk, kDimV = Config::kDimV, kRows = Config::kRows;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kColumns = Config::kSplitsDims || Config::kTakesHalves ? kRows / 2 : kRows;
  // The dims of dk and dv that a warpgroup makes.
  static constexpr int kDkDims = Config::kSplitsDims ? DqParts<Config>::kDims : kDimQk;
  static constexpr int kDvDims = Config::kSplitsDims ? kDimV / 2 : kDimV;

  __device__ __forceinline__ BackwardStep(const BackwardParameters& p, const BackwardShared<Config>& shared)
      : p_(p),
        shared_(shared),
        group_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0)),
        warp_row_(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16) {}

  // A warp's keys of a tile.
  struct KeyRows {
    int token, member;
    int valid;  // of 16
    int kv_head;
  };

  __device__ __forceinline__ const KeyTileInfo& tile() const { return shared_.control->tiles[tiles_.stage]; }
  __device__ __forceinline__ const StepInfo& StepOf(const StepRingsOf<Config>& rings) const {
    return shared_.control->steps[rings.step()];
  }
  __device__ __forceinline__ int FirstKey() const { return Config::kSplitsDims ? 0 : group_ * 64; }
  // `half`: of the block, where a warpgroup takes one after the other.
  __device__ __forceinline__ int FirstQuery(int half = 0) const {
    return (Config::kSplitsDims ? group_ : half) * kColumns;
  }
  __device__ __forceinline__ KeyRows RowsOf(int token, int member, int length, int kv_head) const {
    // Opaque: not in a register all along.
    const int first = FirstKey() + ptx::Opaque(static_cast<int>(threadIdx.x)) % kWarpgroup / 32 * 16;
    return {token + first, member, min(max(length - first, 0), 16), kv_head};
  }
  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Rows from `rows` on of a tile [kDim / 64][kTileRows][64] become 0: they are not its own and may hold NaN,
  // which a weight of 0 does not hide.
  template <int kDim, int kTileRows>
  static __device__ __forceinline__ void ClearRows(std::uint32_t tile, int rows) {
    for (int i = threadIdx.x % kWarpgroup; i < (kTileRows - rows) * 8; i += kWarpgroup) {
#pragma unroll
      for (int d = 0; d < kDim / 64; ++d)
        ptx::StoreShared16(tile + (d * kTileRows + rows) * kRowBytes + i * 16, make_uint4(0, 0, 0, 0));
    }
  }
  // Each warpgroup does so for itself. With casts in blocks dq reads other keys, and what logits and dout v^T
  // have of rows that are no token's is hidden.
  __device__ __forceinline__ void ClearKeys(int rows) const {
    if constexpr (Config::kInBlocks) {
      ClearRows<kDimQk, kTileKeys>(shared_.OtherKeys(), rows);
    } else {
      ClearRows<kDimQk, kTileKeys>(shared_.Keys(tiles_.stage), rows);
      ClearRows<kDimV, kTileKeys>(shared_.Values(tiles_.stage), rows);
    }
    ptx::FenceShared();
    ptx::SyncNamed(kBackwardGroupBarrier + ptx::Opaque(group_), kWarpgroup);
  }
  __device__ __forceinline__ void ClearQueries(int rows) const {
    ClearQueries(rows, rings_.q().stage, rings_.dout().stage);
  }
  __device__ __forceinline__ void ClearQueries(int rows, int q_stage, int dout_stage) const {
    ClearRows<kDimQk, kRows>(shared_.Queries(q_stage), rows);
    ClearRows<kDimV, kRows>(shared_.Dout(dout_stage), rows);
    ptx::FenceShared();
    ptx::SyncNamed(kBackwardGroupBarrier + ptx::Opaque(group_), kWarpgroup);
  }

  // Whether no pair of the block and this warpgroup's keys is hidden.
  __device__ __forceinline__ bool AllSeen(const StepInfo& block) const {
    const KeyTileInfo& now = tile();
    const int key = now.position + FirstKey();
    return block.length == kRows && now.length == kTileKeys && key + 63 - block.position <= now.high &&
           key - (block.position + kRows - 1) >= now.low;
  }

  // What a bias is multiplied with.
  __device__ __forceinline__ float InverseScale() const {
    if constexpr (Config::kFp8) return shared_.control->units.inverse_scale;
    return p_.bias.inverse_scale;
  }

  // Adds the bias of the step's block to the logits of this warpgroup's pairs.
  __device__ __forceinline__ void AddBias(float (&logits)[kColumns / 2], const StepInfo& block) const {
    const BiasParameters& bias = p_.bias;
    if (bias.rows > 0) {
      const auto ring = rings_.template Beside<Config::kBiasStages>();
      ptx::Wait(shared_.FullBias(ring.stage), ring.parity);
      AddBiasTileTransposed<T, kColumns>(logits,
                                         shared_.Bias(ring.stage) + FirstKey() / 64 * (kRows * kRowBytes),
                                         bias.rows > 1, FirstQuery(), InverseScale());
      ptx::ReleaseToCopies(shared_.EmptyBias(ring.stage));
    }
    if (bias.alibi_slopes) {
      const int thread =
          ptx::Opaque(static_cast<int>(threadIdx.x)) % kWarpgroup;  // not in a register all along
      const int key = tile().position + FirstKey() + thread / 32 * 16 + thread % 32 / 4;
      AddAlibi<kColumns, true>(
          logits, shared_.control->slopes[rings_.q().stage],
          block.position + FirstQuery() + shared_.control->tile_biases[tiles_.stage].diagonal - key);
    }
  }

  // Sets hidden logits to -inf.
  __device__ __forceinline__ void MaskTransposed(float (&logits)[kColumns / 2], const StepInfo& block,
                                                 int half_block = 0) const {
    const KeyTileInfo& now = tile();
    const int column = Lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = FirstKey() + warp_row_ + Lane() / 4 + half * 8;
      // Queries that see this key, less this thread's first one.
      const int shift = now.position + row - (block.position + FirstQuery(half_block));
      const int low = max(shift - now.high, 0) - column;
      const int high =
          row < now.length ? min(shift - now.low, block.length - FirstQuery(half_block) - 1) - column : -1;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = n * 8 + i;
          if (at < low || at > high) logits[n * 4 + half * 2 + i] = -INFINITY;
        }
    }
  }

  // Rows of no token may hold NaN, which a probability of 0 does not hide. The first kMade * 8 queries have
  // probabilities, the others exponents.
  template <int kMade = kColumns / 8>
  static __device__ __forceinline__ void HideDp(const float (&p)[kColumns / 2], float (&dp)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      if (p[i] == (i < kMade * 4 ? 0 : -INFINITY)) dp[i] = 0;
  }

  __device__ __forceinline__ float ScaleLog2() const {
    if constexpr (Config::kFp8) return shared_.control->units.scale_log2;
    return p_.scale_log2;
  }
  // What dq, dk and dv are multiplied with.
  __device__ __forceinline__ float DqScale() const {
    if constexpr (Config::kFp8) return shared_.control->units.dq;
    return p_.scale;
  }
  __device__ __forceinline__ float DkScale() const {
    if constexpr (Config::kFp8) return shared_.control->units.dk;
    return p_.scale;
  }
  __device__ __forceinline__ float DvScale() const {
    if constexpr (Config::kFp8) return shared_.control->units.dv;
    return 1;
  }

  // lse or delta of this thread's columns of the queries: of kCount * 8 from the kFrom * 8th on.
  using OfColumns = float2[kColumns / 8];
  template <int kFrom = 0, int kCount = kColumns / 8>
  __device__ __forceinline__ void LoadColumns(const float* row, OfColumns& columns) const {
#pragma unroll
    for (int n = kFrom; n < kFrom + kCount; ++n)
      columns[n] = *reinterpret_cast<const float2*>(row + Lane() % 4 * 2 + n * 8);
  }
  __device__ __forceinline__ const float* Lse(int half_block = 0) const {
    return shared_.control->lse[rings_.dout().stage] + FirstQuery(half_block);
  }
  __device__ __forceinline__ const float* Delta(int half_block = 0) const {
    return shared_.control->delta[rings_.dout().stage] + FirstQuery(half_block);
  }

  // p = exp(scale logits - lse), in fp8 p_scale times as large, of kMade * 8 queries; of the others the
  // exponent of 2.
  template <int kMade = kColumns / 8>
  __device__ __forceinline__ void Probabilities(float (&logits)[kColumns / 2], const OfColumns& lse) const {
    const float scale_log2 = ScaleLog2();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const at = &logits[n * 4 + half * 2];
        at[0] = fmaf(at[0], scale_log2, -lse[n].x);
        if (n < kMade) at[0] = ptx::Exp2(at[0]);
        at[1] = fmaf(at[1], scale_log2, -lse[n].y);
        if (n < kMade) at[1] = ptx::Exp2(at[1]);
      }
    }
  }
  // p of the other queries.
  template <int kMade>
  static __device__ __forceinline__ void OtherProbabilities(float (&exponents)[kColumns / 2]) {
#pragma unroll
    for (int i = kMade * 4; i < kColumns / 2; ++i) exponents[i] = ptx::Exp2(exponents[i]);
  }
  __device__ __forceinline__ void Probabilities(float (&logits)[kColumns / 2], int half_block = 0) const {
    OfColumns lse;
    LoadColumns(Lse(half_block), lse);
    Probabilities(logits, lse);
  }

  // ds = p (dp - delta), as an operand, of kCount * 8 queries from the kFrom * 8th on.
  template <int kFrom = 0, int kCount = kColumns / 8>
  __device__ __forceinline__ void MakeDs(const float (&p)[kColumns / 2], const float (&dp)[kColumns / 2],
                                         const OfColumns& delta, std::uint32_t (&ds)[kColumns / 4]) const {
    [[maybe_unused]] float most = 0;
#pragma unroll
    for (int n = kFrom; n < kFrom + kCount; ++n) {
      const float2 less = delta[n];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = n * 4 + half * 2;
        if constexpr (Config::kFp8) {
          const float unit = shared_.control->units.dp;
          const float low = p[at] * fmaf(dp[at], unit, -less.x),
                      high = p[at + 1] * fmaf(dp[at + 1], unit, -less.y);
          ds[n * 2 + half] = ptx::Pack<DsOf<T, Config>>(low, high);
          if constexpr (Config::kFindsDs) {
            ptx::RaiseToMagnitude(most, low);
            ptx::RaiseToMagnitude(most, high);
          }
        } else {
          ds[n * 2 + half] = ptx::Pack<T>(p[at] * (dp[at] - less.x), p[at + 1] * (dp[at + 1] - less.y));
        }
      }
    }
    // To shared memory at once: from step to step there is no register for it.
    if constexpr (Config::kFindsDs) ptx::RaiseShared(ptx::SharedAddress(&shared_.control->amax_ds), most);
  }

  __device__ __forceinline__ void MakeDs(const float (&p)[kColumns / 2], const float (&dp)[kColumns / 2],
                                         std::uint32_t (&ds)[kColumns / 4], int half_block = 0) const {
    OfColumns delta;
    LoadColumns(Delta(half_block), delta);
    MakeDs<>(p, dp, delta, ds);
  }

  // ds of this warpgroup's keys, where both have 64.
  __device__ __forceinline__ std::uint32_t OwnDs(int buffer) const {
    return shared_.Ds(buffer) + group_ * (kRows * kRowBytes);
  }
  // Packed ds of queries from `first` on to shared memory, an operand [kRows][64] of queries by keys,
  // swizzled. This warp: 16 keys.
  template <int kCount>
  __device__ __forceinline__ void StoreDs(const std::uint32_t (&ds)[kCount], std::uint32_t tile,
                                          int first) const {
    const int lane = Lane();
    const int chunk = (warp_row_ / 8 + lane / 8 % 2) ^ (lane % 8);
    const std::uint32_t to = ptx::Opaque(tile + (first + lane / 16 * 8 + lane % 8) * kRowBytes + chunk * 16);
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n)
      ptx::StoreMatrixTransposed(to + n * 16 * kRowBytes, ds[n * 4], ds[n * 4 + 1], ds[n * 4 + 2],
                                 ds[n * 4 + 3]);
  }

  // A tile's first logits, and dp, which is under way when it returns. Whether all pairs of the step are
  // visible.
  template <typename StartLogits, typename StartDp>
  __device__ __forceinline__ bool BeginSteps(float (&logits)[kColumns / 2], const StartLogits& start_logits,
                                             const StartDp& start_dp) const {
    ptx::Wait(shared_.FullQ(rings_.q().stage), rings_.q().parity);
    BeginProducts();
    start_logits(rings_.q().stage);
    ptx::Wait(shared_.FullDout(rings_.dout().stage), rings_.dout().parity);
    BeginProducts();
    start_dp(rings_.dout().stage);
    const bool visible = AllSeen(StepOf(rings_));  // what it reads comes under the products
    WaitForProducts<1>();
    Settle(logits);
    return visible;
  }

  // Takes tile after tile, writes dk and dv, to which run_steps(steps, dk, dv) adds, and ends dq.
  template <typename RunSteps>
  __device__ __forceinline__ void RunTiles(const RunSteps& run_steps) {
    while (true) {
      ptx::Wait(shared_.FullTile(tiles_.stage), tiles_.parity);
      if (tile().kv_head < 0) break;
      if (tile().length < kTileKeys) ClearKeys(tile().length);
      float dk[kDkDims / 2], dv[kDvDims / 2];
      Clear(dk);
      Clear(dv);
      run_steps(tile().steps, dk, dv);
      const KeyTileInfo info = tile();
      ptx::Arrive(shared_.EmptyTile(tiles_.stage));
      tiles_.Advance();
      WriteTile<true>(RowsOf(info.token, info.member, info.length, info.kv_head), dk, dv);
    }
    EndDq();
  }

  // Zeros for tiles that nobody sees.
  __device__ __forceinline__ void RunEmptyTiles() const {
    if (!p_.first && !p_.last) return;
    constexpr int kBlocks = Config::kPairs ? 2 : 1;  // that share an item
    const int from = Config::kPairs ? ptx::ClusterRank() * kTileKeys : 0;
    const int end = p_.work.tiles_count * p_.map.kv_heads;
    for (int item = p_.work.busy_tiles * p_.map.kv_heads + blockIdx.x / kBlocks; item < end;
         item += gridDim.x / kBlocks) {
      const KeyTile& tile = p_.work.tiles[item / p_.map.kv_heads];
      float dk[kDkDims / 2], dv[kDvDims / 2];
      Clear(dk);
      Clear(dv);
      WriteTile<false>(RowsOf(tile.token + from, tile.member, tile.length - from, item % p_.map.kv_heads), dk,
                       dv);
    }
  }

  // Hands dq to the thread that adds it to memory: as [., 32][kDqRows][32], a row's 16-byte chunk c at c ^
  // (row % 8). With kDqAsMade a row's order is that of dq.cuh.
  __device__ __forceinline__ void HandOverDq(const float (&dq)[Config::kDqDims / 2]) {
    TakeDq();
    StoreDq(dq, 0);
    AnnounceDq();
  }
  // The same in parts: the kCount * 2 dims that are at dq[kAt] on to the `box`th 32 on.
  __device__ __forceinline__ void TakeDq() {
    ptx::Wait(shared_.EmptyDq(group_), dq_parity_ ^ 1);
    dq_parity_ ^= 1;
  }
  template <int kAt = 0, int kAll = 0, int kCount = kAll>
  __device__ __forceinline__ void StoreDq(const float (&dq)[kAll], int box) const {
    const int lane = Lane();
    const float scale = DqScale();
    static_assert(kCount % 16 == 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_ + lane / 4 + half * 8;
      const std::uint32_t line = shared_.Dq(group_) + box * (Config::kDqRows * kRowBytes) + row * kRowBytes;
      if constexpr (Config::kDqAsMade) {
        const std::uint32_t first = ptx::Opaque(line + (DqChunk(row, 0, lane % 4) ^ (row % 8)) * 16);
#pragma unroll
        for (int n = 0; n < kCount / 8; ++n) {
          const int at = kAt + n * 8 + half * 2;
          ptx::StoreShared16((first ^ (n % 2 * 64)) + n / 2 * (Config::kDqRows * kRowBytes), dq[at] * scale,
                             dq[at + 1] * scale, dq[at + 4] * scale, dq[at + 5] * scale);
        }
      } else {
        // Rows 2 i and 2 i + 1 would store to the same banks: odd rows store the columns 16 further on, or
        // back. Chunk 0 of an even row, 4 of an odd one; chunk n * 2 on is at ^ (n * 32).
        const bool odd = lane / 4 % 2 == 1;
        const std::uint32_t first =
            ptx::Opaque(line + lane % 2 * 8 + ((lane % 4 / 2) ^ (lane / 4) ^ (odd ? 4 : 0)) * 16);
#pragma unroll
        for (int n = 0; n < kCount / 4; ++n) {
          const int even_at = kAt + n * 4 + half * 2, odd_at = kAt + (n ^ 2) * 4 + half * 2;
          ptx::StoreShared8((first ^ (n % 4 * 32)) + n / 4 * (Config::kDqRows * kRowBytes),
                            (odd ? dq[odd_at] : dq[even_at]) * scale,
                            (odd ? dq[odd_at + 1] : dq[even_at + 1]) * scale);
        }
      }
    }
  }
  __device__ __forceinline__ void AnnounceDq() const {
    ptx::FenceShared();
    ptx::Arrive(shared_.FullDq(group_));
  }

  // Raises the largest |dS| to that of this thread block so far, with that of this warp.
  __device__ __forceinline__ void RaiseAmax() const {
    __syncwarp();
    // The order of floats from 0 on is that of integers.
    if (Lane() == 0 && p_.fp8.amax_ds)
      atomicMax(reinterpret_cast<unsigned*>(p_.fp8.amax_ds),
                *const_cast<const volatile unsigned*>(&shared_.control->amax_ds));
  }

  // Says that no more of dq comes.
  __device__ __forceinline__ void EndDq() const {
    if constexpr (Config::kFindsDs) RaiseAmax();
    ptx::Wait(shared_.EmptyDq(group_), dq_parity_ ^ 1);
    if (threadIdx.x % kWarpgroup == 0) shared_.control->dq_ends[group_] = 1;
    ptx::Arrive(shared_.FullDq(group_));
  }

  template <int kCount>
  static __device__ __forceinline__ void Clear(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) registers[i] = 0;
  }

  // Writes this warpgroup's dk and dv of a tile, which are as the products are, or 0.
  template <bool kScaled>
  __device__ __forceinline__ void WriteTile(const KeyRows& rows, const float (&dk)[kDkDims / 2],
                                            const float (&dv)[kDvDims / 2]) const {
    T* const to_dk = static_cast<T*>(p_.dk);
    T* const to_dv = static_cast<T*>(p_.dv);
    const auto dk_scale = [this] { return kScaled ? DkScale() : 1; };
    const auto dv_scale = [this] { return kScaled ? DvScale() : 1; };
    if constexpr (Config::kSplitsDims) {
      const int group = ptx::Opaque(group_);  // so that nothing made of it stays in registers all along
      constexpr int kPart = kDkDims > 64 ? 64 : kDkDims;
      const int dim = group * DqParts<Config>::kApartDims;
      if (DqParts<Config>::Owns(group, 0))
        Write<kDimQk, kPart, 0>(rows, dk, dim, dk_scale(), p_.dk_sum, to_dk);
      if constexpr (kDkDims > kPart)
        Write<kDimQk, kDkDims - kPart, kPart / 2>(rows, dk, dim + kPart, dk_scale(), p_.dk_sum, to_dk);
      Write<kDimV, kDvDims, 0>(rows, dv, group * kDvDims, dv_scale(), p_.dv_sum, to_dv);
    } else {
      Write<kDimQk, kDimQk, 0>(rows, dk, 0, dk_scale(), p_.dk_sum, to_dk);
      Write<kDimV, kDimV, 0>(rows, dv, 0, dv_scale(), p_.dv_sum, to_dv);
    }
  }

  // Writes dims from `dim` on of the [., kDim] of a gradient: the kDims of them that are at gradient[kAt] on.
  template <int kDim, int kDims, int kAt, int kCount>
  __device__ __forceinline__ void Write(const KeyRows& rows, const float (&gradient)[kCount], int dim,
                                        float scale, float* sum, T* result) const {
    const int lane = ptx::Opaque(static_cast<int>(threadIdx.x)) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      if (row >= rows.valid) continue;
      const std::int64_t at =
          ((static_cast<std::int64_t>(rows.token + row) * p_.work.key_step + rows.member) * p_.map.kv_heads +
           rows.kv_head) *
              kDim +
          dim + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
        float2 two = make_float2(gradient[kAt + n * 4 + half * 2] * scale,
                                 gradient[kAt + n * 4 + half * 2 + 1] * scale);
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
  std::uint32_t dq_parity_ = 0;
  Ring<Config::kTileStages> tiles_;
  StepRingsOf<Config> rings_;  // of the step under way
};

}  // namespace cppool::kernels::cuda::sm90
