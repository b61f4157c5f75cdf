// Tests of communication: the results of every call at every world size, and its errors.
#include <cmath>
#include <cstring>
#include <latch>

#include "kernels/backend.h"
#include "kernels/numerics/half.h"
#include "kernels/runtime/host/comm.h"
#include "kernels/runtime/host/world.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Require;
using cppool::test::Sync;
using cppool::test::World;

namespace {

// Element i of the input of `rank`: different for every rank, and exact in every type used.
std::int32_t ValueOf(int rank, std::size_t i) {
  return static_cast<std::int32_t>(rank * 100000 + static_cast<int>(i % 5003));
}

std::vector<std::int32_t> InputOf(int rank, std::size_t count) {
  std::vector<std::int32_t> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = ValueOf(rank, i);
  return values;
}

}  // namespace

TEST_CASE("host collectives: results are right at every world size, in place and not") {
  const int size = GENERATE(1, 2, 3, 4, 6, 8);
  const std::size_t count = GENERATE(std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{70001});
  World world(size);
  for (int round = 0; round < 3; ++round) {
    world.Case([&](cppool_runtime* rt) {
      const Group group = GetGroup(rt, CPPOOL_WORLD);
      const auto n = static_cast<std::size_t>(size);
      const auto me = static_cast<std::size_t>(rt->rank);

      const auto input = InputOf(rt->rank, count);
      std::vector<std::int32_t> gathered(n * count, -1), in_place(n * count, -1);
      std::copy(input.begin(), input.end(), in_place.begin() + static_cast<std::ptrdiff_t>(me * count));
      Check(rt, rt->all_gather(rt, input.data(), gathered.data(), 4 * count, group.comm, rt->stream));
      Check(rt, rt->all_gather(rt, in_place.data() + me * count, in_place.data(), 4 * count, group.comm,
                               rt->stream));

      const auto wide = InputOf(rt->rank, n * count);
      std::vector<std::int32_t> part(count, -1), part_in_place = wide;
      Check(rt, rt->reduce_scatter(rt, wide.data(), part.data(), count, CPPOOL_INT32, CPPOOL_SUM, group.comm,
                                   rt->stream));
      Check(rt, rt->reduce_scatter(rt, part_in_place.data(), part_in_place.data() + me * count, count,
                                   CPPOOL_INT32, CPPOOL_MAX, group.comm, rt->stream));

      std::vector<std::int32_t> sum(count, -1), max = input;
      Check(rt, rt->all_reduce(rt, input.data(), sum.data(), count, CPPOOL_INT32, CPPOOL_SUM, group.comm,
                               rt->stream));
      Check(rt, rt->all_reduce(rt, max.data(), max.data(), count, CPPOOL_INT32, CPPOOL_MAX, group.comm,
                               rt->stream));
      Sync(rt);

      for (std::size_t i = 0; i < count; ++i) {
        std::int32_t expected_sum = 0, expected_part = 0;
        for (int r = 0; r < size; ++r) {
          expected_sum += ValueOf(r, i);
          expected_part += ValueOf(r, me * count + i);
          Require(gathered[static_cast<std::size_t>(r) * count + i] == ValueOf(r, i), "all_gather");
        }
        Require(sum[i] == expected_sum, "all_reduce sum");
        Require(max[i] == ValueOf(size - 1, i), "all_reduce max, in place");
        Require(part[i] == expected_part, "reduce_scatter sum");
        Require(part_in_place[me * count + i] == ValueOf(size - 1, me * count + i),
                "reduce_scatter max, in place");
      }
      Require(in_place == gathered, "all_gather, in place");
      Require(input == InputOf(rt->rank, count), "the input was changed");
    });
  }
}

