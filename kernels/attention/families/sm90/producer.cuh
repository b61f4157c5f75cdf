// The producer of the forward kernel: one thread that takes tiles from the work list and starts the copies of
// their queries, keys and values, as buffers become free.
//
// Items are tiles times heads in the order of head_order.h, but in fp8 all heads of a tile; the work list has
// the most work first, and thread blocks take the next item from a counter. Blocks of keys go from the last
// to the first: under a causal mask the first one then holds the keys nearest to the queries. Ranges in
// blocks that arrive come after those that are there (OrderByBlock).
#pragma once

#include "kernels/attention/families/sm90/shared.cuh"

namespace cppool::kernels::cuda::sm90 {

template <typename Config>
__device__ __forceinline__ Item ItemOf(const ForwardParameters& p, int item) {
  if constexpr (Config::kFp8) return {item / p.map.heads, item % p.map.heads};
  return ItemOf(p.order, p.work.busy_tiles, item);
}

// Returns when the piece with this key/value head of a block behind the first has arrived, or will not. Its
// flag and what TMA reads then go different ways to memory: the fence orders them.
template <typename Config>
__device__ __forceinline__ void AwaitPiece(const ForwardParameters& p, const Shared<Config>& shared,
                                           int block, int kv_head) {
  constexpr unsigned long long kLookNs = 1'000'000;  // between two looks at what the host says
  constexpr unsigned long long kLimitNs = kRingWaitSeconds * 1'000'000'000ull;
  auto& control = *shared.control;
  const int heads = kv_head / p.arriving.heads_per_piece;
  if (control.arrived_piece != heads) {
    control.arrived_piece = heads;
    control.arrived = 0;
  }
  const std::uint64_t bit = std::uint64_t{1} << (block - 1);
  if (control.arrived & bit) return;
  control.arrived |= bit;
  const unsigned piece = heads * (p.arriving.blocks - 1) + block - 1;
  const std::uint32_t* const flag = p.arriving.flags + piece;
  if (ptx::LoadAcquireSystem(flag) != p.arriving.pass) {
    RingControl* const ring = p.arriving.control;
    const unsigned long long begin = ptx::NowNs();
    unsigned long long look = kLookNs;
#pragma unroll 1
    while (ptx::LoadAcquireSystem(flag) != p.arriving.pass) {
      __nanosleep(100);
      const unsigned long long waited = ptx::NowNs() - begin;
      if (waited < look) continue;
      look += kLookNs;
      ptx::StoreSystem(&ring->awaited, piece + 1);
      if (ptx::LoadAcquireSystem(&ring->aborted) || ptx::LoadAcquireSystem(&ring->late)) break;
      if (waited > kLimitNs) ptx::StoreSystem(&ring->late, piece + 1);
    }
    if (look > kLookNs) ptx::StoreSystem(&ring->awaited, 0);
  }
  ptx::FenceGlobalForCopies();
}

// Starts the copies of a block's bias for each consumer's queries. What it needs of the tile it reads again:
// registers are few.
template <typename Config>
__device__ __forceinline__ void ProduceBias(const ForwardParameters& p, const Shared<Config>& shared,
                                            const Ring<Config::kBiasStages>& ring, int index, int key) {
#pragma unroll 1
  for (int group = 0; group < Config::kConsumers; ++group) {
    ptx::Wait(shared.EmptyBias(group, ring.stage), ring.parity ^ 1);
    const std::uint32_t full = shared.FullBias(group, ring.stage), to = shared.Bias(group, ring.stage);
    ptx::ArriveExpecting(full, p.bias.rows * (Config::kBlock * 2));
    const TileInfo& tile = shared.control->tiles[index];
    const int query = p.bias.rows == 1 ? 0 : tile.position + group * 64;
    const int sequence = shared.control->biases[index].sequence;
#pragma unroll
    for (int part = 0; part < Config::kBlock / 64; ++part) {
      ptx::LoadBiasBox(
          to + part * kBiasBoxBytes, &p.bias.tensor,
          {key + part * 64, query, tile.head * p.bias.head_factor, sequence * p.bias.sequence_factor}, full);
    }
  }
}

// Describes the item's tile, the `count`th of this thread block, to the consumers and starts the copy of its
// queries, as soon as there is a buffer; or says that there are no more.
template <typename Config>
__device__ __forceinline__ void ProduceQueries(const ForwardParameters& p, const Shared<Config>& shared,
                                               unsigned count, int item) {
  constexpr int kBlock = Config::kBlock;
  const unsigned stage = count % Config::kQueryStages, index = count % 2;
  const std::uint32_t full = shared.FullQ(stage);
  ptx::Wait(shared.EmptyQ(stage), count / Config::kQueryStages % 2 ^ 1);
  TileInfo& info = shared.control->tiles[index];
  if (item >= p.work.busy_tiles * p.map.heads) {
    info.head = -1;
    ptx::Arrive(full);
    return;
  }
  const Item at = ItemOf<Config>(p, item);
  const Tile& tile = p.work.tiles[at.tile];
  const int head = at.head;
  const int token = static_cast<int>(tile.row) / p.work.query_step;  // rows fit, see tensor_map.h
  const int member = static_cast<int>(tile.row) % p.work.query_step;
  const int range_end = tile.range_end;
  int blocks = 0;
#pragma unroll 1
  for (int i = tile.range_begin; i < range_end; ++i)
    blocks += (p.work.ranges[i].length + kBlock - 1) / kBlock;
  info = {head, blocks, token, member, tile.position, tile.length, tile.band.low, tile.band.high};
  if constexpr (Config::kBias) {
    float inverse_scale = p.bias.inverse_scale;
    if constexpr (Config::kFp8) inverse_scale = shared.control->units.inverse_scale;
    [[maybe_unused]] const float slope = p.bias.alibi_slopes ? p.bias.alibi_slopes[head] * inverse_scale : 0;
    shared.control->biases[index] = {slope, tile.band.diagonal, tile.sequence};
  }
  ptx::ArriveExpecting(full, Config::kQueryCopyBytes);
#pragma unroll 1
  for (int group = 0; group < Config::kConsumers; ++group) {
    ptx::LoadBox(shared.Queries(stage) + group * Config::kQueryGroupBytes, &p.q,
                 {token + group * 64, member, head}, full);
  }
}

template <typename Config>
__device__ __forceinline__ void Produce(const ForwardParameters& p, const Shared<Config>& shared) {
  constexpr int kBlock = Config::kBlock;
  Ring<Config::kStages> ring;
  [[maybe_unused]] Ring<Config::kBias ? Config::kBiasStages : 1> bias_ring;
  bool arrives = false;  // the range's block does; in fp8 none
  const auto produce_values = [&](const ptx::RowCoordinates& from) {
    ptx::Wait(shared.EmptyV(ring.stage), ring.parity ^ 1);
    ptx::ArriveExpecting(shared.FullV(ring.stage), Config::kValueBytes);
    if constexpr (Config::kNative) {
      ptx::LoadSlots(shared.Values(ring.stage), &p.v, shared.control->slots[ring.stage],
                     from.head * Config::kDimV, shared.FullV(ring.stage));
    } else {
      ptx::LoadBox(shared.Values(ring.stage), arrives ? &p.arriving.v : &p.v, from, shared.FullV(ring.stage));
    }
    ring.Advance();
  };
  int item = blockIdx.x;
  unsigned in_register;
  unsigned* place = &in_register;
  if constexpr (Config::kNative) place = &shared.control->tile_count;
  unsigned& count = *place;
  count = 0;
  ProduceQueries<Config>(p, shared, count, item);
  while (item < p.work.busy_tiles * p.map.heads) {
    const Item of = ItemOf<Config>(p, item);
    const Tile& tile = p.work.tiles[of.tile];
    const int range_begin = tile.range_begin;
    const int kv_head = (p.map.head0 + of.head) / p.map.group - p.map.kv_head0;
    ptx::RowCoordinates from{0, 0, kv_head};
#pragma unroll 1
    for (int i = tile.range_end - 1; i >= range_begin; --i) {
      const Range range = p.work.ranges[i];
      int row = static_cast<int>(range.row);
      if (!Config::kFp8 && p.arriving.flags) {
        const int block = row / p.arriving.block_rows;
        arrives = block > 0;
        if (arrives) {
          AwaitPiece<Config>(p, shared, block, kv_head);
          row -= p.arriving.block_rows;
        }
      }
      const int key_token = row / p.work.key_step;
      from.member = row % p.work.key_step;
#pragma unroll 1
      for (int at = (range.length - 1) / kBlock * kBlock; at >= 0; at -= kBlock) {
        from.token = key_token + at;
        const bool last = i == range_begin && at == 0;
        // Not earlier: a thread block that is late should take fewer items.
        if (last) item = static_cast<int>(gridDim.x) + atomicAdd(p.schedule, 1);
        ptx::Wait(shared.EmptyK(ring.stage), ring.parity ^ 1);
        shared.control->blocks[ring.stage] = {range.position + at, min(range.length - at, kBlock)};
        if constexpr (Config::kNative)
          shared.control->slots[ring.stage] = static_cast<int>(range.row >> 32) + at;
        ptx::ArriveExpecting(shared.FullK(ring.stage), Config::kKeyBytes);
        ptx::LoadBox(shared.Keys(ring.stage), arrives ? &p.arriving.k : &p.k, from, shared.FullK(ring.stage));
        if constexpr (Config::kBias) {
          if (p.bias.rows > 0) {
            ProduceBias<Config>(p, shared, bias_ring, count % 2, range.position + at);
            bias_ring.Advance();
          }
        }
        if (!last) produce_values(from);
      }
    }
    ++count;
    // The next tile's queries come before the last values: what they wait for, the answer to the addition and
    // reads of the work list, takes as long as a block, and these values wait for the block before the last.
    // The other buffer of queries is released after this tile's first product, whose keys are on their way;
    // where there is one buffer, after the last.
    if (Config::kQueryStages == 2) ProduceQueries<Config>(p, shared, count, item);
    produce_values(from);
    if (Config::kQueryStages == 1) ProduceQueries<Config>(p, shared, count, item);
  }
  // The last thread block to come here leaves the counters as it found them.
  __threadfence();
  if (atomicAdd(p.schedule + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    __threadfence();
    p.schedule[0] = p.schedule[1] = 0;
  }
}

}  // namespace cppool::kernels::cuda::sm90
