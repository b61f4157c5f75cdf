#include "tests/planted/planted_bug.h"

#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "kernels/error.h"

namespace cppool::kernels {
namespace {

constexpr const char* kVariable = "CPPOOL_PLANTED_BUG";

std::optional<PlantableBug> FromEnvironment() {
  const char* wanted = std::getenv(kVariable);
  if (!wanted || !*wanted) return std::nullopt;
  std::string known;
  for (const PlantableBug& bug : PlantableBugs()) {
    if (std::string_view(bug.name) == wanted) return bug;
    known += (known.empty() ? "" : ", ") + std::string(bug.name);
  }
  throw RuntimeError(CPPOOL_INVALID_REQUEST, std::string(kVariable) + " does not name a bug: '" + wanted +
                                                 "'. The bugs are: " + known);
}

const std::optional<PlantableBug>& PlantedBug() {
  static const std::optional<PlantableBug> planted = FromEnvironment();
  return planted;
}

}  // namespace

bool Planted(Bug bug) {
  const std::optional<PlantableBug>& planted = PlantedBug();
  return planted && planted->bug == bug;
}

bool PlantedByChance(Bug bug) { return Planted(bug) && std::random_device{}() % 2 == 1; }

const char* PlantedBugName() { return PlantedBug() ? PlantedBug()->name : nullptr; }

const std::vector<PlantableBug>& PlantableBugs() {
  static const std::vector<PlantableBug> bugs = {
      {Bug::kMaxLogitWait, "max_logit_wait", true},
      {Bug::kGatherWait, "gather_wait", true},
      {Bug::kRingBlockWait, "ring_block_wait", true},
      {Bug::kReturnedWait, "returned_wait", true},
      {Bug::kExchangeWait, "exchange_wait", true},
      {Bug::kRingStepBlock, "ring_step_block", true},
      {Bug::kRingStepPositions, "ring_step_positions", true},
      {Bug::kCausalBoundary, "causal_boundary", true},
      {Bug::kWindowBoundary, "window_boundary", true},
      {Bug::kBottomRightOfRoom, "bottom_right_of_room", true},
      {Bug::kSequenceCrossed, "sequence_crossed", false},
      {Bug::kGradientTwice, "gradient_twice", true},
      {Bug::kPartRewritten, "part_rewritten", true},
      {Bug::kLastGradientLost, "last_gradient_lost", true},
      {Bug::kDqLeftZero, "dq_left_zero", true},
      {Bug::kDbiasOfOneRank, "dbias_of_one_rank", true},
      {Bug::kOffsetOfOneRank, "offset_of_one_rank", true},
      {Bug::kPaddingNotZeroed, "padding_not_zeroed", true},
      {Bug::kLastTileZero, "last_tile_zero", true},
      {Bug::kLastTileBefore, "last_tile_before", true},
      {Bug::kOneLaunchFlagWait, "one_launch_flag_wait", false},
      {Bug::kOneLaunchEpochWait, "one_launch_epoch_wait", false},
      {Bug::kOneLaunchFence, "one_launch_fence", false},
      {Bug::kOneLaunchHeads, "one_launch_heads", false},
      {Bug::kOffsetPerBlock, "offset_per_block", false},
      {Bug::kLseNotMerged, "lse_not_merged", false},
      {Bug::kOldOutNotScaled, "old_out_not_scaled", false},
      {Bug::kKvHeadMapping, "kv_head_mapping", false},
      {Bug::kKvCopiesNotSummed, "kv_copies_not_summed", false},
      {Bug::kDkNotScaled, "dk_not_scaled", false},
      {Bug::kDqOrderWait, "dq_order_wait", false},
      {Bug::kOrderVaries, "order_varies", false},
      {Bug::kInputsByRow, "inputs_by_row", false},
      {Bug::kFp8GradientsNotSent, "fp8_gradients_not_sent", true},
      {Bug::kFp8OwnScale, "fp8_own_scale", true},
      {Bug::kFp8AmaxOfOneRank, "fp8_amax_of_one_rank", true},
      {Bug::kFp8StaleScale, "fp8_stale_scale", true},
      {Bug::kFp8OutSaturates, "fp8_out_saturates", true},
      {Bug::kFp8NoSaturation, "fp8_no_saturation", false},
      {Bug::kFp8BlocksOfOtherAxis, "fp8_blocks_of_other_axis", true},
      {Bug::kFp8Most240, "fp8_most_240", false},
      {Bug::kFp8Truncation, "fp8_truncation", false},
      {Bug::kFp8FormatsSwapped, "fp8_formats_swapped", false},
      {Bug::kFp8ExponentFloor, "fp8_exponent_floor", false},
      {Bug::kFp8ExponentOfNeighbour, "fp8_exponent_of_neighbour", false},
      {Bug::kFp8PNotCast, "fp8_p_not_cast", false},
      {Bug::kFp8DsNotCast, "fp8_ds_not_cast", false},
      {Bug::kFp8PScaleLeftOut, "fp8_p_scale_left_out", false},
      {Bug::kFp8PScaleTwice, "fp8_p_scale_twice", false},
      {Bug::kNativeNeverPromoted, "native_never_promoted", false},
      {Bug::kNativeNoScale, "native_no_scale", false},
      {Bug::kNativeOtherSlots, "native_other_slots", false},
  };
  return bugs;
}

}  // namespace cppool::kernels