TEST_CASE("host collectives: every type is summed in the order of the ranks") {
  const int size = GENERATE(1, 2, 4, 8);
  World world(size);
  world.Case([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    const auto run = [&]<typename T>(cppool_dtype dtype, cppool_reduce reduce, T mine) {
      std::vector<T> data(300, mine);
      Check(rt,
            rt->all_reduce(rt, data.data(), data.data(), data.size(), dtype, reduce, group.comm, rt->stream));
      Sync(rt);
      for (const T& value : data)
        Require(
            std::memcmp(&value, &data[0], sizeof(T)) == 0,  // NOLINT(bugprone-suspicious-memory-comparison)
            "elements differ");
      return data[0];
    };
    const int r = rt->rank;
    // 0.1f is not exact, so the result depends on the order of the sum.
    float f = 0.1f;
    double d = 0.1;
    // 2048 + 1 in fp16 and 256 + 1 in bf16 are not representable; the sum in fp32 is exact.
    float half = 2049, brain = 257;
    for (int i = 1; i < size; ++i)
      f += 0.1f * static_cast<float>(i + 1), d += 0.1 * (i + 1), half += 1, brain += 1;
    Require(run(CPPOOL_FLOAT32, CPPOOL_SUM, 0.1f * static_cast<float>(r + 1)) == f, "float32");
    Require(run(CPPOOL_FLOAT64, CPPOOL_SUM, 0.1 * (r + 1)) == d, "float64");
    Require(run(CPPOOL_INT64, CPPOOL_SUM, std::int64_t{1} << 40) == (std::int64_t{1} << 40) * size, "int64");
    Require(run(CPPOOL_INT32, CPPOOL_MAX, -5 - r) == -5, "int32 max");
    Require(run(CPPOOL_UINT8, CPPOOL_SUM, std::uint8_t{200}) == static_cast<std::uint8_t>(200 * size),
            "uint8 wraps");
    Require(run(CPPOOL_FLOAT32, CPPOOL_MAX, static_cast<float>(-r)) == 0, "float32 max");
    Require(std::isnan(run(CPPOOL_FLOAT32, CPPOOL_MAX, r == size - 1 ? NAN : 1.f)), "NaN wins");
    if (size > 1) {
      const auto fp16 = [&](cppool_reduce reduce, float mine) {
        return FP16ToFloat(run(CPPOOL_FLOAT16, reduce, FloatToFP16(mine)));
      };
      const auto bf16 = [&](cppool_reduce reduce, float mine) {
        return BF16ToFloat(run(CPPOOL_BFLOAT16, reduce, FloatToBF16(mine)));
      };
      // Summed in the type itself, every 1 would be lost.
      Require(fp16(CPPOOL_SUM, r == 0 ? 2048.f : 1.f) == FP16ToFloat(FloatToFP16(half - 1)), "float16 sum");
      Require(bf16(CPPOOL_SUM, r == 0 ? 256.f : 1.f) == BF16ToFloat(FloatToBF16(brain - 1)), "bfloat16 sum");
      Require(fp16(CPPOOL_MAX, static_cast<float>(r)) == static_cast<float>(size - 1), "float16 max");
      Require(bf16(CPPOOL_MAX, static_cast<float>(-r)) == 0, "bfloat16 max");
      if (size > 2) Require(fp16(CPPOOL_SUM, r == 0 ? 2048.f : 1.f) > 2048, "float16 sums in fp32");
    }
  });
}

TEST_CASE("host send and recv: a ring of many steps, with buffers that are reused after each step") {
  const int size = GENERATE(1, 2, 3, 4, 6, 8);
  World world(size);
  world.Case([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    const int next = (rt->rank + 1) % size, previous = (rt->rank + size - 1) % size;
    constexpr std::size_t kCount = 3000;
    std::vector<std::int32_t> block = InputOf(rt->rank, kCount), incoming(kCount, -1);
    for (int step = 0; step < 3 * size; ++step) {
      GroupedCalls grouped(rt);
      // Half of the ranks call recv first.
      if (rt->rank % 2)
        Check(rt, rt->recv(rt, incoming.data(), 4 * kCount, previous, group.comm, rt->stream));
      Check(rt, rt->send(rt, block.data(), 4 * kCount, next, group.comm, rt->stream));
      if (rt->rank % 2 == 0)
        Check(rt, rt->recv(rt, incoming.data(), 4 * kCount, previous, group.comm, rt->stream));
      grouped.End();
      Enqueue(rt, rt->stream, [&, step] {
        Require(incoming == InputOf((rt->rank + (step + 1) * (size - 1)) % size, kCount),
                "step " + std::to_string(step));
        block = incoming;
        std::fill(incoming.begin(), incoming.end(), -1);
      });
    }
    Sync(rt);
  });
}

