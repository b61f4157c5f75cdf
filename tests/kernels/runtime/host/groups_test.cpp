// Tests of group_of on the host runtime: groups of every shape, made when a case first requests them, and
// errors.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "tests/catch.h"
#include "tests/kernels/runtime/common/all_shapes.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::kernels::test::AllShapes;
using cppool::test::Require;
using cppool::test::Sync;
using cppool::test::World;

namespace {

// Gathers the rank numbers over the group, sends a message around it, and checks both.
void UseGroup(cppool_runtime* rt, GroupShape shape) {
  const Group group = GetGroup(rt, shape);
  const std::vector<int> expected = shape.Ranks(rt->rank);
  const std::string name = std::to_string(shape.size) + "," + std::to_string(shape.stride);
  Require(group.comm && group.size == shape.size, "size of " + name);
  Require(expected[static_cast<std::size_t>(group.rank)] == rt->rank, "rank in " + name);
  std::vector<std::int32_t> ranks(expected.size(), -1);
  const std::int32_t mine = rt->rank;
  std::int32_t got = -1;
  Check(rt, rt->all_gather(rt, &mine, ranks.data(), sizeof(mine), group.comm, rt->stream));
  const int next = (group.rank + 1) % group.size, previous = (group.rank + group.size - 1) % group.size;
  GroupedCalls calls(rt);
  Check(rt, rt->send(rt, &mine, sizeof(mine), next, group.comm, rt->stream));
  Check(rt, rt->recv(rt, &got, sizeof(got), previous, group.comm, rt->stream));
  calls.End();
  Sync(rt);
  Require(ranks == std::vector<std::int32_t>(expected.begin(), expected.end()), "members of " + name);
  Require(got == expected[static_cast<std::size_t>(previous)], "the message in " + name);
}

}  // namespace

TEST_CASE("host groups: every shape works in several cases, with the handles of the first") {
  const int size = GENERATE(1, 2, 3, 4, 6, 8, 12);
  World world(size);
  const std::vector<GroupShape> shapes = AllShapes(size);
  CHECK(world.rank(0).Groups().size() == UsualShapes(size).size());
  std::vector<std::vector<cppool_comm>> handles(static_cast<std::size_t>(size));
  for (int round = 0; round < 3; ++round) {
    world.Case([&](cppool_runtime* rt) {
      auto& mine = handles[static_cast<std::size_t>(rt->rank)];
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        UseGroup(rt, shapes[i]);
        if (round == 0) mine.push_back(GetGroup(rt, shapes[i]).comm);
        Require(GetGroup(rt, shapes[i]).comm == mine[i], "the communicator was not kept");
      }
      for (const cppool_group which : {CPPOOL_WORLD, CPPOOL_PAIR, CPPOOL_STRIDE}) {
        const auto shape = ShapeOf(which, size);
        const Group group = GetGroup(rt, which);
        const Group expected = shape ? GetGroup(rt, *shape) : Group{nullptr, 0, 0};
        Require(group.comm == expected.comm && group.rank == expected.rank && group.size == expected.size,
                "group and group_of differ");
        cppool_comm alone = nullptr;
        Check(rt, rt->group(rt, which, &alone, nullptr, nullptr));
        Require(alone == group.comm, "the communicator without rank and size");
      }
    });
  }
  CHECK(world.rank(0).Groups() == shapes);
}

TEST_CASE("host groups: an invalid size or stride is an error of the call") {
  World world(8);
  world.Case([&](cppool_runtime* rt) {
    cppool_comm comm = rt->rank ? nullptr : reinterpret_cast<cppool_comm>(rt);
    int rank = 0, size = 0;
    for (const auto& [bad_size, bad_stride] : {std::pair{3, 1}, {4, 4}, {0, 1}, {2, 0}, {-8, -1}}) {
      Require(rt->group_of(rt, bad_size, bad_stride, &comm, &rank, &size) == CPPOOL_INVALID_REQUEST,
              "status");
      Require(!comm, "no communicator");
      Require(std::string(rt->last_error(rt)).find("must divide the world size 8") != std::string::npos,
              "text");
    }
    Check(rt, rt->group_of(rt, 4, 1, &comm, nullptr, nullptr));
    Require(comm == GetGroup(rt, GroupShape{4, 1}).comm, "without rank and size");
    // Groups of one rank are the same for every stride.
    Require(GetGroup(rt, GroupShape{1, 4}).comm == GetGroup(rt, GroupShape{1, 1}).comm, "alone");
    Check(rt, rt->group_start(rt));
    Require(rt->group_of(rt, 2, 4, &comm, nullptr, nullptr) == CPPOOL_INTERNAL, "in a group of calls");
    Require(std::string(rt->last_error(rt)) == "group_of between group_start and group_end",
            "the text of the error");
    Check(rt, rt->group_end(rt));
  });
}

TEST_CASE("host groups: after a failed group_of the world recovers, and the next case can make the group") {
  const bool abort = GENERATE(false, true);
  CAPTURE(abort);
  World world(4);
  const GroupShape shape{1, 1};  // the only shape that a world of four ranks does not make at its start
  for (int round = 0; round < 2; ++round) {
    const auto errors = world.Errors([&](cppool_runtime* rt) {
      RankRuntime& rank = world.rank(rt->rank);
      rank.BeginCase();
      if (rt->rank == 1) {
        rank.EndCase();
        return abort ? world.backend().Abort("rank 1 broke") : world.backend().Finished(1);
      }
      cppool_comm comm = nullptr;
      const cppool_status status = rt->group_of(rt, 1, 1, &comm, nullptr, nullptr);
      const std::string error = rt->last_error(rt);
      const int culprit = rt->last_failure(rt)->culprit;
      rank.EndCase();
      Require(status == CPPOOL_INTERNAL && !comm, "group_of did not fail");
      Require(culprit == (abort ? RuntimeError::kElsewhere : 1), "the culprit is wrong");
      throw std::runtime_error(error);
    });
    for (const int rank : {0, 2, 3}) {
      CHECK(errors[static_cast<std::size_t>(rank)] ==
            (abort ? "communication was aborted: rank 1 broke"
                   : "rank 1 has finished the case, and rank " + std::to_string(rank) +
                         " is still waiting for it in group_of(1, 1)"));
    }
    CHECK(errors[1].empty());
    world.backend().Recover(std::chrono::seconds(30));
  }
  world.Case([&](cppool_runtime* rt) { UseGroup(rt, shape); });
}

