// Runs cells of the suite on the host runtime with each planted bug.
#include "tests/child.h"
#include "tests/planted/catch_bugs.h"

using cppool::kernels::PlantableBug;
using cppool::kernels::PlantableBugs;
using cppool::test::Child;
using cppool::test::RunChild;
using namespace cppool::test;

namespace {

const std::vector<std::string> kOnHost = {"--backend", "host", "--max-seqlen", "32"};

}  // namespace

TEST_CASE("every cell passes in the patched daemon when no bug is selected") { PassesWithoutBug(kOnHost); }

TEST_CASE("the suite catches each planted bug") {
  REQUIRE(PlantableBugs().size() >= 25);
  for (const PlantableBug& bug : PlantableBugs()) {
    if (!IsOfFp8(bug) && !IsNative(bug) && !IsOfLastTile(bug) && !IsOfOneLaunch(bug))
      CatchesBug(bug, kOnHost);
  }
}

TEST_CASE("one launch passes without a bug, and the suite catches each planted bug of it") {
  const Caught none = RunCells(nullptr, kOneLaunchCells, kOnHost + kOneLaunch);
  CHECK(none.cells > 8);
  CHECK(none.failed == std::vector<std::string>{});
  CHECK(none.other == std::vector<std::string>{});
  for (const PlantableBug& bug : PlantableBugs()) {
    // Seen by ThreadSanitizer alone: all passes of a case bring the same keys, so that a flag of the pass
    // before does no harm, and the processors that this runs on keep loads in order.
    using cppool::kernels::Bug;
    if (bug.bug == Bug::kOneLaunchEpochWait || bug.bug == Bug::kOneLaunchFence) continue;
    if (IsOfOneLaunch(bug)) CatchesBug(bug, kOnHost + kOneLaunch, kOneLaunchCells);
  }
}

TEST_CASE("both references see the last tile of each output") {
  for (const PlantableBug& bug : PlantableBugs()) {
    for (const int world_size : {1, 2, 3, 4}) {
      if (IsOfLastTile(bug)) CatchesLastTiles(bug, world_size, 512, true, true, {"--backend", "host"});
    }
  }
}

TEST_CASE("smoke fails kernels whose window is off by one") {
  for (const char* bug : {"", "window_boundary"}) {
    setenv("CPPOOL_PLANTED_BUG", bug, 1);
    const Ran ran = Cppool({"run", "--suite", "smoke", "--backend", "host"}, CPPOOL_TEST_DAEMON);
    unsetenv("CPPOOL_PLANTED_BUG");
    INFO(ran.out);
    CHECK(ran.Last() == (*bug ? "17 passed, 3 failed, 0 skipped" : "20 passed, 0 failed, 0 skipped"));
  }
}

TEST_CASE("the checks of fp8 catch each planted bug of fp8") {
  PassesFp8WithoutBug({"--backend", "host"});
  int bugs = 0;
  for (const PlantableBug& bug : PlantableBugs()) {
    if (!IsOfFp8(bug)) continue;
    ++bugs;
    CatchesFp8Bug(bug, {"--backend", "host"});
  }
  CHECK(bugs >= 16);
}

TEST_CASE("the error of an output that is not finite is reported as nan") {
  setenv("CPPOOL_PLANTED_BUG", "padding_not_zeroed", 1);  // the padding keeps NaN
  const Ran ran =
      Cppool({"run", "--json", "--param", "qkv_format=thd", "--param", "pad_between_seqs=true", "--param",
              "max_seqlen_q=32", "--param", "max_seqlen_kv=32", "--param", "num_heads=2", "--param",
              "num_gqa_groups=2", "--param", "attn_mask_type=padding_causal", "--backend", "host"});
  unsetenv("CPPOOL_PLANTED_BUG");
  const cppool::Json cell = cppool::Json::parse(ran.lines.at(0));
  INFO(cell.dump(1));
  REQUIRE(cell.at("status") == "failed");
  CHECK(Has(cell.at("error"), "max_abs_err nan, rel_err nan"));
  CHECK_FALSE(Has(cell.at("error"), "kept"));
  for (const cppool::Json& check : cell.at("answer").at("checks"))
    CHECK(check.at("max_abs_err").is_null() == !check.at("ok").get<bool>());
}

TEST_CASE("an unknown bug name is an error that lists all bugs") {
  const Child child =
      RunChild("CPPOOL_PLANTED_BUG=dq " CPPOOL_TEST_DAEMON " --world-size 1 --backend host </dev/null");
  INFO(child.output);
  CHECK(child.exit_code == 2);
  CHECK(Has(child.output, "'dq'"));
  for (const PlantableBug& bug : PlantableBugs()) CHECK(Has(child.output, bug.name));
}

TEST_CASE("the daemon logs the planted bug at its start") {
  const std::string daemon = CPPOOL_TEST_DAEMON " --world-size 1 --backend host </dev/null";
  const Child planted = RunChild("CPPOOL_PLANTED_BUG=dq_left_zero " + daemon);
  CHECK(planted.exit_code == 0);
  CHECK(Has(planted.output, "a bug is planted: dq_left_zero"));
  CHECK_FALSE(Has(RunChild("CPPOOL_PLANTED_BUG= " + daemon).output, "planted"));
}

TEST_CASE("the product's daemon contains no code of the planted bugs") {
  const std::string plain = ReadFile(CPPOOL_PLAIN_DAEMON), planted = ReadFile(CPPOOL_TEST_DAEMON);
  std::vector<std::string> traces = {"CPPOOL_PLANTED_BUG", "a bug is planted"};
  for (const PlantableBug& bug : PlantableBugs()) traces.emplace_back(bug.name);
  for (const std::string& trace : traces) {
    CAPTURE(trace);
    CHECK_FALSE(Has(plain, trace));
    CHECK(Has(planted, trace));
  }
  CHECK(RunChild("CPPOOL_PLANTED_BUG=dq " CPPOOL_PLAIN_DAEMON " --world-size 1 --backend host </dev/null")
            .exit_code == 0);
}
