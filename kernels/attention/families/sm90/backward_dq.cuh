// Adds what the consumers of the backward kernel make of dq to fp32 in global memory: a thread for each
// consumer, so that waiting for memory, or for its turn, stops no product.
//
// Rows that are no tokens of a block are 0 in it, unless a key is not finite: adding them changes nothing,
// whoever they belong to. In turns, tiles add to a block in the order of their keys, so that sums have the
// same bits on every run. A turn is for all boxes of a consumer's step: the next tile's wait for memory and
// for this tile's thread once, not once per box.
#pragma once

#include "kernels/attention/families/sm90/backward_shared.cuh"
#include "kernels/attention/families/sm90/cluster.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename Config>
__device__ __forceinline__ void AddDq(const BackwardParameters& p, const BackwardShared<Config>& shared,
                                      int group) {
  // Which of those that add to a block's dq this is.
  const int adder = Config::kPairs ? ptx::ClusterRank() * 2 + group : group;
  // The consumer's first row in the block; how many boxes it hands over in a step; the first one's place
  // among dq's dims, in units of 32.
  constexpr bool kByRows = Config::kRows > Config::kDqRows;
  constexpr int kBox = Config::kDqDims / 32;
  const int row = kByRows ? group * Config::kDqRows : 0;
  const int parts = Config::kPairs ? 2 : Config::kSplitsDims ? DqParts<Config>::Count(group) : 1;
  const int first = Config::kPairs ? adder * 2 * kBox
                    : Config::kSplitsDims
                        ? (group * DqParts<Config>::kApart + DqParts<Config>::kMade - parts) * kBox
                    : kByRows ? 0
                              : group * kBox;
  StepRingsOf<Config> rings;
  for (std::uint32_t parity = 0;; parity ^= 1) {
    ptx::Wait(shared.FullDq(group), parity);
    if (shared.control->dq_ends[group] != 0) return;
    const StepInfo& step = shared.control->steps[rings.step()];
    int* const turn = p.turns + step.turn + adder;
    const int order = step.order;
    const int part = parts == 2 ? static_cast<int>(parity) : 0;
    if (p.turns && part == 0) {
      while (ptx::LoadAcquire(turn) != order) {
      }
    }
    ptx::AddBox(&p.dq, {step.token + row, step.member, step.head}, first + part * kBox, shared.Dq(group));
    ptx::WaitForStoresToRead();
    ptx::Arrive(shared.EmptyDq(group));
    if (part != parts - 1) continue;
    rings.Advance();
    if (p.turns) {
      ptx::WaitForStores();
      ptx::StoreRelease(turn, order + 1);
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90
