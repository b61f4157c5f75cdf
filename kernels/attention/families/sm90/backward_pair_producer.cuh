// What the producer of the backward kernel does in a cluster of two thread blocks: one takes items for both;
// each brings its own keys and values of a tile.
#pragma once

#include "kernels/attention/families/sm90/backward_shared.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"

namespace cppool::kernels::cuda::sm90 {

// Returns the next item of a cluster, whose first thread block takes it. Returns when the tile's buffers are
// empty.
template <typename Config>
__device__ __forceinline__ int TakePairItem(const BackwardParameters& p, const BackwardShared<Config>& shared,
                                            const Ring<Config::kTileStages>& tiles) {
  static_assert(Config::kTileStages == 1);
  const bool first_lane = threadIdx.x % 32 == 0;
  int item = 0;
  if (ptx::ClusterRank() == 0) {
    if (first_lane) item = atomicAdd(p.schedule, 1);
    item = __shfl_sync(~0u, item, 0);
    ptx::Wait(shared.EmptyItem(), tiles.parity ^ 1);
    if (first_lane)
      ptx::StoreIn(ptx::In(ptx::SharedAddress(&shared.control->item), 1), item,
                   ptx::In(shared.FullItem(), 1));
    __syncwarp();
    ptx::Wait(shared.EmptyTile(0), tiles.parity ^ 1);
  } else {
    if (first_lane) ptx::ArriveExpecting(shared.FullItem(), 4);
    __syncwarp();
    ptx::Wait(shared.FullItem(), tiles.parity);
    item = *const_cast<const volatile int*>(&shared.control->item);
    __syncwarp();
    if (first_lane) ptx::ArriveIn(ptx::In(shared.EmptyItem(), 0));
    ptx::Wait(shared.EmptyTile(0), tiles.parity ^ 1);
  }
  return item;
}

// One thread copies this block's half of the cluster's tile, which is described as a whole: 64 keys, and one
// half of the dims of the other block's keys.
template <typename Config>
__device__ __forceinline__ void ProducePairKeys(const BackwardParameters& p,
                                                const BackwardShared<Config>& shared, int stage) {
  constexpr int kKeys = Config::kTileKeys, kHalfBoxes = Config::kDimQk / 128;
  const int rank = ptx::ClusterRank();
  KeyTileInfo& info = shared.control->tiles[stage];
  const ptx::RowCoordinates own{info.token + rank * kKeys, info.member, info.kv_head};
  const ptx::RowCoordinates other{info.token + (rank ^ 1) * kKeys, info.member, info.kv_head};
  const int length = info.length;
  info.token = own.token;
  info.position += rank * kKeys;
  info.length = min(max(length - rank * kKeys, 0), kKeys);
  info.other_length = min(max(length - (rank ^ 1) * kKeys, 0), kKeys);
  const std::uint32_t full = shared.FullTile(stage);
  ptx::ArriveExpecting(full, Config::kKeyBytes + Config::kValueBytes + Config::kOtherKeyBytes);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    ptx::LoadBoxPart(shared.Keys(stage) + half * (Config::kKeyBytes / 2), &p.k, own, half * kHalfBoxes, full);
  ptx::LoadBoxPart(shared.OtherKeys(), &p.k, other, rank * kHalfBoxes, full);
  ptx::LoadBox(shared.Values(stage), &p.v, own, full);
}

}  // namespace cppool::kernels::cuda::sm90
