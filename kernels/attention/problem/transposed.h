// Transposed payloads: [heads][dim][slots] in E4M3, for products that sum over tokens with 8-bit tensor
// cores, which read both operands along the sum.
//
// Each run of a layout's tokens has slots of its own, in order, from a multiple of kSlotTile on. Every 16 of
// them are permuted (TokenOfSlot), so that an accumulator's registers are the other operand without an
// exchange between threads. Slots of no token are 0, and after a run's tokens there are at least kSlotPadding
// - 16 of them: a block of 128 slots that begins with a token at a multiple of 16 holds nothing of another
// run.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/layout.h"
#include "kernels/attention/problem/row_tiles.h"
#include "kernels/host_device.h"

namespace cppool::kernels {

inline constexpr std::int32_t kSlotTile = kRowTile, kSlotPadding = 128;

// Returns which of 16 consecutive tokens is in which slot: 4t .. 4t+3 hold 2t, 2t+1, 8+2t, 8+2t+1.
CPPOOL_HOST_DEVICE constexpr int TokenOfSlot(int slot) { return slot % 4 / 2 * 8 + slot / 4 * 2 + slot % 2; }

// Returns the slots of a run of so many tokens.
constexpr std::int64_t SlotsOfRun(std::int64_t tokens) {
  return (tokens + kSlotPadding + kSlotTile - 1) / kSlotTile * kSlotTile;
}

// Returns all slots of a layout.
inline std::int64_t SlotsOf(const Layout& layout) {
  std::int64_t slots = 0;
  for (const Segment& run : Joined(layout)) slots += SlotsOfRun(run.length);
  return slots;
}

// Returns the rows of each kSlotTile slots, of which the first `length` hold tokens.
inline std::vector<RowTile> SlotTilesOf(const Layout& layout) {
  std::vector<RowTile> tiles;
  for (const Segment& run : Joined(layout)) {
    const std::int64_t slots = SlotsOfRun(run.length);
    for (std::int64_t at = 0; at < slots; at += kSlotTile) {
      const std::int64_t rest = run.length - at;
      tiles.push_back({run.row + at * layout.row_step, rest < 0           ? 0
                                                       : rest < kSlotTile ? rest
                                                                          : std::int64_t{kSlotTile}});
    }
  }
  return tiles;
}

}  // namespace cppool::kernels
