// Ring transfers on the host runtime: every piece of every pass comes to its place before its wait returns,
// and a rank that waits in vain is told what it waits for.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/ring_transfers.h"
#include "kernels/runtime.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Require;
using cppool::test::Sync;
using cppool::test::World;

namespace {

constexpr std::size_t kPitch = 64, kRows = 32, kHeads = 4, kWidth = kPitch / kHeads;

// Each rank sends each head of its block, a piece each, to every other rank, the first heads first. The block
// of the rank `distance` before one is in its slot `distance - 1`.
RingTransfers HeadByHead(const Group& group, std::byte* own, std::byte* slots) {
  RingTransfers transfers;
  transfers.into = {slots, nullptr};
  for (std::size_t head = 0; head < kHeads; ++head) {
    for (int distance = 1; distance < group.size; ++distance) {
      const auto slot = static_cast<std::size_t>(distance - 1);
      RingPiece piece;
      piece.to = (group.rank + distance) % group.size;
      piece.flag = transfers.arriving.size();
      piece.parts[0] = {own + head * kWidth, 0, slot * kPitch * kRows + head * kWidth, kPitch, kWidth, kRows};
      piece.stage = "pieces";
      transfers.leaving.push_back(piece);
      transfers.arriving.push_back({(group.rank + group.size - distance) % group.size, "head"});
    }
  }
  return transfers;
}

std::byte ValueOf(int rank, int pass, std::size_t i) {
  return std::byte(static_cast<std::size_t>(rank * 50 + pass * 13) + i % 7);
}

}  // namespace

TEST_CASE("ring transfers bring every piece of every pass before its wait returns") {
  const int size = GENERATE(2, 4, 8);
  World world(size);
  world.Case([&](cppool_runtime* rt) {
    Require(!WhyNoRing(rt), "there is a ring");
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    const Stream comm(rt);
    Event filled(rt), sent(rt);
    const auto others = static_cast<std::size_t>(size - 1);
    std::vector<std::byte> own(kPitch * kRows), slots(others * own.size());
    for (int pass = 0; pass < 10; ++pass) {
      Enqueue(rt, rt->stream, [&, rank = rt->rank, pass] {
        for (std::size_t i = 0; i < own.size(); ++i) own[i] = ValueOf(rank, pass, i);
      });
      filled.Record(rt->stream);
      filled.Wait(comm.get());
      RingTransfers transfers = HeadByHead(group, own.data(), slots.data());
      const auto arriving = transfers.arriving;
      const Arrivals arrivals = StartRing(rt, std::move(transfers), group.comm, comm.get());
      Enqueue(rt, rt->stream, [&, pass, arriving, arrivals] {
        for (std::size_t piece = arriving.size(); piece-- > 0;) {  // not in their order
          arrivals.await(piece);
          const std::size_t slot = piece % others, head = piece / others;
          for (std::size_t i = 0; i < own.size(); ++i) {
            if (i % kPitch / kWidth == head)
              Require(slots[slot * own.size() + i] == ValueOf(arriving[piece].from, pass, i),
                      "a byte of a piece");
          }
        }
      });
      sent.Record(comm.get());
      sent.Wait(rt->stream);  // `own` is filled again
    }
    Sync(rt);
  });
}

TEST_CASE("a rank that waits for a piece is told which and whose, and an abort ends its wait") {
  World world(2);
  std::string doing;
  const std::vector<std::string> errors = world.CaseErrors([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    RingTransfers transfers;
    transfers.arriving = {{1 - rt->rank, "heads 0 to 3 of keys and values"}};
    const Arrivals arrivals = StartRing(rt, std::move(transfers), group.comm, rt->stream);
    if (rt->rank == 1) {  // sends nothing
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (doing.empty() && std::chrono::steady_clock::now() < until) {
        doing = world.rank(0).Progress().at(0).doing;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      throw RuntimeError(CPPOOL_INTERNAL, "sends nothing");
    }
    Enqueue(rt, rt->stream, [arrivals] { arrivals.await(0); });
    Sync(rt);
  });
  CHECK(doing == "waiting for heads 0 to 3 of keys and values from rank 1");
  CHECK(errors.at(1) == "sends nothing");
  CHECK(errors.at(0).find("sends nothing") != std::string::npos);
}

TEST_CASE("a rank that finishes without a piece ends the wait for it") {
  World world(2);
  const std::vector<std::string> errors = world.CaseErrors([&](cppool_runtime* rt) {
    RingTransfers transfers;
    transfers.arriving = {{1 - rt->rank, "head 0 of keys and values"}};
    const Arrivals arrivals =
        StartRing(rt, std::move(transfers), GetGroup(rt, CPPOOL_WORLD).comm, rt->stream);
    if (rt->rank == 0) Enqueue(rt, rt->stream, [arrivals] { arrivals.await(0); });
    Sync(rt);
    if (rt->rank == 1) world.backend().Finished(1);
  });
  CHECK(
      errors.at(0) ==
      "rank 1 has finished the case, and rank 0 is still waiting for head 0 of keys and values from rank 1");
}