TEST_CASE("host send and recv: messages of a pair of ranks keep their order, including one of zero bytes") {
  World world(2);
  world.Case([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    std::vector<std::vector<std::int32_t>> data;
    for (std::size_t i = 0; i < 50; ++i)
      data.push_back(rt->rank == 0 ? InputOf(static_cast<int>(i), i * 7) : std::vector<std::int32_t>(i * 7));
    for (std::size_t i = 0; i < 50; ++i) {
      if (rt->rank == 0) Check(rt, rt->send(rt, data[i].data(), 28 * i, 1, group.comm, rt->stream));
      if (rt->rank == 1) Check(rt, rt->recv(rt, data[i].data(), 28 * i, 0, group.comm, rt->stream));
    }
    Sync(rt);
    for (std::size_t i = 0; i < 50; ++i)
      Require(data[i] == InputOf(static_cast<int>(i), i * 7), "message " + std::to_string(i));
  });
}

TEST_CASE("host groups of calls: an all-to-all of many messages ends for any order of the calls") {
  const int size = GENERATE(1, 2, 4, 8);
  World world(size);
  world.Case([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    constexpr int kMessages = 20;  // more than a channel holds; each rank calls send for all of them first
    std::vector<std::int32_t> out, in(static_cast<std::size_t>(size * kMessages), -1);
    for (int peer = 0; peer < size; ++peer) {
      for (int m = 0; m < kMessages; ++m) out.push_back(rt->rank * 10000 + peer * 100 + m);
    }
    Check(rt, rt->group_start(rt));
    Check(rt, rt->group_start(rt));  // nesting is allowed
    for (int i = 0; i < size * kMessages; ++i) {
      Check(rt, rt->send(rt, &out[static_cast<std::size_t>(i)], 4, i / kMessages, group.comm, rt->stream));
    }
    Check(rt, rt->group_end(rt));
    for (int i = size * kMessages - 1; i >= 0; --i) {
      // Receives from the last peer to the first; the messages of each peer in order.
      const int peer = i / kMessages, m = kMessages - 1 - i % kMessages;
      Check(rt, rt->recv(rt, &in[static_cast<std::size_t>(peer * kMessages + m)], 4, peer, group.comm,
                         rt->stream));
    }
    Check(rt, rt->group_end(rt));
    Sync(rt);
    for (int i = 0; i < size * kMessages; ++i) {
      Require(in[static_cast<std::size_t>(i)] == i / kMessages * 10000 + rt->rank * 100 + i % kMessages,
              "message " + std::to_string(i));
    }
  });
}

TEST_CASE("host communicators: several are used at the same time on several streams") {
  const int size = GENERATE(4, 6, 8);
  World world(size);
  world.Case([&](cppool_runtime* rt) {
    const Group all = GetGroup(rt, CPPOOL_WORLD), pair = GetGroup(rt, CPPOOL_PAIR),
                stride = GetGroup(rt, CPPOOL_STRIDE);
    Stream a(rt), b(rt);
    constexpr int kRounds = 40;
    std::vector<std::int32_t> sums(3 * kRounds, rt->rank + 1), swapped(kRounds, -1);
    const std::int32_t mine = rt->rank;
    for (std::size_t i = 0; i < kRounds; ++i) {
      // One communicator on two streams alternately: calls are matched in the order of the calls.
      const cppool_stream world_stream = i % 2 ? rt->stream : a.get();
      Check(rt, rt->all_reduce(rt, &sums[i], &sums[i], 1, CPPOOL_INT32, CPPOOL_SUM, all.comm, world_stream));
      Check(rt, rt->all_reduce(rt, &sums[kRounds + i], &sums[kRounds + i], 1, CPPOOL_INT32, CPPOOL_SUM,
                               stride.comm, a.get()));
      Check(rt, rt->all_reduce(rt, &sums[2 * kRounds + i], &sums[2 * kRounds + i], 1, CPPOOL_INT32,
                               CPPOOL_MAX, pair.comm, b.get()));
      GroupedCalls grouped(rt);
      Check(rt, rt->send(rt, &mine, 4, 1 - pair.rank, pair.comm, b.get()));
      Check(rt, rt->recv(rt, &swapped[i], 4, 1 - pair.rank, pair.comm, b.get()));
      grouped.End();
    }
    for (cppool_stream stream : {rt->stream, a.get(), b.get()}) Sync(rt, stream);
    std::int32_t stride_sum = 0;
    for (int r = rt->rank % 2; r < size; r += 2) stride_sum += r + 1;
    for (std::size_t i = 0; i < kRounds; ++i) {
      Require(sums[i] == size * (size + 1) / 2, "world");
      Require(sums[kRounds + i] == stride_sum, "stride");
      Require(sums[2 * kRounds + i] == rt->rank / 2 * 2 + 2, "pair");
      Require(swapped[i] == (rt->rank ^ 1), "swap");
    }
  });
}

