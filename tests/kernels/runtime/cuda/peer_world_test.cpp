// Tests of the transport `peer` on fake devices: matching of calls, and the parts of reductions, for every
// assignment of ranks to devices. Streams and events are tested on GPUs.
#include "kernels/runtime/cuda/peer_world.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/runtime/common/all_shapes.h"
#include "tests/kernels/runtime/cuda/fake_devices.h"

namespace cppool::kernels::cuda {
namespace {

using Numbers = std::vector<std::int32_t>;

std::int32_t Value(int rank, std::size_t i) {
  return static_cast<std::int32_t>((i * 7 + static_cast<std::size_t>(rank) * 13) % 1000);
}

void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("does not hold: " + what);
}

// The error of each rank's thread; "" if there is none. A rank that throws aborts the world.
std::vector<std::string> OnAllRanks(PeerWorld& world, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(world.size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back([&, rank] {
      test::UseDevice(world.device(rank));
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
        world.Abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

struct Buffers {
  Numbers in, out;
};

// Makes every call on one group, for one rank, and checks the results.
void UseGroup(PeerWorld& world, int rank, GroupShape shape, std::size_t count, Buffers& buffers) {
  CommGroup group = world.group(rank, shape);
  if (!group.comm) group = world.MakeGroup(rank, shape);
  Expect(group.size == shape.size && group.rank == shape.Member(rank), "size and rank");
  const auto size = static_cast<std::size_t>(group.size), mine = static_cast<std::size_t>(group.rank);
  const auto member = [&](std::size_t m) { return shape.WorldRank(rank, static_cast<int>(m)); };
  const auto sum = [&](std::size_t i) {
    std::int32_t all = 0;
    for (std::size_t m = 0; m < size; ++m) all += Value(member(m), i);
    return all;
  };
  const auto check = [&](const Numbers& got, std::size_t length, auto expected, const std::string& what) {
    for (std::size_t i = 0; i < length; ++i) {
      if (got[i] != expected(i))
        throw std::runtime_error(what + ": element " + std::to_string(i) + " of " + std::to_string(length));
    }
  };
  Numbers& in = buffers.in;
  Numbers& out = buffers.out;
  const auto fill = [&] {
    for (std::size_t i = 0; i < count * size; ++i) in[i] = Value(rank, i);
    std::fill(out.begin(), out.end(), -1);
  };
  fill();
  world.Collect(rank, {Collective::kReduceScatter, CPPOOL_INT32, CPPOOL_SUM, count, in.data(), out.data()},
                group.comm, nullptr);
  check(
      out, count, [&](std::size_t i) { return sum(mine * count + i); }, "reduce_scatter");
  Expect(out[count] == -1, "nothing is written after the result");
  world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, count, in.data(), out.data()},
                group.comm, nullptr);
  check(out, count, sum, "all_reduce");
  world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, count * size, in.data(), in.data()},
                group.comm, nullptr);
  check(in, count * size, sum, "all_reduce in place");
  fill();
  world.Collect(
      rank, {Collective::kAllGather, CPPOOL_UINT8, CPPOOL_SUM, count * sizeof in[0], in.data(), out.data()},
      group.comm, nullptr);
  check(
      out, count * size, [&](std::size_t i) { return Value(member(i / count), i % count); }, "all_gather");
  std::fill(out.begin(), out.end(), -1);
  world.GroupStart(rank);
  for (std::size_t m = 0; m < size; ++m) {
    const int peer = static_cast<int>(m);
    world.Send(rank, in.data() + m * count, count * sizeof in[0], peer, group.comm, nullptr);
    world.Recv(rank, out.data() + m * count, count * sizeof in[0], peer, group.comm, nullptr);
  }
  world.GroupEnd(rank);
  check(
      out, count * size, [&](std::size_t i) { return Value(member(i / count), mine * count + i % count); },
      "all to all");
}

}  // namespace

