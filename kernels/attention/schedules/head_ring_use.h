// What a rank of the exchange of heads and the ring (head_ring.h) does and holds, from the spec and its place
// alone: the schedule and the estimate of its memory are both made from it. No runtime here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/schedules/block_attention.h"
#include "kernels/attention/schedules/head_exchange.h"
#include "kernels/attention/schedules/whole_tensors.h"
#include "kernels/memory_list.h"

namespace cppool::kernels {

// The ring over `ring_size` blocks, each the tokens of an a2a group: `a2a_size` ranks that exchange heads.
// The same on every rank. World rank = ring position * a2a_size + rank in the a2a group.
struct RingSteps {
  RingSteps(const AttentionSpec& spec, int a2a_ranks, int ring_positions);

  // A step of the ring: every position may attend to the block of the one `distance` before it.
  struct Step {
    int distance;
    std::vector<bool> attends;  // by position: it sees something of that block
  };

  int a2a_size, ring_size;
  std::vector<Layout> queries, keys;  // of each position's block
  std::vector<Band> bands;
  // Those in which any position attends, so that all go through the same transfers in the same order; the
  // first is the own block's.
  std::vector<Step> steps;
  bool gathers;  // all_gather: the forward pass attends to the blocks of others at once

  // The keys of those blocks that the position attends to, as they lie in its slots.
  Layout Gathered(int position) const;
  // The keys of its own block and of those of Gathered, as blocks that arrive.
  Layout Arriving(int position) const;

  int Before(int position, int distance) const { return (position + ring_size - distance) % ring_size; }
  int After(int position, int distance) const { return (position + distance) % ring_size; }
  // Whether another position attends to this one's block in the step.
  bool Serves(const Step& step, int position) const {
    return step.distance > 0 && step.attends[static_cast<std::size_t>(After(position, step.distance))];
  }
};

struct HeadRingUse {
  HeadRingUse(const AttentionSpec& spec, const AttentionFamily& family, const RingSteps& ring, int a2a_rank,
              int position);

  TensorDtypes moved;  // in which tensors are exchanged and travel around the ring
  HeadPlan heads;
  BlockUse block;                          // calls on the blocks after the exchange
  std::int64_t rows_q = 0, rows_kv = 0;    // of this rank's tokens
  std::int64_t block_q = 0, block_kv = 0;  // of a block after the exchange
  std::size_t slots = 0;                   // for others' blocks: of step i in slot (i - 1) % slots
  std::size_t last_attended = 0;           // index into RingSteps::steps
  bool exchanges = false;                  // of heads
  bool one_launch = false;                 // of the forward pass: spec.launches is kOne, and there are steps
  int heads_per_piece = 0;                 // one_launch: of keys and values, see ArrivingKeys
  std::size_t serves = 0;                  // how many others add to the gradients of this position's block
  bool sums_gradients = false;  // dk and dv of this position's block are sums, in fp32 until the end
  // The first and the last step by which this position's blocks or others' move; 0: there are none.
  std::size_t first_moved = 0, last_moved = 0;
  // The backward pass attends to the later chunks of the own block first and to the earlier ones last, under
  // which others' keys come and gradients return. Else both are empty.
  Layout later_keys, earlier_keys;

  bool splits_own() const { return !later_keys.segments.empty(); }
  // Whether transfers of the ring go on under the calls on the block of a step: keys and values come under
  // calls of earlier steps, gradients return under those of later ones and of the own block's last part.
  bool MovesUnderForward(std::size_t step) const { return step < last_moved; }
  bool MovesUnderBackward(std::size_t step) const { return step < last_moved || step > first_moved; }

  std::size_t QueryElements(int dim) const {
    return static_cast<std::size_t>(block_q * block.request.shape.heads * dim);
  }
  std::size_t KeyElements(int dim) const {
    return static_cast<std::size_t>(block_kv * block.request.shape.kv_heads * dim);
  }
};

struct HeadRingBuffers {
  // The exchange fills these; without one they are unused.
  Buffer scratch, q, k, v, out, lse, dout, dq, dk, dv;
  Buffer k_slots, v_slots;        // others' blocks
  Buffer slot_scales;             // fp8: the scales of k and v of each slot, fp32 [slots][2]
  Buffer delta;                   // [block_q, heads], fp32
  Buffer dk_sum, dv_sum;          // of this position's block: [block_kv, kv_heads, dim], fp32
  Buffer dk_part[2], dv_part[2];  // what this rank adds to others' gradients, by turns
  Buffer dk_taken, dv_taken;      // what others add to this one's, fp32 [serves, block_kv, kv_heads, dim]

  void List(const HeadRingUse& use, MemoryList& list);
};

// Declares all that the rank holds: the buffers, and those of what it is made of.
void ListHeadRing(const AttentionSpec& spec, const HeadRingUse& use, HeadRingBuffers& ring,
                  BlockBuffers& block, WholeBuffers& whole, MemoryList& list);
// Returns the keys of each call of a pass: all that this position ever plans for.
std::vector<Layout> KeysOfCalls(const AttentionSpec& spec, const HeadRingUse& use, const RingSteps& ring,
                                int position);
// Declares what its plans take.
void ListHeadRingPlans(const AttentionSpec& spec, const HeadRingUse& use, const RingSteps& ring, int position,
                       MemoryList& list);

}  // namespace cppool::kernels
