// Adds what the consumers of the backward kernel make of dq to fp32 in global memory: a thread for each consumer, so that
// waiting for memory, or for its turn, stops no product.
//
// Rows that are no tokens of a block are 0 in it, unless a key is not finite: adding them changes nothing, whoever they belong to. In turns, tiles
// add to a block in the order of their keys, so that sums have the same bits on every run. A turn is for all boxes of a
// consumer's step: the next tile's wait for memory and for this tile's thread once, not once per box.
#pragma once

#include "kernels/attention/families/sm90/backward_shared.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename Config>
__device__ __forceinline__ void AddDq(const BackwardParameters& p, const BackwardShared<Config>& shared,
                                      int group) {
  // The consumer's first row in the block; how many boxes it hands over in a step; the first one's place among dq's dims, in
  // units of 32.
  constexpr bool kByRows = Config::kRows > Config::kDqRows;
  constexpr int kBox = Config::kDqDims / 32;
  const int row = kByRows ? group * Config::kDqRows : 0;
  const int parts = Config::kPairs ? 2 : Config::kSplitsDims ? DqParts<Config>::Count(group) : 1;
  const int first = Config::kPairs        ? (ptx::ClusterRank() * 2 + group) * 2 * kBox
                    : Config::kSplitsDims ? (group * DqParts<Config>::kApart + 2 - parts) * kBox
                    : kByRows             ? 0
                                          : group * kBox;
  for (std::uint32_t parity = 0;; parity ^= 1) {
    ptx::Wait(shared.FullDq(group), parity);
    const DqInfo info = shared.control->dq[group];
    if (info.head < 0) return;
    int* const turn = p.turns + info.turn;
    const int part = parts == 2 ? static_cast<int>(parity) : 0;
    if (p.turns && part == 0) {
      while (ptx::LoadAcquire(turn) != info.order) {
      }
    }
    ptx::AddBox(&p.dq, {info.token + row, info.member, info.head}, first + part * kBox, shared.Dq(group));
    ptx::WaitForStoresToRead();
    ptx::Arrive(shared.EmptyDq(group));
    if (p.turns && part == parts - 1) {
      ptx::WaitForStores();
      ptx::StoreRelease(turn, info.order + 1);
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90