TEST_CASE("host world: 64 ranks work, 65 are refused") {
  World world(64);
  world.Case([&](cppool_runtime* rt) {
    const Group stride = GetGroup(rt, CPPOOL_STRIDE);
    std::int32_t sum = 1;
    Check(rt, rt->all_reduce(rt, &sum, &sum, 1, CPPOOL_INT32, CPPOOL_SUM, stride.comm, rt->stream));
    Sync(rt);
    Require(sum == 32, "sum");
  });
  CHECK(world.backend().InitTimes().size() == 2);
  CHECK(world.backend().Devices().size() == 64);
  CHECK_THROWS_WITH(CreateHostBackend(65), Catch::Matchers::ContainsSubstring("1 to 64 ranks, not 65"));
  CHECK_THROWS_AS(CreateHostBackend(0), RuntimeError);
}

// ---- errors

namespace {

void CheckNextCase(World& world) {
  CHECK_NOTHROW(world.Case([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    std::int32_t sum = rt->rank;
    Check(rt, rt->all_reduce(rt, &sum, &sum, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, rt->stream));
    std::int32_t got = -1;
    GroupedCalls grouped(rt);
    Check(rt, rt->send(rt, &rt->rank, 4, (rt->rank + 1) % rt->world_size, group.comm, rt->stream));
    Check(rt,
          rt->recv(rt, &got, 4, (rt->rank + rt->world_size - 1) % rt->world_size, group.comm, rt->stream));
    grouped.End();
    Sync(rt);
    Require(sum == rt->world_size * (rt->world_size - 1) / 2, "sum");
    Require(got == (rt->rank + rt->world_size - 1) % rt->world_size, "ring");
  }));
}

}  // namespace

TEST_CASE("host send and recv: different sizes are an error on both ranks that names both sizes") {
  const bool grouped = GENERATE(false, true);
  World world(2);
  for (int round = 0; round < 3; ++round) {
    std::vector<char> data(200, 'x');
    const auto errors = world.CaseErrors([&](cppool_runtime* rt) {
      const Group group = GetGroup(rt, CPPOOL_WORLD);
      if (grouped) Check(rt, rt->group_start(rt));
      if (rt->rank == 0) Check(rt, rt->send(rt, data.data(), 100, 1, group.comm, rt->stream));
      if (rt->rank == 1) Check(rt, rt->recv(rt, data.data() + 100, 96, 0, group.comm, rt->stream));
      if (grouped) Check(rt, rt->group_end(rt));
      Sync(rt);
    });
    CHECK_THAT(errors[0], Catch::Matchers::Equals("rank 0 sent 100 bytes to rank 1, which receives 96"));
    CHECK_THAT(errors[1], Catch::Matchers::Equals("rank 1 receives 96 bytes from rank 0, which sent 100"));
    CheckNextCase(world);
  }
}