TEST_CASE("peer: every call works for every assignment of ranks to devices, before and after an abort") {
  for (const int size : {1, 2, 3, 4, 6, 8}) {
    for (int devices = 1; devices <= size; ++devices) {
      CAPTURE(size, devices);
      // The parts of the last count are copied in several pieces.
      const bool long_parts = devices == 2 && size < 4;
      const std::vector<std::size_t> counts = {0, 1, 33, 5000, std::size_t{long_parts ? 2'100'003u : 64u}};
      PeerWorld world(size, devices);
      std::vector<Buffers> buffers(static_cast<std::size_t>(size));
      for (int rank = 0; rank < size; ++rank) {
        Buffers& mine = buffers[static_cast<std::size_t>(rank)];
        for (Numbers* numbers : {&mine.in, &mine.out}) {
          numbers->resize((std::max<std::size_t>(counts.back(), 5000) + 1) * static_cast<std::size_t>(size));
          test::Place(numbers->data(), numbers->size() * sizeof(std::int32_t), world.device(rank));
        }
      }
      for (int round = 0; round < 2; ++round) {
        const auto worked = OnAllRanks(world, [&](int rank) {
          if (round == 0) world.JoinWorld(rank);
          for (const std::size_t count : counts) {
            for (const GroupShape shape : UsualShapes(size))
              UseGroup(world, rank, shape, count, buffers[static_cast<std::size_t>(rank)]);
          }
          for (const GroupShape shape : test::AllShapes(size))
            UseGroup(world, rank, shape, 33, buffers[static_cast<std::size_t>(rank)]);
        });
        CHECK(worked == std::vector<std::string>(static_cast<std::size_t>(size)));
        const auto aborted = OnAllRanks(world, [&](int rank) {
          if (rank == 0) throw std::runtime_error("stays away");
          std::int32_t one = 1;
          world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, 1, &one, &one},
                        world.group(rank, GroupShape{size, 1}).comm, nullptr);
        });
        for (int rank = 0; rank < size; ++rank) {
          CHECK(aborted[static_cast<std::size_t>(rank)] ==
                (rank == 0 ? "stays away" : "the world was aborted: stays away"));
        }
        world.Restart();
      }
      for (int rank = 0; rank < size; ++rank) world.Leave(rank);
      test::Forget();
    }
  }
}

TEST_CASE("peer: a failed call fails its case at the end, and does not affect the next case") {
  PeerWorld world(2, 1);
  Numbers first(4, 111), second(4, 222), received(4, -1);
  for (Numbers* numbers : {&first, &second, &received})
    test::Place(numbers->data(), numbers->size() * sizeof(std::int32_t), 0);
  const auto comm = [&](int rank) { return world.group(rank, GroupShape{2, 1}).comm; };
  auto errors = OnAllRanks(world, [&](int rank) {
    world.JoinWorld(rank);
    world.BeginCase(rank);
    if (rank == 1) return world.Finished(rank);  // without a recv
    const auto send = [&] { world.Send(0, first.data(), 16, 1, comm(0), nullptr); };
    const auto error_of = [](auto call) -> std::string {
      try {
        call();
      } catch (const RuntimeError& error) {
        return error.what();
      }
      return "";
    };
    const std::string failure = error_of(send);
    Expect(failure.find("rank 1 has finished the case") == 0, failure);
    Expect(error_of([&] { world.CheckCase(0); }) == failure, "CheckCase reports the ignored failure");
  });
  CHECK(errors == std::vector<std::string>(2));
  world.Restart();
  errors = OnAllRanks(world, [&](int rank) {
    world.BeginCase(rank);
    if (rank == 0) world.Send(0, second.data(), 16, 1, comm(0), nullptr);
    if (rank == 1) world.Recv(1, received.data(), 16, 0, comm(1), nullptr);
    world.CheckCase(rank);
  });
  CHECK(errors == std::vector<std::string>(2));
  CHECK(received == second);
  for (int rank = 0; rank < 2; ++rank) world.Leave(rank);
  test::Forget();
}

