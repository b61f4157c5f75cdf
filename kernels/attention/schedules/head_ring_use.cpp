#include "kernels/attention/schedules/head_ring_use.h"

#include <algorithm>

#include "kernels/attention/problem/transposed.h"

namespace cppool::kernels {
namespace {

constexpr int kMostPieces = 8;  // of a block

// Returns how many key/value heads a piece of at least `least` bytes has, where a head has `bytes`.
int HeadsPerPiece(int heads, std::size_t bytes, std::size_t least) {
  const auto wanted =
      static_cast<int>(std::min((least + bytes - 1) / bytes, static_cast<std::size_t>(heads)));
  return std::max(wanted, (heads + kMostPieces - 1) / kMostPieces);
}

// The tokens in the second or the first half of each sequence's room. DualChunkSwap gives a rank a chunk of
// both.
Layout HalfOf(Layout layout, const Sequences& sequences, bool second) {
  std::erase_if(layout.segments, [&](const Segment& s) {
    return (2 * std::int64_t{s.position} >= sequences.room[static_cast<std::size_t>(s.sequence)]) != second;
  });
  return layout;
}

}  // namespace

RingSteps::RingSteps(const AttentionSpec& spec, int a2a_ranks, int ring_positions)
    : a2a_size(a2a_ranks),
      ring_size(ring_positions),
      bands(BandsOf(spec)),
      gathers(spec.comm == CpCommType::kAllGather && ring_positions > 1) {
  // Positions say everything: a block is the tokens of the ranks of one a2a group, wherever they are in their
  // sequences.
  const auto blocks = [&](const Sequences& sequences) {
    std::vector<Layout> blocks;
    for (int position = 0; position < ring_size; ++position) {
      std::vector<Layout> ranks;
      for (int a2a_rank = 0; a2a_rank < a2a_size; ++a2a_rank)
        ranks.push_back(
            RankLayout(spec.format, sequences, ring_size * a2a_size, position * a2a_size + a2a_rank));
      blocks.push_back(Concatenate(ranks));
    }
    return blocks;
  };
  queries = blocks(spec.queries);
  keys = blocks(spec.keys);
  for (int distance = 0; distance < ring_size; ++distance) {
    std::vector<bool> attends(static_cast<std::size_t>(ring_size));
    for (int position = 0; position < ring_size; ++position) {
      attends[static_cast<std::size_t>(position)] =
          distance == 0 || SeesAny(queries[static_cast<std::size_t>(position)],
                                   keys[static_cast<std::size_t>(Before(position, distance))], bands);
    }
    if (std::find(attends.begin(), attends.end(), true) != attends.end())
      steps.push_back({distance, std::move(attends)});
  }
}

Layout RingSteps::Gathered(int position) const {
  std::vector<Layout> blocks;
  for (std::size_t i = 1; i < steps.size(); ++i) {
    blocks.push_back(keys[static_cast<std::size_t>(Before(position, steps[i].distance))]);
    // This block does not come: its rows stay, without tokens.
    if (!steps[i].attends[static_cast<std::size_t>(position)]) blocks.back().segments.clear();
  }
  return Concatenate(blocks);
}

Layout RingSteps::Arriving(int position) const {
  Layout all = Concatenate({keys[static_cast<std::size_t>(position)], Gathered(position)});
  all.block_rows = keys[static_cast<std::size_t>(position)].rows;
  return all;
}

HeadRingUse::HeadRingUse(const AttentionSpec& spec, const AttentionFamily& family, const RingSteps& ring,
                         int a2a_rank, int position)
    : moved(spec.fp8 ? PayloadDtypes(spec.dtypes, Fp8TableOf(*spec.fp8, spec.training)) : spec.dtypes),
      heads(DealHeads(spec.heads, spec.kv_heads, ring.a2a_size)),
      rows_q(spec.queries.rows / (ring.a2a_size * ring.ring_size)),
      rows_kv(spec.keys.rows / (ring.a2a_size * ring.ring_size)),
      block_q(rows_q * ring.a2a_size),
      block_kv(rows_kv * ring.a2a_size),
      slots(ring.gathers ? ring.steps.size() - 1 : std::min<std::size_t>(2, ring.steps.size() - 1)),
      exchanges(ring.a2a_size > 1),
      one_launch(spec.launches == Launches::kOne && ring.steps.size() > 1 && !exchanges) {
  if (one_launch) slots = ring.steps.size() - 1;
  for (std::size_t i = 0; i < ring.steps.size(); ++i) {
    const bool attends = ring.steps[i].attends[static_cast<std::size_t>(position)],
               gives = ring.Serves(ring.steps[i], position);
    if (attends) last_attended = i;
    serves += gives;
    if (i == 0 || !(attends || gives)) continue;
    if (first_moved == 0) first_moved = i;
    last_moved = i;
  }
  sums_gradients = serves > 0 || heads.replicated;

  block.request = RequestOf(spec);
  KernelShape& shape = block.request.shape;
  const HeadRange query = heads.query[static_cast<std::size_t>(a2a_rank)],
                  key = heads.key[static_cast<std::size_t>(a2a_rank)];
  shape.heads = query.count;
  shape.head0 = query.begin;
  shape.kv_heads = key.count;
  shape.kv_head0 = key.begin;
  block.family = &family;
  block.queries = ring.queries[static_cast<std::size_t>(position)];
  const std::int64_t blocks = one_launch     ? static_cast<std::int64_t>(slots) + 1
                              : ring.gathers ? std::max<std::int64_t>(1, static_cast<std::int64_t>(slots))
                                             : 1;
  block.rows_kv = blocks * block_kv;
  block.gradient_rows = block_kv;
  for (const Layout& keys : ring.keys) block.key_slots = std::max(block.key_slots, SlotsOf(keys));
  if (ring.gathers) block.key_slots = std::max(block.key_slots, SlotsOf(ring.Gathered(position)));
  block.several_backward = last_attended > 0;
  block.several_forward = block.several_backward && !one_launch;
  block.keys_in_fp32 = sums_gradients || last_attended > 0;
  block.softmax_offset = spec.softmax != SoftmaxType::kVanilla;
  block.offset_gradient = spec.training && spec.softmax == SoftmaxType::kLearnable;
  block.padded_queries = spec.queries.padded();
  block.padded_keys = spec.keys.padded();
  block.query_chunks = MxChunks(spec.queries, spec.mx_world_size);
  block.key_chunks = MxChunks(spec.keys, spec.mx_world_size);

  const Capabilities can = block.capabilities();
  if (one_launch) {
    const std::size_t bytes =
        static_cast<std::size_t>(block_kv * std::min(shape.dim_qk, shape.dim_v)) * SizeOf(moved.k);
    heads_per_piece = HeadsPerPiece(shape.kv_heads, bytes, can.arriving_piece_bytes);
  }
  if (serves == 0 || last_attended == 0 || spec.fp8 || !can.accumulates_gradients || !can.splits_keys) return;
  const Layout& own = ring.keys[static_cast<std::size_t>(position)];
  const Layout later = HalfOf(own, spec.keys, true), earlier = HalfOf(own, spec.keys, false);
  if (!SeesAny(block.queries, later, ring.bands) || !SeesAny(block.queries, earlier, ring.bands)) return;
  later_keys = later;
  earlier_keys = earlier;
}

void HeadRingBuffers::List(const HeadRingUse& use, MemoryList& list) {
  const KernelShape& shape = use.block.request.shape;
  const TensorDtypes& dtypes = use.moved;
  const bool training = use.block.request.training;
  const auto of_queries = [&](const char* name, int dim, std::size_t element, Buffer& to) {
    list.Add(name, use.QueryElements(dim) * element, to);
  };
  const auto of_keys = [&](const char* name, int dim, std::size_t element, Buffer& to) {
    list.Add(name, use.KeyElements(dim) * element, to);
  };
  if (use.exchanges) {
    // The largest tensor packed for, or come from, the a2a group; gradients of replicated heads travel in
    // fp32.
    std::size_t packed = 0;
    const auto packs = [&](std::int64_t rows, int dim, const std::vector<HeadRange>& ranges,
                           std::size_t element) {
      packed = std::max(packed,
                        static_cast<std::size_t>(HeadExchange::PackedElements(rows, dim, ranges)) * element);
    };
    packs(use.rows_q, shape.dim_qk, use.heads.query, SizeOf(dtypes.q));
    packs(use.rows_kv, shape.dim_qk, use.heads.key, SizeOf(dtypes.k));
    packs(use.rows_kv, shape.dim_v, use.heads.key, SizeOf(dtypes.v));
    packs(use.rows_q, shape.dim_v, use.heads.query, SizeOf(dtypes.out));
    packs(use.rows_q, 1, use.heads.query, sizeof(float));  // lse
    if (training) {
      packs(use.rows_q, shape.dim_v, use.heads.query, SizeOf(dtypes.dout));
      packs(use.rows_q, shape.dim_qk, use.heads.query, SizeOf(dtypes.dq));
      packs(use.rows_kv, shape.dim_qk, use.heads.key,
            use.heads.replicated ? sizeof(float) : SizeOf(dtypes.dk));
      packs(use.rows_kv, shape.dim_v, use.heads.key,
            use.heads.replicated ? sizeof(float) : SizeOf(dtypes.dv));
    }
    list.Add("heads packed", packed, scratch);
    of_queries("q of heads", shape.dim_qk, SizeOf(dtypes.q), q);
    of_keys("k of heads", shape.dim_qk, SizeOf(dtypes.k), k);
    of_keys("v of heads", shape.dim_v, SizeOf(dtypes.v), v);
    of_queries("out of heads", shape.dim_v, SizeOf(dtypes.out), out);
    of_queries("lse of heads", 1, sizeof(float), lse);
    if (training) {
      of_queries("dout of heads", shape.dim_v, SizeOf(dtypes.dout), dout);
      of_queries("dq of heads", shape.dim_qk, SizeOf(dtypes.dq), dq);
      if (!use.heads.replicated) {
        of_keys("dk of heads", shape.dim_qk, SizeOf(dtypes.dk), dk);
        of_keys("dv of heads", shape.dim_v, SizeOf(dtypes.dv), dv);
      }
    }
  }
  if (use.slots > 0) {
    of_keys("k of other ring positions", shape.dim_qk, use.slots * SizeOf(dtypes.k), k_slots);
    of_keys("v of other ring positions", shape.dim_v, use.slots * SizeOf(dtypes.v), v_slots);
    if (IsFp8(dtypes.k))
      list.Add("scales of other ring positions", 2 * use.slots * sizeof(float), slot_scales);
  }
  if (!training) return;
  of_queries("delta", 1, sizeof(float), delta);
  if (use.sums_gradients) {
    of_keys("dk in fp32", shape.dim_qk, sizeof(float), dk_sum);
    of_keys("dv in fp32", shape.dim_v, sizeof(float), dv_sum);
  }
  if (use.serves > 0) {
    of_keys("dk from other ring positions", shape.dim_qk, use.serves * sizeof(float), dk_taken);
    of_keys("dv from other ring positions", shape.dim_v, use.serves * sizeof(float), dv_taken);
  }
  for (std::size_t i = 0; i < std::min<std::size_t>(2, use.slots) && use.last_attended > 0; ++i) {
    of_keys("dk for another ring position", shape.dim_qk, sizeof(float), dk_part[i]);
    of_keys("dv for another ring position", shape.dim_v, sizeof(float), dv_part[i]);
  }
}

void ListHeadRing(const AttentionSpec& spec, const HeadRingUse& use, HeadRingBuffers& ring,
                  BlockBuffers& block, WholeBuffers& whole, MemoryList& list) {
  ring.List(use, list);
  block.List(use.block, list);
  whole.List(spec, use.block.request.shape, use.block_q, list);
}

std::vector<Layout> KeysOfCalls(const AttentionSpec& spec, const HeadRingUse& use, const RingSteps& ring,
                                int position) {
  std::vector<Layout> calls;
  for (const RingSteps::Step& step : ring.steps) {
    if (!step.attends[static_cast<std::size_t>(position)]) continue;
    if (!spec.training && (use.one_launch || (step.distance > 0 && ring.gathers))) continue;
    calls.push_back(ring.keys[static_cast<std::size_t>(ring.Before(position, step.distance))]);
  }
  if (use.one_launch)
    calls.push_back(ring.Arriving(position));
  else if (ring.gathers && use.last_attended > 0)
    calls.push_back(ring.Gathered(position));
  if (spec.training && use.splits_own()) {
    calls.push_back(use.later_keys);
    calls.push_back(use.earlier_keys);
  }
  return calls;
}

void ListHeadRingPlans(const AttentionSpec& spec, const HeadRingUse& use, const RingSteps& ring, int position,
                       MemoryList& list) {
  for (const Layout& keys : KeysOfCalls(spec, use, ring, position))
    list.AddTables("plan of a call", use.block.PlanBytes(keys));
}

}  // namespace cppool::kernels
