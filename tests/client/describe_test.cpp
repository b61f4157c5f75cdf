// Results, cells and errors as people and test frameworks see them.
#include <cppool/pool.h>
#include <cppool/suite.h>

#include <set>
#include <sstream>

#include "tests/client/support.h"

namespace cppool::test {
namespace {

std::string Shown(const auto& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

const std::string kFake = CPPOOL_FAKE_DAEMON;

TEST_CASE("a Result describes itself, also when its Pool is gone") {
  const Result failed = Pool(FakeOptions()).Run(Do("fail"));
  CHECK(!failed);
  CHECK(
      failed.Describe() ==
      "failed: because of mismatch\n"
      "  tensor  against  rank  max_abs_err  rel_err  tolerance  worst at          got  wanted  bad  where\n"
      "  dq      oracle   1     nan          0.5      0.01       head 3, token 17  nan  1.5     64   head 3\n"
      "  1 of 2 checks hold\n"
      "repeat: cppool run --world-size 2 --daemon " +
          kFake + " --param do=fail");
  CHECK(Shown(failed) == failed.Describe());
  CHECK(Catch::Detail::stringify(failed) == failed.Describe());  // CHECK(failed) shows it
  const Result copy = failed;
  CHECK(copy.Command() == failed.Command());

  const Result passed = Pool(FakeOptions()).Run(Do("pass"));
  CHECK(passed);
  CHECK(Has(passed.Describe(), "passed\n"));
  CHECK(Has(passed.Describe(), "  stage    rank 0 (ms)"));
  CHECK(!Has(failed.Describe(), "rank 0 (ms)"));
}

TEST_CASE("a Result describes the attempts before it, and what its ranks wait in") {
  TemporaryFolder folder;
  PoolOptions options = FakeOptions();
  options.retries = 1;
  const Result flaky = Pool(options).Run({{"do", "die_once"}, {"marker", folder.File("marker")}});
  const std::string text = flaky.Describe();
  CHECK(Has(text, "passed\n  flaky (passed at attempt 2)\n  attempt 1: " + flaky.lost[0].error + "\n"));

  Result hung;
  hung.error = "rank 1 does not come";
  hung.failure = {"timeout", 1, "forward", "stuck"};
  hung.warnings = {"nothing was compared"};
  hung.ranks = {{0, false, "waits in all_gather: stuck", {}}, {1, false, "stuck", {}}};
  hung.ranks.push_back(
      {2,
       false,
       "was killed, since rank 1 failed first: stuck; it was in all_reduce, which rank 1 has not entered",
       {}});
  hung.ranks[1].traceback = "Traceback\n  line";
  for (int line = 1; line <= 30; ++line) hung.ranks[1].output += "line " + std::to_string(line) + "\n";
  std::string wrote;
  for (int line = 11; line <= 30; ++line) wrote += "\n  rank 1 wrote: line " + std::to_string(line);
  CHECK(hung.Describe() ==
        "error: rank 1 does not come\n  warning: nothing was compared\n  rank 0: waits in all_gather\n"
        "  Traceback\n    line\n  rank 1: stuck" +
            wrote +
            "\n  rank 2: was killed, since rank 1 failed first; it was in all_reduce, which rank 1 has not "
            "entered");  // and no command: nobody was asked

  Result off;
  off.status = Status::kFailed;
  off.error = "rank 0: out against oracle: token 3 is off";
  off.checks = {{"out", "oracle", 0, 2, 1, 0.01, false, {}}, {"out", "oracle", 1, 2, 1, 0.01, false, {}}};
  off.ranks = {{0, false, "out against oracle: token 3 is off", {}},
               {1, false, "out against oracle: token 9 is off", {}}};
  CHECK(Has(off.Describe(), "  0 of 2 checks hold"));
  CHECK(!Has(off.Describe(), "token 9"));  // the table has more on it
}

TEST_CASE("an error of a run has the command that repeats it") {
  Pool pool(FakeOptions());
  try {
    pool.Run(Do("die"), Within(5s));
    FAIL("it died");
  } catch (const PoolError& error) {
    CHECK(error.Command() == "cppool run --world-size 2 --daemon " + kFake + " --deadline 5 --param do=die");
  }
  CHECK(pool.Validate(Do("pass")).Command().empty());
}

TEST_CASE("Pools run a cell with its case on its ranks") {
  Pools pools(FakeOptions());
  Cell cell;
  cell.world_size = 4;
  cell.case_name = "mine";
  cell.params = Do("fail");
  const Result result = pools.Run(cell, Within(5s));
  CHECK(result.Command() ==
        "cppool run --world-size 4 --case mine --daemon " + kFake + " --deadline 5 --param do=fail");
}

TEST_CASE("suites as a harness takes them") {
  const std::vector<Cell> smoke = LoadSuite("smoke");
  REQUIRE(smoke.size() == 20);
  CHECK(Shown(smoke[0]) == smoke[0].name);
  CHECK(smoke[0].name == "mha_128 fp16 bshd p2p W=2");
  CHECK(smoke[0].id == "mha_128_fp16_bshd_p2p_W2");
  std::set<std::string> ids;
  int world_size = 0;
  const std::vector<Cell> matrix = LoadSuite("matrix", {.filters = {"dtype!=fp8"}, .max_seqlen = 96});
  for (const Cell& cell : matrix) {
    ids.insert(cell.id);
    CHECK(cell.id.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") ==
          std::string::npos);
    CHECK(cell.world_size >= world_size);
    CHECK(cell.params.value("max_seqlen_q", 0) <= 96);
    world_size = cell.world_size;
  }
  CHECK((ids.size() == matrix.size() && matrix.size() > 1000));
}

TEST_CASE("ids are the same whatever is selected, and unique") {
  TemporaryFolder folder;
  WriteFile(folder.File("own.json"), R"({"cells": [{"product": {"window_size": [[-1, 0], [1, 0]]}}]})");
  const std::vector<Cell> cells = LoadSuite(folder.File("own.json"));
  REQUIRE(cells.size() == 2);
  CHECK(cells[0].id == "attention_window_size_1_0_W2");
  CHECK(cells[1].id == "attention_window_size_1_0_W2_2");
  CHECK(LoadSuite(folder.File("own.json"), {.filters = {"window_size=[1,0]"}})[0].id == cells[1].id);
}

TEST_CASE("suites that there are not") {
  const auto refusal = [](const std::string& name, const SuiteOptions& options) {
    try {
      LoadSuite(name, options);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(Has(refusal("smok", {}), "did you mean \"smoke\"?"));
  CHECK(Has(refusal("smoke", {.filters = {"dtyp=bf16"}}), "did you mean \"dtype\"?"));
  CHECK(Has(refusal("smoke", {.filters = {"dtype"}}), "key=value"));
  CHECK(Has(refusal("smoke", {.filters = {"dtype=fp64"}}), "no cell has dtype=fp64"));
  CHECK(Has(refusal("smoke", {.max_seqlen = -1}), "max_seqlen"));
}

}  // namespace
}  // namespace cppool::test