TEST_CASE("peer: Waiting reports the call and the ranks that a thread waits for") {
  const int size = 4;
  PeerWorld world(size, 2);
  std::vector<WaitingCall> of_collective, of_recv;
  const auto waiting = [&](int rank, std::size_t awaits) {
    std::vector<WaitingCall> seen;
    for (int i = 0; i < 10000; ++i) {
      seen = world.Waiting(rank);
      if (seen.size() == 1 && seen[0].awaits.size() == awaits) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return seen;
  };
  std::vector<Numbers> numbers(size, Numbers(16));
  for (int rank = 0; rank < size; ++rank) {
    test::Place(numbers[static_cast<std::size_t>(rank)].data(), 16 * sizeof(std::int32_t),
                world.device(rank));
  }
  const auto errors = OnAllRanks(world, [&](int rank) {
    world.JoinWorld(rank);
    const CommGroup all = world.group(rank, GroupShape{4, 1}), stride = world.group(rank, GroupShape{2, 2});
    std::int32_t* mine = numbers[static_cast<std::size_t>(rank)].data();
    if (rank == 2) of_collective = waiting(1, 1);  // all ranks but this one have called
    world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, 4, mine, mine}, all.comm, nullptr);
    // Peers are numbered in the group, but reported as ranks of the world.
    if (rank == 3) of_recv = waiting(1, 1);
    if (rank == 1) world.Recv(rank, mine, 8, 1, stride.comm, nullptr);
    if (rank == 3) world.Send(rank, mine, 8, 0, stride.comm, nullptr);
    Expect(world.Waiting(rank).empty(), "no call waits any more");
  });
  CHECK(errors == std::vector<std::string>(static_cast<std::size_t>(size)));
  REQUIRE(of_collective.size() == 1);
  CHECK(of_collective[0].doing.find("all_reduce") != std::string::npos);
  CHECK(of_collective[0].awaits == std::vector<int>{2});
  REQUIRE(of_recv.size() == 1);
  CHECK(of_recv[0].doing == "waiting for recv of 8 bytes from rank 3");
  CHECK(of_recv[0].awaits == std::vector<int>{3});
  for (int rank = 0; rank < size; ++rank) world.Leave(rank);
  test::Forget();
}

