// The switch of the planted bugs: known bugs of context-parallel attention, of which the environment variable
// CPPOOL_PLANTED_BUG names the one that is present. bugs.patch adds the code of the bugs to copies of the sources, which are
// compiled with this header in front; the product has neither.
#pragma once

#include <vector>

// The namespace of most of the code that bugs are planted in, so that the lines there are short.
namespace cppool::kernels {

enum class Bug {
  // In the schedules and in what says who holds and sees what, which all runtimes share. First waits between two
  // streams that are left out: random delays bring these to light.
  kMaxLogitWait,       // max_logit is read before it is the maximum over all ranks
  kGatherWait,         // all_gather computes on keys that have not arrived
  kRingBlockWait,      // a ring step computes on a block that has not arrived
  kReducedWait,        // all_gather waits for the sum of the gradients of keys after it has rounded them
  kExchangeWait,       // a2a sends heads before they are packed
  kRingStepBlock,      // a ring step computes with the block of the previous step
  kRingStepPositions,  // a ring step uses the positions of another member's block
  kCausalBoundary,     // a query sees the key after its own position
  kWindowBoundary,     // a window reaches one token too far to the left
  kBottomRightOfRoom,  // bottom-right alignment uses a sequence's padded length
  kSequenceCrossed,    // queries see keys of the next sequence
  kGradientTwice,      // a part of dk from another member of the ring is added twice
  kLastGradientLost,   // the part of the ring's last step is not added
  kDqLeftZero,         // dq is zeroed at the end
  kDbiasOfOneRank,     // dbias is not summed over the ranks
  kOffsetOfOneRank,    // the gradient of the softmax offset is not summed over the ranks
  kPaddingNotZeroed,   // the padding of out and lse keeps what was there
  // In the host's kernels.
  kOffsetPerBlock,     // the softmax offset enters the denominator with every block
  kLseNotMerged,       // out is merged with that of an earlier block, lse is not
  kOldOutNotScaled,    // an earlier block's out keeps its weight when it is merged
  kKvHeadMapping,      // a group of query heads reads the keys and values of another
  kKvCopiesNotSummed,  // the gradient of a replicated head is that of one copy
  kDkNotScaled,        // dk is not multiplied by softmax_scale
  kOrderVaries,        // blocks are summed in an order that changes from call to call
  kInputsByRow,        // inputs are drawn by the row of the buffer, not by position
};

struct PlantableBug {
  Bug bug;
  const char* name;  // for CPPOOL_PLANTED_BUG
  bool on_gpus;      // in code of the daemon itself, and so there with the CUDA module as well
};

// Any thread. Throws RuntimeError with the names of all bugs when the variable has another.
bool Planted(Bug bug);
bool PlantedByChance(Bug bug);  // Planted(bug), and a coin toss
const char* PlantedBugName();   // NULL: none
const std::vector<PlantableBug>& PlantableBugs();

}  // namespace cppool::kernels
