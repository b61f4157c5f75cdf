// Faults on request on the host runtime: every kind, on every schedule, in worlds of 2 and 4.
#include "tests/catch.h"
#include "tests/end_to_end/fault_grid.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kSlack = 10s;  // for a busy machine; a fault that hangs takes a minute

void CheckGrid(const std::vector<std::string>& kinds) {
  Pools pools(FaultPoolOptions("host"));
  for (const FaultCell& cell : FaultGrid(kinds, {2, 4})) {
    const FaultOutcome outcome = Inject(pools.At(cell.world_size), cell);
    INFO(cell.kind << ", " << cell.schedule << ", world size " << cell.world_size << ": " << outcome.ended
                   << " after " << outcome.time.count() << " s: " << outcome.text);
    CHECK(outcome.wrong == "");
    CHECK_FALSE(outcome.hung);
    CHECK(outcome.time < outcome.limit + kSlack);
    CHECK(outcome.next == "passed");
  }
}

Pool& PoolOf(int world_size) {
  static Pools pools(FaultPoolOptions("host"));
  return pools.At(world_size);
}

Result RunWith(int world_size, const Fault& fault, std::int64_t repeat = 1) {
  RunOptions options;
  options.fault = fault;
  options.repeat = repeat;
  return PoolOf(world_size).Run({{"max_seqlen_q", 64}, {"max_seqlen_kv", 64}}, options);
}

bool Says(const Result& result, const std::string& part) {
  return result.error.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("faults of a rank's thread: throw, out_of_memory, flood, half_line, half_answer") {
  CheckGrid({"throw", "out_of_memory", "flood", "half_line", "half_answer"});
}

TEST_CASE("faults that end the process: segfault, abort, exit, trap") {
  CheckGrid({"segfault", "abort", "exit", "trap"});
}

TEST_CASE("faults of data and communication: out_of_bounds, flip_bit, wrong_size, skip_collective") {
  CheckGrid({"out_of_bounds", "flip_bit", "wrong_size", "skip_collective"});
}

TEST_CASE("faults that never end: stall, stall_host") { CheckGrid({"stall", "stall_host"}); }

TEST_CASE("a rank's error is answered within a second, although other ranks wait for it") {
  for (const int world_size : {2, 4}) {
    auto best = std::chrono::duration<double>::max();  // the best of five: the machine may be busy
    for (int i = 0; i < 5; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      const Result result = RunWith(world_size, {"throw", 1, "forward/"});
      best = std::min<std::chrono::duration<double>>(best, std::chrono::steady_clock::now() - begin);
      CHECK(result.failure->rank == 1);
      CHECK(result.error.rfind("rank 1: ", 0) == 0);
    }
    CHECK(best < 1s);
  }
}

TEST_CASE("FaultKinds has every kind of fault that the daemon has") {
  const Result result = RunWith(2, {"trhow", 0});
  CHECK(result.failure->kind == "invalid_request");
  CHECK(Says(result, "did you mean \"throw\"?"));
  std::size_t known = 0;  // "(known: a, b, c)"
  for (const char c : result.error.substr(result.error.find("(known: "))) known += c == ',';
  CHECK(known + 1 == FaultKinds().size());
  for (const std::string& kind : FaultKinds()) CHECK(Says(result, kind));
}

TEST_CASE("a fault happens on its rank, at the mark and the occurrence of the mark that it names") {
  const Result second = RunWith(2, {"throw", 0, "backward/", 3}, 2);
  CHECK(second.failure->rank == 0);
  CHECK(Says(second, "at the mark 'backward/"));
  CHECK(RunWith(2, {"throw", 1, "checks"}).failure->rank == 1);
  CHECK(RunWith(2, {"throw", 1, "backward/p2p delta"}).failure->stage == "backward/p2p delta");
  // Marks before the iterations count for a fault that names such a mark, but not for a fault without a mark.
  CHECK(Says(RunWith(1, {"throw", 0, "inputs"}), "at the mark 'inputs'"));
  CHECK(Says(RunWith(1, {"throw", 0}), "at the mark 'forward/"));
  CHECK(RunWith(1, {"out_of_memory", 0, "inputs"}).failure->kind == "out_of_memory");
}

TEST_CASE("a rank may throw at any mark, while work on its streams still uses its buffers") {
  for (const char* schedule : {"p2p", "all_gather", "a2a"}) {
    int count = 0;
    for (bool happened = true; happened;) {
      RunOptions options;
      options.fault = Fault{"throw", 0, "", ++count};
      const Result result = PoolOf(2).Run({{"cp_comm_type", schedule},
                                           {"num_heads", 4},
                                           {"num_gqa_groups", 4},
                                           {"max_seqlen_q", 128},
                                           {"max_seqlen_kv", 128}},
                                          options);
      INFO(schedule << ", mark " << count << ": " << result.error);
      REQUIRE(result.failure);
      happened = result.failure->kind == "internal";
      CHECK(result.failure->rank == 0);
    }
    CHECK(count > 6);
  }
}

TEST_CASE("a fault that does not happen is an error with the marks that the rank reached") {
  const auto refused = [](const Result& result, const std::vector<std::string>& parts) {
    INFO(result.error);
    CHECK(result.status == Status::kError);
    CHECK(result.failure->kind == "invalid_request");
    CHECK_FALSE(result.fatal);
    for (const std::string& part : parts) CHECK(Says(result, part));
  };
  refused(RunWith(2, {"throw", 1, "forwrad"}),
          {"rank 1", "'forwrad' 0 times", "'inputs'", "'forward/p2p step 1 of 2'", "'checks'"});
  refused(RunWith(2, {"throw", 0, "inputs", 2}), {"'inputs' 1 times", "for time 2"});
  refused(RunWith(1, {"flip_bit", 0}),
          {"flip_bit did not happen", "made no communication call", "after its mark 'forward/"});
  refused(RunWith(2, {"skip_collective", 1, "checks"}),
          {"made no communication call", "after its mark 'checks'"});
  refused(RunWith(2, {"throw", 2}), {"\"rank\" of \"fault\" must be from 0 to 1, not 2"});
}

TEST_CASE("a daemon without --allow-faults refuses faults") {
  PoolOptions options = FaultPoolOptions("host");
  options.arguments.clear();
  Pool pool(options);
  RunOptions run;
  run.fault = Fault{"abort", 0, "", 1};
  for (const Result& result : {pool.Run({}, run), pool.Validate({}, run)}) {
    CHECK(result.failure->kind == "invalid_request");
    CHECK(Says(result, "--allow-faults"));
  }
}

}  // namespace cppool::test