TEST_CASE("host groups: requests for different shapes are an error on all ranks that names the shapes") {
  World world(8);
  const auto errors = world.CaseErrors([&](cppool_runtime* rt) {
    cppool_comm comm = nullptr;
    Check(rt, rt->group_of(rt, rt->rank == 5 ? 2 : 4, rt->rank == 5 ? 4 : 1, &comm, nullptr, nullptr));
  });
  for (const std::string& error : errors) {
    CHECK(error == "the ranks ask for different groups: rank 0 called group_of(4, 1), rank 5 group_of(2, 4)");
  }
  world.Case([&](cppool_runtime* rt) {
    for (const GroupShape shape : AllShapes(8)) UseGroup(rt, shape);
  });
}

TEST_CASE("the probe passes before and after an abort, and fails if a rank left a message unreceived") {
  // The last world has groups that a case made.
  const auto [size, made] = GENERATE(
      table<int, GroupShape>({{1, {1, 1}}, {2, {2, 1}}, {3, {3, 1}}, {4, {4, 1}}, {8, {8, 1}}, {8, {4, 1}}}));
  CAPTURE(size, made.size);
  World world(size);
  world.Case([&, shape = made](cppool_runtime* rt) { UseGroup(rt, shape); });
  std::uint64_t round = 0;
  const auto probe = [&] {
    ++round;
    return world.CaseErrors([&](cppool_runtime* rt) { ProbeGroups(world.rank(rt->rank), round); });
  };
  const std::vector<std::string> sound(static_cast<std::size_t>(size));
  CHECK(probe() == sound);
  world.backend().Abort("a test");
  world.backend().Recover(std::chrono::seconds(30));
  CHECK(probe() == sound);
  CHECK(probe() == sound);
  if (size < 2) return;
  // The probe receives the message that no rank has received; it is wrong only on this group.
  const int sender = size - made.size;
  const auto errors = world.CaseErrors([&, shape = made](cppool_runtime* rt) {
    const Group group = GetGroup(rt, shape);
    std::vector<std::int32_t> old(1024, 7);
    const Stream side(rt);
    if (rt->rank == sender) Check(rt, rt->send(rt, old.data(), 4096, 1, group.comm, side.get()));
    ProbeGroups(world.rank(rt->rank), round + 1);
  });
  const std::string named = "a message from rank " + std::to_string(sender) + " over " +
                            CommunicatorOf(made.Ranks(sender), size) + " is wrong";
  CHECK(std::any_of(errors.begin(), errors.end(),
                    [&](const std::string& error) { return error.find(named) != std::string::npos; }));
  CHECK(probe() == sound);
}

TEST_CASE("host progress: ranks in groups of any shape are named by their rank in the world") {
  World world(8);
  cppool::test::Latch seen;
  const auto eventually = [&](int rank, const std::string& doing) {
    StreamProgress main;
    for (int i = 0; i < 10000 && main.doing != doing; ++i) {
      main = world.rank(rank).Progress()[0];
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return main;
  };
  std::thread reader([&] {
    const StreamProgress making = eventually(3, "waiting for rank 6 in group_of(2, 4)");
    CHECK(making.doing == "waiting for rank 6 in group_of(2, 4)");
    CHECK(making.awaits == std::vector<int>{6});
    CHECK_FALSE(making.idle);
    seen.Open();
  });
  world.Case([&](cppool_runtime* rt) {
    if (rt->rank == 6) seen.Wait();
    (void)GetGroup(rt, GroupShape{2, 4});
  });
  reader.join();

  cppool::test::Latch seen_too;
  std::thread second([&] {
    CHECK(eventually(1, "waiting for recv from rank 5").awaits == std::vector<int>{5});
    CHECK(eventually(2, "in all_reduce of 4 bytes with 4 ranks, waiting for rank 3").awaits ==
          std::vector<int>{3});
    seen_too.Open();
  });
  world.Case([&](cppool_runtime* rt) {
    const Group far = GetGroup(rt, GroupShape{2, 4}), block = GetGroup(rt, GroupShape{4, 1});
    std::int32_t value = 1;
    if (rt->rank == 5 || rt->rank == 3) seen_too.Wait();
    if (rt->rank == 1) Check(rt, rt->recv(rt, &value, 4, 1, far.comm, rt->stream));
    if (rt->rank == 5) Check(rt, rt->send(rt, &value, 4, 0, far.comm, rt->stream));
    if (rt->rank < 4 && rt->rank != 1) {
      Check(rt, rt->all_reduce(rt, &value, &value, 1, CPPOOL_INT32, CPPOOL_SUM, block.comm, rt->stream));
    } else if (rt->rank == 1) {
      std::int32_t sum = 1;
      Stream side(rt);
      Check(rt, rt->all_reduce(rt, &sum, &sum, 1, CPPOOL_INT32, CPPOOL_SUM, block.comm, side.get()));
      Sync(rt, side.get());
    }
    Sync(rt);
  });
  second.join();
}