TEST_CASE(
    "host collectives: different calls are an error on all ranks that names the calls and the culprit") {
  World world(4);
  std::atomic<int> blamed{0};
  std::latch all_know(4);
  const std::string call = GENERATE("count", "operation", "dtype", "reduction");
  std::vector<std::int32_t> data(4 * 32, 1);
  const auto errors = world.CaseErrors([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    std::int32_t* mine = &data[static_cast<std::size_t>(rt->rank) * 32];
    const bool other = rt->rank == 2;
    if (other && call == "operation") {
      Check(rt, rt->all_gather(rt, mine, mine, 2, group.comm, rt->stream));
    } else {
      Check(rt,
            rt->all_reduce(rt, mine, mine, other && call == "count" ? 7 : 8,
                           other && call == "dtype" ? CPPOOL_FLOAT32 : CPPOOL_INT32,
                           other && call == "reduction" ? CPPOOL_MAX : CPPOOL_SUM, group.comm, rt->stream));
    }
    const cppool_status status = rt->stream_synchronize(rt, rt->stream);
    if (rt->last_failure(rt)->culprit == (other ? RuntimeError::kOwn : 2)) ++blamed;
    all_know.arrive_and_wait();  // the first rank to fail aborts the others' calls
    Check(rt, status);
  });
  CHECK(blamed == 4);
  for (const std::string& error : errors) {
    CHECK_THAT(error,
               Catch::Matchers::ContainsSubstring("rank 0 called all_reduce (sum) of 8 int32, rank 2 "));
    if (call == "operation")
      CHECK_THAT(error, Catch::Matchers::ContainsSubstring("rank 2 all_gather of 2 bytes"));
    if (call == "count")
      CHECK_THAT(error, Catch::Matchers::ContainsSubstring("rank 2 all_reduce (sum) of 7 int32"));
    if (call == "dtype")
      CHECK_THAT(error, Catch::Matchers::ContainsSubstring("rank 2 all_reduce (sum) of 8 float32"));
    if (call == "reduction")
      CHECK_THAT(error, Catch::Matchers::ContainsSubstring("rank 2 all_reduce (max) of 8 int32"));
  }
  CHECK(data == std::vector<std::int32_t>(4 * 32, 1));
  CheckNextCase(world);
}

TEST_CASE("host send and recv: a peer outside of the group is an error of the call") {
  World world(2);
  world.Case([&](cppool_runtime* rt) {
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    int value = 0;
    Require(rt->send(rt, &value, 4, 2, group.comm, rt->stream) == CPPOOL_INTERNAL, "send");
    Require(std::string(rt->last_error(rt)) == "send names rank 2 of a group of 2", rt->last_error(rt));
    Require(rt->recv(rt, &value, 4, -1, group.comm, rt->stream) == CPPOOL_INTERNAL, "recv");
  });
}

TEST_CASE(
    "host abort: ranks that wait for a failed rank get an error with its reason, and the world recovers") {
  const int size = GENERATE(2, 4, 8);
  const int kind = GENERATE(0, 1, 2, 3, 4);
  World world(size);
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> behind{0};
    const auto errors = world.CaseErrors([&](cppool_runtime* rt) {
      const Group group = GetGroup(rt, CPPOOL_WORLD);
      Buffer buffer(rt, 4096 * static_cast<std::size_t>(size), rt->stream);
      Stream side(rt);
      Event event(rt);
      if (rt->rank == 1) {
        Enqueue(rt, side.get(), [] { throw RuntimeError(CPPOOL_INTERNAL, "the kernel of rank 1 broke"); });
        Sync(rt, side.get());
      }
      const int peer = rt->rank == 0 ? 1 : 0;
      switch (kind) {
        case 0:
          Check(rt, rt->all_gather(rt, buffer.at(4096 * static_cast<std::size_t>(rt->rank)), buffer.get(),
                                   4096, group.comm, side.get()));
          break;
        case 1:
          Check(rt, rt->recv(rt, buffer.get(), 4096, 1, group.comm, side.get()));
          break;
        case 2:
          Check(rt, rt->send(rt, buffer.get(), 4096, 1, group.comm, side.get()));
          break;
        case 3:
          Check(rt, rt->all_reduce(rt, buffer.get(), buffer.get(), 1024, CPPOOL_FLOAT32, CPPOOL_SUM,
                                   group.comm, side.get()));
          break;
        case 4: {
          GroupedCalls grouped(rt);
          Check(rt, rt->send(rt, buffer.get(), 4096, peer, group.comm, side.get()));
          Check(rt, rt->recv(rt, buffer.at(4096), 4096, 1, group.comm, side.get()));
          grouped.End();
        }
      }
      event.Record(side.get());
      event.Wait(rt->stream);
      Enqueue(rt, rt->stream, [&] { ++behind; });
      Sync(rt);
    });
    CHECK(errors[1] == "the kernel of rank 1 broke");
    for (int r = 0; r < size; ++r) {
      if (r != 1)
        CHECK_THAT(errors[static_cast<std::size_t>(r)],
                   Catch::Matchers::Equals("communication was aborted: the kernel of rank 1 broke"));
    }
    CHECK(behind == 0);
    for (int r = 0; r < size; ++r) CHECK(world.rank(r).Memory().held_bytes == 0);
    CheckNextCase(world);
  }
}

