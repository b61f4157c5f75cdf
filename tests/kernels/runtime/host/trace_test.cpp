// Tests of traces on the host: which slices there are, that they have the times of the stages, and that the
// limit is kept.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::Latch;
using cppool::test::World;

namespace {

std::vector<const TraceSlice*> Find(const RankTrace& trace, TraceSlice::Kind kind, const std::string& name) {
  std::vector<const TraceSlice*> found;
  for (const TraceSlice& slice : trace.slices) {
    if (slice.kind == kind && trace.names[static_cast<std::size_t>(slice.name)] == name)
      found.push_back(&slice);
  }
  return found;
}

// Runs a case with a trace on every rank.
std::vector<RankTrace> Traced(World& world, int size, const std::function<void(cppool_runtime*)>& body,
                              std::vector<StageTimes>* times = nullptr, std::size_t limit = 1000) {
  std::vector<RankTrace> traces(static_cast<std::size_t>(size));
  if (times) times->resize(traces.size());
  for (const std::string& error : world.Errors([&](cppool_runtime* rt) {
         RankRuntime& rank = world.rank(rt->rank);
         const auto at = static_cast<std::size_t>(rt->rank);
         rank.BeginCase();
         rank.BeginTrace(limit);
         body(rt);
         const StageTimes ended = rank.EndCase();
         if (times) (*times)[at] = ended;
         traces[at] = rank.TakeTrace();
         if (!rank.TakeTrace().slices.empty()) throw std::runtime_error("a trace was taken twice");
       }))
    REQUIRE(error.empty());
  return traces;
}

}  // namespace

