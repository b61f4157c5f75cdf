// The producer of the backward kernel: one warp that takes tiles of keys from the work list and brings their
// keys and values, and for each query head and block that sees them queries, output gradients, lse and delta,
// as buffers become free.
//
// Items are tiles times key/value heads, in sections of heads whose queries and dq stay in the L2 cache. All
// come from a counter, so that whatever an item waits for in its turn to add to dq is held by a thread block
// that runs. Blocks go from the last to the first: tiles of a sequence then begin with the same block. With
// heads_together each goes for all heads before the next, so that tiles go on in step and one waits for
// another's single step; head after head, a tile with few blocks would wait at every head for the one with
// the most.
#pragma once

#include "kernels/attention/families/sm90/backward_pair_producer.cuh"
#include "kernels/attention/families/sm90/backward_shared.cuh"

namespace cppool::kernels::cuda::sm90 {

// By one thread: starts the copies of the bias of a tile's keys and a step's queries. What it needs of both
// it reads again: registers are few.
template <typename Config>
__device__ __forceinline__ void ProduceBackwardBias(const BackwardParameters& p,
                                                    const BackwardShared<Config>& shared,
                                                    const Ring<Config::kBiasStages>& ring, int tile_stage,
                                                    const StepInfo& step) {
  const std::uint32_t full = shared.FullBias(ring.stage);
  ptx::ArriveExpecting(full, p.bias.rows * (Config::kTileKeys * 2));
#pragma unroll
  for (int part = 0; part < Config::kTileKeys / 64; ++part) {
    ptx::LoadBiasBox(shared.Bias(ring.stage) + part * (Config::kRows * 128), &p.bias.tensor,
                     {shared.control->tiles[tile_stage].position + part * 64,
                      p.bias.rows == 1 ? 0 : step.position, step.head * p.bias.head_factor,
                      shared.control->tile_biases[tile_stage].sequence * p.bias.sequence_factor},
                     full);
  }
}

template <typename Config>
__device__ __forceinline__ void ProduceBackward(const BackwardParameters& p,
                                                const BackwardShared<Config>& shared) {
  constexpr int kRowsPerLane = Config::kRows / 32;
  const int lane = threadIdx.x % 32;
  const int items = p.work.busy_tiles * p.map.kv_heads;
  Ring<Config::kTileStages> tiles;
  StepRingsOf<Config> rings;
  while (true) {
    int item = 0;
    if constexpr (Config::kPairs) {
      item = TakePairItem(p, shared, tiles);
    } else {
      if (lane == 0) item = atomicAdd(p.schedule, 1);
      item = __shfl_sync(~0u, item, 0);
      ptx::Wait(shared.EmptyTile(tiles.stage), tiles.parity ^ 1);
    }
    KeyTileInfo& info = shared.control->tiles[tiles.stage];
    const std::uint32_t full_tile = shared.FullTile(tiles.stage);
    if (item >= items) {
      if (lane == 0) {
        info.kv_head = -1;
        ptx::Arrive(full_tile);
      }
      return;
    }
    const int section = item / (p.work.busy_tiles * p.section_heads);
    const int place = item - section * (p.work.busy_tiles * p.section_heads);
    const int heads = min(p.section_heads, p.map.kv_heads - section * p.section_heads);
    const KeyTile& tile = p.work.tiles[place / heads];
    const int kv_head = section * p.section_heads + place % heads;
    const int block_begin = tile.block_begin, block_end = tile.block_end, ordinal = tile.ordinal;
    // The call's query heads that read it.
    const int first_head = max((p.map.kv_head0 + kv_head) * p.map.group - p.map.head0, 0);
    const int end_head = min((p.map.kv_head0 + kv_head + 1) * p.map.group - p.map.head0, p.map.heads);
    if constexpr (Config::kBias) {
      // Apart from the rest of the description, so that few registers are taken at a time.
      if (lane == 0) shared.control->tile_biases[tiles.stage] = p.tile_biases[place / heads];
      __syncwarp();
    }
    if (lane == 0) {
      info = {kv_head,
              (end_head - first_head) * (block_end - block_begin),
              tile.token,
              tile.member,
              tile.position,
              tile.length,
              tile.low,
              tile.high,
              0};
      if constexpr (Config::kPairs) {
        ProducePairKeys(p, shared, tiles.stage);
      } else {
        ptx::ArriveExpecting(full_tile, Config::kKeyBytes + Config::kValueBytes + Config::kOtherKeyBytes);
        const ptx::RowCoordinates from{tile.token, tile.member, kv_head};
        ptx::LoadBox(shared.Keys(tiles.stage), &p.k, from, full_tile);
        ptx::LoadBox(shared.Values(tiles.stage), &p.v, from, full_tile);
        if constexpr (Config::kInBlocks) ptx::LoadBox(shared.OtherKeys(), &p.k_of_dq, from, full_tile);
      }
    }
    __syncwarp();
    [[maybe_unused]] const int tile_stage = tiles.stage;
    tiles.Advance();
    int at = block_end - 1, head = first_head;
    const auto next = [&] {
      if (p.heads_together) {
        if (++head < end_head) return;
        head = first_head;
        --at;
      } else {
        if (--at >= block_begin) return;
        at = block_end - 1;
        ++head;
      }
    };
#pragma unroll 1
    for (; at >= block_begin && head < end_head; next()) {
      const QueryBlock block = p.work.blocks[at];
      float lse[kRowsPerLane], delta[kRowsPerLane];
      const auto load_state = [&] {
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
          const int row = lane + i * 32;
          lse[i] = INFINITY, delta[i] = 0;
          if (row >= block.length) continue;
          const std::int64_t state =
              (static_cast<std::int64_t>(block.token + row) * p.work.query_step + block.member) *
                  p.map.heads +
              head;
          lse[i] = p.lse[state];
          delta[i] = p.delta[state];
        }
      };
      // Under the wait for the queries' buffer; if that for the output gradients' is longer, under that one,
      // which takes fewer registers; with a bias under the copy of the output gradients, which takes the
      // fewest.
      constexpr bool kUnderCopy = Config::kBias;
      constexpr bool kEarly = !kUnderCopy && Config::kDoutStages == Config::kStages;
      if constexpr (kEarly) load_state();
      const ptx::RowCoordinates from{block.token, block.member, head};
      const auto& q = rings.q();
      const auto dout = rings.dout();
      ptx::Wait(shared.EmptyQ(q.stage), q.parity ^ 1);
      if (lane == 0) {
        shared.control->steps[rings.step()] = {block.token,
                                               block.member,
                                               block.position,
                                               block.length,
                                               head,
                                               (at * p.map.heads + head) * kTurns,
                                               ordinal - block.first_tile};
        if constexpr (Config::kBias) {
          float inverse_scale = p.bias.inverse_scale;
          if constexpr (Config::kFp8) inverse_scale = shared.control->units.inverse_scale;
          shared.control->slopes[q.stage] =
              p.bias.alibi_slopes ? p.bias.alibi_slopes[head] * inverse_scale : 0;
        }
        ptx::ArriveExpecting(shared.FullQ(q.stage), Config::kQueryBytes);
        ptx::LoadBox(shared.Queries(q.stage), &p.q, from, shared.FullQ(q.stage));
      }
      __syncwarp();
      if constexpr (Config::kBias) {
        if (p.bias.rows > 0) {
          const auto bias = rings.template Beside<Config::kBiasStages>();
          ptx::Wait(shared.EmptyBias(bias.stage), bias.parity ^ 1);
          if (lane == 0)
            ProduceBackwardBias<Config>(p, shared, bias, tile_stage, shared.control->steps[rings.step()]);
          __syncwarp();
        }
      }
      if constexpr (!kEarly && !kUnderCopy) load_state();
      ptx::Wait(shared.EmptyDout(dout.stage), dout.parity ^ 1);
      if constexpr (kUnderCopy) {
        if (lane == 0) {
          ptx::Expect(shared.FullDout(dout.stage), Config::kDoutBytes);
          ptx::LoadBox(shared.Dout(dout.stage), &p.dout, from, shared.FullDout(dout.stage));
        }
        load_state();
      }
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
        shared.control->lse[dout.stage][lane + i * 32] = lse[i] == -INFINITY ? INFINITY : lse[i] * kLog2e;
        shared.control->delta[dout.stage][lane + i * 32] = delta[i];
        if constexpr (Config::kFp8) {
          const BackwardUnits& units = shared.control->units;
          shared.control->lse[dout.stage][lane + i * 32] -= units.lift;
          shared.control->delta[dout.stage][lane + i * 32] *= units.delta;
        }
      }
      if (!kUnderCopy && lane == 0) {
        ptx::ArriveExpecting(shared.FullDout(dout.stage), Config::kDoutBytes);
        ptx::LoadBox(shared.Dout(dout.stage), &p.dout, from, shared.FullDout(dout.stage));
      } else {
        ptx::Arrive(shared.FullDout(dout.stage));
      }
      __syncwarp();
      if constexpr (Config::kInBlocks) {
        const auto second = rings.second();
        ptx::Wait(shared.EmptyQ(second.stage), second.parity ^ 1);
        if (lane == 0) {
          ptx::ArriveExpecting(shared.FullQ(second.stage), Config::kQueryBytes);
          ptx::LoadBox(shared.Queries(second.stage), &p.q_of_dk, from, shared.FullQ(second.stage));
        }
        ptx::Wait(shared.EmptyDout(second.stage), second.parity ^ 1);
        if (lane == 0) {
          ptx::ArriveExpecting(shared.FullDout(second.stage), Config::kDoutBytes);
          ptx::LoadBox(shared.Dout(second.stage), &p.dout_of_dv, from, shared.FullDout(second.stage));
        } else {
          ptx::Arrive(shared.FullDout(second.stage));
        }
        __syncwarp();
      }
      rings.Advance();
    }
  }
}

}  // namespace cppool::kernels::cuda::sm90