TEST_CASE(
    "host abort: no buffer is read or written after its rank has released it, whenever the abort happens") {
  World world(4);
  // Small calls end between two checks for an abort; large ones are running when the world is aborted.
  // Sanitizers report a read of a freed buffer.
  const std::size_t count = GENERATE(std::size_t{1024}, std::size_t{1} << 19);
  const bool large = count > 1024;
  for (int round = 0; round < (large ? 25 : 60); ++round) {
    std::atomic<int> calls{0};
    std::thread watchdog([&] {
      while (calls < (large ? 4 : round * 7)) std::this_thread::yield();
      if (large) std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
      world.backend().Abort("time is up");
    });
    const auto errors = world.Errors([&](cppool_runtime* rt) {
      world.rank(rt->rank).BeginCase();
      const Group group = GetGroup(rt, CPPOOL_WORLD), pair = GetGroup(rt, CPPOOL_PAIR);
      const std::size_t bytes = 4 * count, part = bytes / 4;
      Stream side(rt);
      std::string error;
      try {
        for (;;) {
          Buffer buffer(rt, bytes, rt->stream), other(rt, 2 * bytes, side.get());
          void* mine = buffer.at(part * static_cast<std::size_t>(rt->rank));
          Check(rt, rt->all_reduce(rt, buffer.get(), buffer.get(), count, CPPOOL_INT32, CPPOOL_SUM,
                                   group.comm, rt->stream));
          Check(rt, rt->all_gather(rt, mine, buffer.get(), part, group.comm, rt->stream));
          GroupedCalls grouped(rt);
          Check(rt, rt->send(rt, other.get(), bytes, 1 - pair.rank, pair.comm, side.get()));
          Check(rt, rt->recv(rt, other.at(bytes), bytes, 1 - pair.rank, pair.comm, side.get()));
          grouped.End();
          if (++calls % 2 == 0) Sync(rt), Sync(rt, side.get());
        }
      } catch (const std::exception& e) {
        error = e.what();
      }
      try {
        world.rank(rt->rank).EndCase();
      } catch (const std::exception&) {
      }
      throw std::runtime_error(error);
    });
    watchdog.join();
    for (const std::string& error : errors) CHECK(error == "communication was aborted: time is up");
    world.backend().Recover(std::chrono::seconds(30));
  }
  CheckNextCase(world);
}

TEST_CASE("host calls: a call can be withdrawn until another rank has accepted it") {
  host::HostWorld world(2);
  host::HostComm& comm = world.Comm({2, 1}, 0);
  std::int32_t a = 1, b = 2;
  const auto step = [](host::CommOp& op) {
    REQUIRE(op.Ready());
    return op.Step();
  };
  const auto reduce = [&](int rank, std::uint64_t position, std::int32_t* data) {
    CollectiveCall call{Collective::kAllReduce, CPPOOL_INT32, CPPOOL_SUM, 1, data, data};
    return host::MakeCollective(comm, rank, position, call);
  };
  SECTION("a collective that all ranks have joined is completed") {
    const auto mine = reduce(0, 0, &a), theirs = reduce(1, 0, &b);
    CHECK(mine->Withdraw());  // not joined yet
    CHECK_FALSE(step(*mine));
    CHECK_FALSE(mine->Ready());
    CHECK_FALSE(step(*theirs));
    CHECK_FALSE(mine->Withdraw());
    CHECK_FALSE(step(*mine));  // has reduced its share, which the other rank reads now
    CHECK_FALSE(mine->Withdraw());
    CHECK_FALSE(step(*theirs));
    CHECK_FALSE(step(*mine));  // has gathered; the other rank has not
    CHECK_FALSE(mine->Withdraw());
    CHECK_FALSE(mine->Ready());
    CHECK_FALSE(step(*theirs));
    CHECK(step(*mine));
    CHECK(step(*theirs));
    CHECK(a == 3);
    CHECK(b == 3);
  }
  SECTION("a collective that one rank has withdrawn from never starts") {
    const auto mine = reduce(0, 0, &a), theirs = reduce(1, 0, &b);
    CHECK_FALSE(step(*mine));
    CHECK(mine->Withdraw());
    CHECK_FALSE(step(*theirs));
    CHECK_FALSE(theirs->Ready());
    CHECK(theirs->Withdraw());
  }
  SECTION("a message that has been received cannot be withdrawn") {
    const auto sent = host::MakeSend(comm, 0, 1, 0, &a, 4), received = host::MakeRecv(comm, 1, 0, 0, &b, 4);
    CHECK(sent->Withdraw());
    CHECK_FALSE(step(*sent));
    CHECK(step(*received));
    CHECK_FALSE(sent->Withdraw());
    CHECK(step(*sent));
    CHECK(b == 1);
    const auto gone = host::MakeSend(comm, 0, 1, 1, &a, 4), waiting = host::MakeRecv(comm, 1, 0, 1, &b, 4);
    CHECK_FALSE(step(*gone));
    CHECK(waiting->Ready());
    CHECK(gone->Withdraw());
    CHECK_FALSE(waiting->Ready());
  }
}