TEST_CASE("peer: ranks wait for each other before they make communicators of a new shape") {
  const int size = 8;
  PeerWorld world(size, 2);
  const GroupShape shape{4, 1};
  std::vector<Numbers> numbers(size, Numbers(16));
  for (int rank = 0; rank < size; ++rank) {
    test::Place(numbers[static_cast<std::size_t>(rank)].data(), 16 * sizeof(std::int32_t),
                world.device(rank));
  }
  GroupMeeting::Wait wait;
  auto errors = OnAllRanks(world, [&](int rank) {
    world.JoinWorld(rank);
    Expect(!world.group(rank, shape).comm, "the group is not made with the world");
    if (rank == 6) {
      for (int i = 0; i < 10000 && wait.awaits != std::vector<int>{6}; ++i) {
        wait = world.WaitingForGroup(2).value_or(GroupMeeting::Wait{});
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    const CommGroup made = world.MakeGroup(rank, shape);
    Expect(world.group(rank, shape).comm == made.comm && world.group(rank, made.comm).shape == shape,
           "the group is kept");
    Expect(world.shapes(rank).size() == 4 && world.shapes(rank)[0] == GroupShape{size, 1},
           "the world is the first shape");
    std::int32_t* mine = numbers[static_cast<std::size_t>(rank)].data();
    // One rank calls with another count: the error names the ranks of the world.
    try {
      world.Collect(rank,
                    {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM,
                     static_cast<std::size_t>(rank == 5 ? 2 : 1), mine, mine},
                    made.comm, nullptr);
      Expect(rank < 4, "the call fails in the group with different counts");
    } catch (const RuntimeError& error) {
      Expect(std::string(error.what()) ==
                 "the ranks disagree in call 0 on the communicator of ranks 4, 5, 6 and 7: rank 4 called "
                 "all_reduce (sum) of 1 int32, rank 5 all_reduce (sum) of 2 int32",
             error.what());
    }
  });
  CHECK(errors == std::vector<std::string>(size));
  CHECK(wait.doing == "waiting for rank 6 in group_of(4, 1)");
  world.Restart();

  // The error names a rank that has finished or is missing. The next case makes the communicators.
  const GroupShape next{2, 4};
  errors = OnAllRanks(world, [&](int rank) {
    world.BeginCase(rank);
    if (rank == 3) return world.Finished(rank);
    try {
      world.MakeGroup(rank, next);
    } catch (const RuntimeError& error) {
      Expect(error.culprit() == 3, error.what());
      return;
    }
    Expect(false, "MakeGroup fails without rank 3");
  });
  CHECK(errors == std::vector<std::string>(size));
  world.Restart();
  errors = OnAllRanks(world, [&](int rank) {
    world.BeginCase(rank);
    if (rank == 3) throw std::runtime_error("stays away");
    world.MakeGroup(rank, next);
  });
  for (int rank = 0; rank < size; ++rank) {
    CHECK(errors[static_cast<std::size_t>(rank)] ==
          (rank == 3 ? "stays away" : "the world was aborted: stays away"));
  }
  world.Restart();
  errors = OnAllRanks(world, [&](int rank) {
    world.BeginCase(rank);
    const CommGroup group = world.MakeGroup(rank, next);
    std::int32_t* mine = numbers[static_cast<std::size_t>(rank)].data();
    *mine = rank;
    world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, 1, mine, mine}, group.comm,
                  nullptr);
    Expect(*mine == rank % 4 + rank % 4 + 4, "the sum over both members");
  });
  CHECK(errors == std::vector<std::string>(size));
  for (int rank = 0; rank < size; ++rank) world.Leave(rank);
  test::Forget();
}

// Every rank sends two of four rows of bytes to the next one, for three passes, and nothing in between.
TEST_CASE("ring transfers bring rows to the receiver's memory, and then the pass to its flag") {
  constexpr int kSize = 3;
  constexpr std::size_t kPitch = 8, kRows = 4, kBytes = kPitch * kRows;
  PeerWorld world(kSize, kSize);
  CHECK(world.WhyNoRing() == std::nullopt);
  CHECK(PeerWorld(kSize, 2).WhyNoRing() == "several ranks share a GPU");
  const std::vector<std::string> errors = OnAllRanks(world, [&](int rank) {
    world.JoinWorld(rank);
    const CommGroup group = world.group(rank, GroupShape{kSize, 1});
    const int next = (rank + 1) % kSize, before = (rank + kSize - 1) % kSize;
    for (std::uint32_t pass = 1; pass <= 3; ++pass) {
      const auto value = [&](int of, std::size_t i) {
        return std::byte(static_cast<std::size_t>(of) * 64 + pass * 16 + i % 16);
      };
      std::vector<std::byte> keys(kBytes), values(kBytes), into(4 * kBytes);
      for (std::size_t i = 0; i < kBytes; ++i) keys[i] = value(rank, i), values[i] = value(rank, i + 5);
      RingTransfers transfers;
      transfers.into = {into.data(), into.data() + 2 * kBytes};
      RingPiece piece;
      piece.to = next;
      piece.flag = 7;
      piece.parts = {RingPiece::Rows{keys.data() + 2, 0, kBytes + 2, kPitch, 3, kRows},
                     RingPiece::Rows{values.data(), 1, kBytes, kPitch, 2, kRows}};
      piece.stage = "piece";
      transfers.leaving = {piece};
      transfers.arriving.assign(8, {before, "heads"});
      std::vector<std::string> calls;
      const RingHooks hooks{[&](const RingPiece& sent) { calls.push_back(sent.stage); },
                            [&] { calls.push_back("end"); }};
      const Arrivals arrivals = world.StartRing(rank, transfers, group.comm, nullptr, nullptr, hooks);
      Expect(calls == std::vector<std::string>{"piece", "end"}, "the hooks around the piece");
      Expect(arrivals.pass == pass, "passes count on");
      std::int32_t sum = 1;  // all have sent: the fake streams do their work at once
      world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, 1, &sum, &sum}, group.comm,
                    nullptr);
      for (std::size_t i = 0; i < 8; ++i)
        Expect((arrivals.flags[i] == pass) == (i == 7), "the piece's flag alone");
      for (std::size_t i = 0; i < 4 * kBytes; ++i) {
        const std::size_t in_row = i % kPitch, at = i % kBytes;
        const bool key = i / kBytes == 1 && in_row >= 2 && in_row < 5,
                   of_values = i / kBytes == 3 && in_row < 2;
        const std::byte wanted = key ? value(before, at) : of_values ? value(before, at + 5) : std::byte{0};
        Expect(into[i] == wanted, "byte " + std::to_string(i));
      }
    }
  });
  CHECK(errors == std::vector<std::string>(kSize));
  for (int rank = 0; rank < kSize; ++rank) world.Leave(rank);
}

