// Tests of transposed payloads: where each token of a layout is, and that nothing else is beside it.
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/attention/problem/transposed.h"
#include "kernels/attention/tensor_ops/host/tensor_ops.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/host/host_rank.h"

namespace {

using namespace cppool::kernels;
using cppool::test::HostRank;

// Where 8-bit products read token u of 16 (the fragments of wgmma): registers of an accumulator hold columns
// 2t, 2t+1, 8+2t, 8+2t+1 of thread t, those of a left operand 4t .. 4t+3.
int SlotOfToken(int u) { return u % 8 / 2 * 4 + u / 8 * 2 + u % 2; }

}  // namespace

TEST_CASE(
    "a transposed payload has each run's tokens from a slot tile on, permuted by 16, and zeros behind them") {
  // Two runs of the first sequence, the second of two segments that continue each other; rows are 2 apart.
  const Layout layout{{{0, 5, 70, 0}, {0, 90, 20, 200}, {0, 110, 3, 240}, {1, 0, 17, 1}}, 260, 2};
  constexpr int kHeads = 2, kDim = 64;
  std::mt19937 random(1);
  std::vector<std::uint8_t> payload(260 * kHeads * kDim);
  for (std::uint8_t& each : payload) each = static_cast<std::uint8_t>(random());
  const std::int64_t slots = SlotsOf(layout);
  struct Run {
    std::int64_t row, length, slot;
  };
  const Run runs[] = {{0, 70, 0}, {200, 23, 256}, {1, 17, 448}};
  REQUIRE(slots == 640);
  std::vector<std::uint8_t> want(static_cast<std::size_t>(slots * kHeads * kDim), 0), got(want.size(), 0xFF);
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < run.length; ++i) {
      const std::int64_t slot = run.slot + i / 16 * 16 + SlotOfToken(static_cast<int>(i % 16));
      for (std::int64_t line = 0; line < kHeads * kDim; ++line)
        want[static_cast<std::size_t>(line * slots + slot)] =
            payload[static_cast<std::size_t>((run.row + i * 2) * kHeads * kDim + line)];
    }
  }
  const HostRank rank;
  const auto ops = host::MakeTensorOps(rank.seam());
  const auto tiles = ops->fp8().Slots(layout, rank.stream());
  ops->fp8().Transpose(*tiles, kHeads, kDim, {payload.data(), Dtype::kE4M3}, got.data(), rank.stream());
  rank.Synchronize();
  CHECK(got == want);
  // A block of 128 slots from a token at a multiple of 16 on holds nothing of the next run.
  for (std::int64_t tokens = 1; tokens < 300; ++tokens)
    CHECK((tokens - 1) / 16 * 16 + 128 <= SlotsOfRun(tokens));
}