TEST_CASE("host abort: later calls fail at once with the reason of the first abort") {
  World world(2);
  world.backend().Abort("first");
  world.backend().Abort("second");
  const auto errors = world.Errors([&](cppool_runtime* rt) {
    world.rank(rt->rank).BeginCase();
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    int value = 0;
    Check(rt, rt->all_reduce(rt, &value, &value, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, rt->stream));
  });
  CHECK(errors == std::vector<std::string>(2, "communication was aborted: first"));
  world.backend().Recover(std::chrono::seconds(30));
  CheckNextCase(world);
}

TEST_CASE("ranks that wait for a finished rank get an error at once that names it") {
  const int size = GENERATE(2, 4, 8);
  const std::string call = GENERATE("all_reduce", "send to", "recv from");
  CAPTURE(size, call);
  World world(size);
  const auto errors = world.Errors([&](cppool_runtime* rt) {
    RankRuntime& rank = world.rank(rt->rank);
    rank.BeginCase();
    const Group group = GetGroup(rt, CPPOOL_WORLD);
    std::int32_t value = 1;
    // A call that a rank made before it finished does not fail, even if other ranks call later.
    if (rt->rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Check(rt, rt->all_reduce(rt, &value, &value, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, rt->stream));
    Sync(rt);
    if (value != size) throw std::runtime_error("the sum is wrong");
    if (rt->rank == 1) {
      rank.EndCase();
      world.backend().Finished(1);
      return;
    }
    if (call == "all_reduce") {
      Check(rt, rt->all_reduce(rt, &value, &value, 1, CPPOOL_INT32, CPPOOL_SUM, group.comm, rt->stream));
    } else if (call == "send to") {
      Check(rt, rt->send(rt, &value, 4, 1, group.comm, rt->stream));
    } else {
      Check(rt, rt->recv(rt, &value, 4, 1, group.comm, rt->stream));
    }
    try {
      rank.EndCase();
    } catch (const RuntimeError& error) {
      if (error.culprit() != 1) throw std::runtime_error("the culprit is not rank 1");
      throw;
    }
  });
  for (int rank = 0; rank < size; ++rank) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    if (rank == 1) {
      CHECK(error.empty());
      continue;
    }
    CHECK_THAT(error, Catch::Matchers::ContainsSubstring("rank 1 has finished the case, and rank " +
                                                         std::to_string(rank) + " is still "));
    CHECK_THAT(error, Catch::Matchers::ContainsSubstring(call));
  }
  world.backend().Recover(std::chrono::seconds(30));
  CheckNextCase(world);
}

TEST_CASE("host abort: an abort releases ranks that wait in OpenRank") {
  auto backend = CreateHostBackend(2);
  std::string error;
  std::thread waiting([&] {
    try {
      backend->OpenRank(0);
    } catch (const std::exception& e) {
      error = e.what();
    }
  });
  CHECK_THROWS_AS(backend->OpenRank(2), RuntimeError);  // a rank outside the world; has no effect
  backend->Abort("rank 1 has gone");
  waiting.join();
  CHECK_THAT(error, Catch::Matchers::ContainsSubstring("rank 1 has gone"));
}
