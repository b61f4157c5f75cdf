// Selects the planted bug: the environment variable CPPOOL_PLANTED_BUG names one known bug of
// context-parallel attention, or none. bugs.patch adds the code of the bugs to copies of the sources, which
// are compiled with `-include planted_bug.h`. The product contains neither.
#pragma once

#include <vector>

// Most planted code is in this namespace and can use the names below without a qualifier.
namespace cppool::kernels {

enum class Bug {
  // In the schedules, layouts and masks, which all runtimes share. The first five remove a wait between two
  // streams; random
  // delays (`perturb`) make their effect visible.
  kMaxLogitWait,       // max_logit is read before it is the maximum over all ranks
  kGatherWait,         // all_gather computes on keys that have not arrived
  kRingBlockWait,      // a ring step computes on a block that has not arrived
  kReturnedWait,       // dk and dv are summed before the parts of other ranks have come
  kExchangeWait,       // a2a sends heads before they are packed
  kRingStepBlock,      // a ring step computes with the block of the previous step
  kRingStepPositions,  // a ring step uses the positions of another ring position's block
  kCausalBoundary,     // a query sees the key after its own position
  kWindowBoundary,     // a window reaches one token too far to the left
  kBottomRightOfRoom,  // bottom-right alignment uses a sequence's padded length
  kSequenceCrossed,    // queries see keys of the next sequence
  kGradientTwice,      // a partial dk from another ring position is added twice
  kPartRewritten,      // a part of another rank's gradients is written again before it has left
  kLastGradientLost,   // the partial dk and dv of the ring's last step are not added
  kDqLeftZero,         // dq is zeroed at the end
  kDbiasOfOneRank,     // dbias is not summed over the ranks
  kOffsetOfOneRank,    // the gradient of the softmax offset is not summed over the ranks
  kPaddingNotZeroed,   // the padding rows of out and lse are not written
  kLastTileZero,    // the last rows of an output are zero: output seed % 16 of the case, 64 rows, or 8 from
                    // seed 16 on, or 1 from 32 on
  kLastTileBefore,  // they hold the rows before them
  // In one launch, on the host runtime.
  kOneLaunchFlagWait,   // a piece's flag is raised before the piece is copied
  kOneLaunchEpochWait,  // the number of the pass does not rise, so that flags of the pass before stand for
                        // this one's
  kOneLaunchFence,      // nothing orders a piece after its flag where it is read
  kOneLaunchHeads,      // a piece has the keys and values of the heads before
  // In the host's kernels.
  kOffsetPerBlock,     // the softmax offset is added to the denominator with every block
  kLseNotMerged,       // out is merged with the out of an earlier block, but lse is not
  kOldOutNotScaled,    // the out of an earlier block is not rescaled when it is merged
  kKvHeadMapping,      // a group of query heads reads the keys and values of another group
  kKvCopiesNotSummed,  // the gradient of a replicated head is the gradient of one copy
  kDkNotScaled,        // dk is not multiplied by softmax_scale
  kDqOrderWait,        // a call on a second stream adds to dq before the calls before it have
  kOrderVaries,        // blocks are summed in an order that changes from call to call
  kInputsByRow,        // inputs are drawn by the row of the buffer, not by position
  // Bugs of fp8 are in the schedules, and in what they quantize.
  kFp8GradientsNotSent,  // a rank sums what it adds to others' dk and dv instead of those for its keys
  kFp8OwnScale,  // amaxes are a rank's own, and so is the scale that a block from another rank is read with
  kFp8AmaxOfOneRank,      // amaxes are not reduced over the ranks
  kFp8StaleScale,         // q, k and v are cast with the scale of an amax of 1
  kFp8OutSaturates,       // the delayed scale of out is that of smaller outputs
  kFp8NoSaturation,       // the same, and what is too large for the format becomes NaN
  kFp8BlocksOfOtherAxis,  // v is quantized in blocks along the dims for the product with P
  // In the host's casts and kernels.
  kFp8Most240,              // the largest E4M3 value is taken for 240
  kFp8Truncation,           // casts round down
  kFp8FormatsSwapped,       // E4M3 is cast where E5M2 is read, and the reverse
  kFp8ExponentFloor,        // exponents of blocks are too small by one: the largest values saturate
  kFp8ExponentOfNeighbour,  // a block is read with its neighbour's exponent
  kFp8PNotCast,             // P is rounded to bf16 in the forward pass
  kFp8DsNotCast,            // dS is not cast
  kFp8PScaleLeftOut,        // dv is not divided by the scale of P
  kFp8PScaleTwice,          // dv is divided by it twice
  // In sm90's products of payloads: planted_native_test has these, and the daemon has not.
  kNativeNeverPromoted,  // the output is summed by the products alone
  kNativeNoScale,        // the output so far is not rescaled when a product is added to it
  kNativeOtherSlots,     // the slots of transposed values are not those of the exponentials
};

struct PlantableBug {
  Bug bug;
  const char* name;  // for CPPOOL_PLANTED_BUG
  bool on_gpus;      // the bug is in code of the daemon, so it also has an effect with the CUDA module
};

// May be called by any thread. Throws RuntimeError with the names of all bugs when the variable names no bug.
bool Planted(Bug bug);
bool PlantedByChance(Bug bug);  // true at random in half of the calls if the bug is planted
const char* PlantedBugName();   // NULL: none
const std::vector<PlantableBug>& PlantableBugs();

}  // namespace cppool::kernels