TEST_CASE(
    "host trace: stages of all iterations, with the times of the answer, and what the rank's thread does") {
  World world(1);
  std::vector<StageTimes> times;
  const std::int64_t before = TraceClockNs();
  const RankTrace trace =
      Traced(
          world, 1,
          [&](cppool_runtime* rt) {
            const Stream side(rt);
            for (const int iteration : {-2, 0}) {
              world.rank(0).BeginIteration(iteration);
              Check(rt, rt->mark(rt, rt->stream, "work/a"));
              Check(rt, rt->mark(rt, side.get(), "copy"));
              Enqueue(rt, rt->stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
              Check(rt, rt->mark(rt, side.get(), nullptr));
              Check(rt, rt->mark(rt, rt->stream, "work/b"));
              const Buffer buffer(rt, 64, rt->stream);
            }
            world.rank(0).EndIterations();
            Check(rt, rt->mark(rt, rt->stream, "open"));
          },
          &times)
          .front();
  CHECK(trace.streams == std::vector<std::string>{"main", "stream 1"});
  CHECK(trace.dropped == 0);
  CHECK(trace.clock_error_us == 0);
  for (const auto& [stage, ms] : times.front()) {
    if (stage == "work") continue;  // a parent has no slice of its own
    INFO(stage);
    const auto slices = Find(trace, TraceSlice::Kind::kStage, stage);
    REQUIRE(slices.size() == (stage == "open" ? 1 : 2));
    CHECK(slices.front()->iteration == (stage == "open" ? -1 : -2));
    CHECK(slices.front()->track == (stage == "copy"));
    const TraceSlice& counted = *slices.back();
    CHECK(counted.iteration == (stage == "open" ? -1 : 0));
    CHECK(static_cast<double>(counted.end_ns - counted.begin_ns) * 1e-6 == Approx(ms));
    CHECK_FALSE(counted.unfinished);
  }
  CHECK(Find(trace, TraceSlice::Kind::kCall, "allocate").size() == 2);
  CHECK(Find(trace, TraceSlice::Kind::kCall, "copy").size() == 2);
  CHECK(Find(trace, TraceSlice::Kind::kCall, "work/a").size() ==
        4);  // each goes on when the copy is enqueued
  for (const TraceSlice& slice : trace.slices) {
    CHECK(slice.begin_ns >= before);
    CHECK(slice.end_ns >= slice.begin_ns);
    CHECK(slice.end_ns <= TraceClockNs());
  }
  // A trace that is not taken ends with its case.
  cppool_runtime* rt = world.rank(0).seam();
  for (const bool traced : {true, false}) {
    world.rank(0).BeginCase();
    if (traced) world.rank(0).BeginTrace(10);
    Check(rt, rt->mark(rt, rt->stream, "stage"));
    world.rank(0).EndCase();
  }
  CHECK(world.rank(0).TakeTrace().slices.empty());  // none was asked for
}

TEST_CASE("host trace: transfers have bytes and peers, and those of a group begin together") {
  World world(6);
  const auto traces = Traced(world, 6, [](cppool_runtime* rt) {
    const Group pair = GetGroup(rt, GroupShape{2, 3});  // 0 and 3, 1 and 4, 2 and 5
    std::vector<char> from(96), to(2 * 96);
    GroupedCalls calls(rt);
    Check(rt, rt->send(rt, from.data(), 96, 1 - pair.rank, pair.comm, rt->stream));
    Check(rt, rt->recv(rt, to.data(), 96, 1 - pair.rank, pair.comm, rt->stream));
    calls.End();
    Check(rt, rt->all_gather(rt, from.data(), to.data(), 96, pair.comm, rt->stream));
    Check(rt, rt->reduce_scatter(rt, from.data(), to.data(), 3, CPPOOL_FLOAT32, CPPOOL_SUM, pair.comm,
                                 rt->stream));
    cppool::test::Sync(rt);
  });
  for (int rank = 0; rank < 6; ++rank) {
    const int peer = (rank + 3) % 6;
    const RankTrace& trace = traces[static_cast<std::size_t>(rank)];
    const RankTrace& other = traces[static_cast<std::size_t>(peer)];
    const auto one = [](const RankTrace& of, const char* name) {
      const auto found = Find(of, TraceSlice::Kind::kTransfer, name);
      REQUIRE(found.size() == 1);
      return *found.front();
    };
    const TraceSlice send = one(trace, "send"), recv = one(trace, "recv");
    CHECK((send.peer == peer && recv.peer == peer));
    CHECK((send.bytes == 96 && recv.bytes == 96 && send.ranks == 2));
    CHECK(send.begin_ns == recv.begin_ns);
    CHECK(recv.end_ns >= one(other, "send").begin_ns);
    CHECK(send.end_ns >= one(other, "recv").begin_ns);
    CHECK(one(trace, "all_gather").bytes == 96);
    CHECK(one(trace, "all_gather").begin_ns >= std::max(send.end_ns, recv.end_ns));
    CHECK(one(trace, "reduce_scatter").bytes == 12);
    CHECK(one(trace, "reduce_scatter").peer == TraceSlice::kNoPeer);
    CHECK_FALSE(Find(trace, TraceSlice::Kind::kCall, "open communicator").empty());
  }
}

TEST_CASE(
    "host trace: at the limit further slices are counted and left out, and those that there are have ends") {
  World world(1);
  const RankTrace trace = Traced(
                              world, 1,
                              [](cppool_runtime* rt) {
                                for (int i = 0; i < 50; ++i)
                                  Check(rt, rt->mark(rt, rt->stream, "stage"));  // each a slice of both kinds
                              },
                              nullptr, 7)
                              .front();
  CHECK(trace.slices.size() == 7);
  CHECK(trace.dropped == 93);
  for (const TraceSlice& slice : trace.slices) {
    CHECK(slice.end_ns >= slice.begin_ns);
    CHECK_FALSE(slice.unfinished);
  }
}

TEST_CASE("host trace: after a failure it has what ran, and what had not ended says so") {
  World world(1);
  RankRuntime& rank = world.rank(0);
  cppool_runtime* rt = rank.seam();
  rank.BeginCase();
  rank.BeginTrace(100);
  Check(rt, rt->mark(rt, rt->stream, "before"));
  Check(rt, rt->mark(rt, rt->stream, "fails"));
  Enqueue(rt, rt->stream, [] { throw RuntimeError(CPPOOL_INTERNAL, "broken"); });
  Check(rt, rt->mark(rt, rt->stream, "after"));
  CHECK_THROWS_AS(rank.EndCase(), RuntimeError);
  const RankTrace trace = rank.TakeTrace();
  const auto before = Find(trace, TraceSlice::Kind::kStage, "before"),
             fails = Find(trace, TraceSlice::Kind::kStage, "fails");
  REQUIRE((before.size() == 1 && fails.size() == 1));
  CHECK_FALSE(before.front()->unfinished);
  CHECK(fails.front()->unfinished);
  CHECK(Find(trace, TraceSlice::Kind::kStage, "after").empty());
}