TEST_CASE(
    "a kernel that waits for a piece is named, ends with an abort, and fails its case when it is late") {
  PeerWorld world(2, 2);
  RingControl* control = nullptr;
  std::vector<WaitingCall> waiting;
  bool aborted_before = true;
  std::binary_semaphore rank_1_has_started(0);
  std::vector<std::string> errors = OnAllRanks(world, [&](int rank) {
    world.JoinWorld(rank);
    world.BeginCase(rank);
    RingTransfers transfers;
    transfers.arriving = {{1 - rank, "heads 0 to 3 of keys and values"},
                          {1 - rank, "heads 4 to 7 of keys and values"}};
    const Arrivals arrivals =
        world.StartRing(rank, transfers, world.group(rank, GroupShape{2, 1}).comm, nullptr, nullptr, {});
    if (rank == 1) return rank_1_has_started.release();
    control = arrivals.control;
    Expect(world.Waiting(0).empty(), "no piece is waited for");
    control->awaited = 2;
    waiting = world.Waiting(0);
    control->awaited = 0;
    aborted_before = control->aborted != 0;
    world.CheckCase(0);
    // The error below ends every call of the world, rank 1's start, too.
    Expect(rank_1_has_started.try_acquire_for(std::chrono::seconds(60)), "rank 1 has started");
    control->late = 1;
    world.CheckCase(0);
  });
  CHECK(errors == std::vector<std::string>{
                      "a kernel has waited 60 s for heads 0 to 3 of keys and values from rank 1", ""});
  REQUIRE(waiting.size() == 1);
  CHECK(waiting[0].doing == "waiting for heads 4 to 7 of keys and values from rank 1");
  CHECK(waiting[0].awaits == std::vector<int>{1});
  CHECK_FALSE(aborted_before);
  CHECK(control->aborted);  // by the error of rank 0
  world.Restart();
  CHECK_FALSE(control->aborted);
  world.BeginCase(0);
  world.CheckCase(0);
  errors = OnAllRanks(world, [&](int rank) {
    world.BeginCase(rank);
    const auto comm = world.group(rank, GroupShape{2, 1}).comm;
    std::int32_t number = 1;
    if (rank == 0) world.StartRing(rank, {}, comm, nullptr, nullptr, {});
    if (rank == 1)
      world.Collect(rank, {Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, 1, &number, &number}, comm,
                    nullptr);
  });
  for (const std::string& error : errors)
    CHECK(error.find("rank 0 called ring transfers, rank 1 all_reduce (sum) of 1 int32") !=
          std::string::npos);
  for (int rank = 0; rank < 2; ++rank) world.Leave(rank);
}

}  // namespace cppool::kernels::cuda
