// Known bugs of context-parallel attention, planted on request, so that the suites can show that they catch each of
// them. Only in a build with CPPOOL_PLANT_BUGS, where the environment variable CPPOOL_PLANTED_BUG names one; in any other
// build Planted() is false at compile time and nothing of the bugs is left.
#pragma once

#include <vector>

namespace cppool::kernels {

enum class Bug {
  // In the schedules and in what says who holds and sees what, which all runtimes share. First waits between two
  // streams that are left out: random delays bring these to light.
  kMaxLogitWait,       // max_logit is read before it is the maximum over all ranks
  kGatherWait,         // all_gather computes on keys that are still on their way
  kRingBlockWait,      // a ring step computes on a block that is still on its way
  kReducedWait,        // all_gather waits for the sum of the gradients of keys after it has rounded them
  kExchangeWait,       // a2a sends heads before they are packed
  kRingStepBlock,      // a ring step computes with the block of the step before
  kRingStepPositions,  // a ring step takes its block for that of another member
  kCausalBoundary,     // a query sees the key after its own position
  kWindowBoundary,     // a window reaches one token too far to the left
  kBottomRightOfRoom,  // bottom-right is that of a sequence's room, not of its length
  kSequenceCrossed,    // queries see keys of the next sequence
  kGradientTwice,      // a part of dk from another member of the ring is added twice
  kLastGradientLost,   // the part of the ring's last step is not added
  kDqLeftZero,
  kDbiasOfOneRank,    // not summed over the ranks
  kOffsetOfOneRank,   // the gradient of the softmax offset is not summed over the ranks
  kPaddingNotZeroed,  // of out and lse
  // In the host's kernels.
  kOffsetPerBlock,     // the softmax offset enters the denominator with every block
  kLseNotMerged,       // out is merged with that of an earlier block, lse is not
  kOldOutNotScaled,    // an earlier block's out keeps the weight that it had alone
  kKvHeadMapping,      // a group of query heads reads the keys and values of another
  kKvCopiesNotSummed,  // of a replicated head's gradients one copy is taken
  kDkNotScaled,        // by softmax_scale
  kOrderVaries,        // blocks are summed in an order that changes from call to call
  kInputsByRow,        // inputs are drawn by the row of the buffer, not by position
};

struct PlantableBug {
  Bug bug;
  const char* name;  // for CPPOOL_PLANTED_BUG
  bool
      of_schedules;  // in code of the daemon's own: there on GPUs too, whatever the CUDA module was built with
};

#if defined(CPPOOL_PLANT_BUGS)
inline constexpr bool kPlantsBugs = true;
// Any thread. Throws RuntimeError, listing the names there are, when the variable has another.
bool Planted(Bug bug);
bool PlantedByChance(Bug bug);  // planted, and a coin says so
const char* PlantedBugName();   // NULL: none
const std::vector<PlantableBug>& PlantableBugs();
#else
inline constexpr bool kPlantsBugs = false;
constexpr bool Planted(Bug) { return false; }
constexpr bool PlantedByChance(Bug) { return false; }
constexpr const char* PlantedBugName() { return nullptr; }
#endif

}  // namespace cppool::kernels
