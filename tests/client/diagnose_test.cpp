// Verdicts on failures (bug, polluted, flaky): with the real daemon and a case that leaves state, and through
// the command.
#include "client/command/diagnose.h"

#include <algorithm>
#include <random>
#include <set>

#include "client/command/runner.h"
#include "tests/child.h"
#include "tests/client/command_support.h"
#include "tests/client/xml.h"

using namespace cppool::test;
using namespace cppool::command;
using cppool::Json;
using cppool::suite::Cell;

namespace {

using Set = std::vector<std::size_t>;
using Kind = Verdict::Kind;

cppool::PoolOptions Options() {
  cppool::PoolOptions options;
  options.daemon = CPPOOL_TEST_DAEMON;
  options.backend = "host";
  options.case_files = {CPPOOL_POLLUTING_CASE};
  return options;
}

Cell Polluting(const std::string& name, Json params) {
  Cell cell;
  cell.name = name;
  cell.case_name = "polluting";
  cell.params = std::move(params);
  return cell;
}

// One cell per letter, which adds the letter to the process's trail and is named after it.
std::vector<Cell> Leaving(const std::string& letters) {
  std::vector<Cell> cells;
  for (char letter : letters)
    cells.push_back(Polluting(std::string(1, letter), {{"leave", std::string(1, letter)}}));
  return cells;
}

Verdict Diagnosed(const Cell& cell, const std::vector<Cell>& before, Diagnoser::Limits limits = {},
                  cppool::PoolOptions options = Options()) {
  int announced = 0;
  Verdict verdict;
  LeavesNothing([&] {
    Diagnoser diagnoser(std::move(options), {}, limits, [&](const std::string&) { ++announced; });
    verdict = diagnoser.Diagnose(cell, before);
    CHECK(NoChildren());  // the devices are free for the next daemon
  });
  CHECK(announced == verdict.pools);
  return verdict;
}

// The answers that a shell command line prints.
std::vector<Json> Answers(const std::string& command) {
  const Child child = RunChild("{ " + command + "\n} 2>/dev/null");
  CHECK(child.exit_code == 0);
  std::vector<Json> answers;
  for (const std::string& line : Lines(child.output)) answers.push_back(Json::parse(line));
  return answers;
}

}  // namespace

TEST_CASE("ddmin finds a minimal set and tests no set twice") {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const std::size_t count = 1 + random() % 40;
    std::vector<Set> culprits(1 + random() % 2);  // each of these sets causes the failure
    for (Set& one : culprits) {
      for (std::size_t i = 0; i < count; ++i)
        if (random() % 8 == 0) one.push_back(i);
      if (one.empty()) one.push_back(random() % count);
    }
    auto spoils = [&](const Set& set) {
      return std::any_of(culprits.begin(), culprits.end(), [&](const Set& one) {
        return std::includes(set.begin(), set.end(), one.begin(), one.end());
      });
    };
    std::set<Set> asked;
    const Minimised found = Minimise(count, [&](const Set& set) -> std::optional<bool> {
      CHECK(asked.insert(set).second);
      CHECK((!set.empty() && set.size() < count && std::is_sorted(set.begin(), set.end())));
      return spoils(set);
    });
    CHECK(found.minimal);
    CHECK(spoils(found.set));
    for (std::size_t i = 0; i < found.set.size(); ++i) {
      Set less = found.set;
      less.erase(less.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK_FALSE(spoils(less));
    }
  }
}

TEST_CASE("ddmin is fast if a single element is the cause, and reports when it could not finish") {
  int asked = 0;
  auto spoils = [&](const Set& set) -> std::optional<bool> {
    ++asked;
    return std::count(set.begin(), set.end(), 777u) == 1;
  };
  CHECK(Minimise(1000, spoils).set == Set{777});
  CHECK(asked <= 20);
  asked = 0;
  const Minimised some = Minimise(1000, [&](const Set& set) -> std::optional<bool> {
    if (asked == 4) return std::nullopt;
    return spoils(set);
  });
  CHECK_FALSE(some.minimal);
  CHECK(some.set.size() < 500);
  CHECK(std::count(some.set.begin(), some.set.end(), 777u) == 1);
}

TEST_CASE("a cell that fails every time in a fresh pool is a bug, whatever ran before it") {
  const Verdict verdict = Diagnosed(Polluting("victim", {{"dread", ""}}), Leaving("abc"));
  CHECK(Describe(verdict) == "bug");
  CHECK(verdict.pools == 3);
  CHECK(verdict.culprits.empty());
  CHECK(Describe(Diagnosed(Polluting("victim", {{"dread", ""}, {"by", "abort"}}), {})) == "bug");
}

TEST_CASE("a cell that fails only after another case is polluted by that case") {
  const Cell victim = Polluting("it's the victim", {{"dread", "h"}});
  const Verdict verdict = Diagnosed(victim, Leaving("abcdefghijklm"));
  CHECK(Describe(verdict) == "polluted by \"h\"");
  CHECK(verdict.failed == 3);
  CHECK(verdict.ran == 3);
  CHECK(verdict.minimal);

  std::vector<Cell> sequence = verdict.culprits;
  sequence.push_back(victim);
  const std::string command = SequenceCommand(sequence, Options(), {});
  INFO(command);
  const std::vector<Json> answers = Answers(command);
  REQUIRE(answers.size() == 2);
  CHECK(answers[0]["status"] == "passed");
  CHECK(answers[1]["status"] == "failed");
  CHECK(answers[1]["id"] == "it's the victim");
}

TEST_CASE("a cell that fails only after several cases is polluted by all of them, in their order") {
  // The trail must have c, b, e in this order: the first b does not count, because it comes before the c.
  std::vector<Cell> before = Leaving("abcabde");
  before[4].name = "second b";
  const Cell victim = Polluting("victim", {{"dread", "cbe"}, {"by", "refusal"}});
  CHECK(Describe(Diagnosed(victim, before)) == "polluted by \"c\", \"second b\", \"e\"");
  // A case that failed can be the cause as well.
  before = Leaving("abc");
  before[1].params["dread"] = "";
  CHECK(Describe(Diagnosed(Polluting("victim", {{"dread", "b"}}), before)) == "polluted by \"b\"");
}

TEST_CASE(
    "a death that earlier cases cause is polluted, and a death before the cell runs gives no evidence") {
  const Cell victim = Polluting("victim", {{"dread", "b"}, {"by", "abort"}});
  CHECK(Describe(Diagnosed(victim, Leaving("abc"))) == "polluted by \"b\"");
  // The victim would run in a new daemon, in which "a" has not run.
  std::vector<Cell> before = Leaving("ab");
  before[1].params.update({{"dread", "a"}, {"by", "abort"}});
  CHECK(Describe(Diagnosed(Polluting("victim", {{"dread", "a"}}), before)) == "flaky (failed 1 of 7)");
}

TEST_CASE("a cell that passes when it is repeated, or sometimes fails in a fresh pool, is flaky") {
  CHECK(Describe(Diagnosed(Polluting("victim", {}), Leaving("abc"))) == "flaky (failed 1 of 7)");
  CHECK(Describe(Diagnosed(Polluting("victim", {}), {})) == "flaky (failed 1 of 4)");
  TemporaryFolder folder;
  Json now_and_then = {{"dread", ""}, {"only", ".x."}, {"log", folder.File("one")}};
  CHECK(Describe(Diagnosed(Polluting("victim", now_and_then), Leaving("a"))) == "flaky (failed 2 of 4)");
  // Passes three times alone, fails once after the earlier cells, passes eight times, fails once alone.
  now_and_then.update({{"only", "...x........x."}, {"log", folder.File("two")}});
  CHECK(Describe(Diagnosed(Polluting("victim", now_and_then), Leaving("ab"))) == "flaky (failed 3 of 15)");
}

TEST_CASE("the cause of a failure that happens only sometimes is found with more trials") {
  TemporaryFolder folder;
  // Fails every second time.
  std::string only;
  for (int i = 0; i < 200; ++i) only += i % 2 == 0 ? "x" : ".";
  const Cell victim = Polluting("victim", {{"dread", "c"}, {"only", only}, {"log", folder.File("log")}});
  const Verdict verdict = Diagnosed(victim, Leaving("abcde"));
  CHECK(Describe(verdict) == "polluted by \"c\"");
  CHECK(verdict.ran == 8);
  CHECK(verdict.failed == 4);
}

TEST_CASE("a diagnosis ends at its limits and reports its findings so far") {
  const Cell victim = Polluting("victim", {{"dread", "b"}});
  const std::vector<Cell> before = Leaving("abcdefghij");
  Diagnoser::Limits limits;
  limits.pools = 7;  // 6 of them run the cell alone and after all earlier cells
  Verdict verdict = Diagnosed(victim, before, limits);
  CHECK(verdict.pools == 7);
  CHECK_FALSE(verdict.minimal);
  CHECK(Describe(verdict) == "polluted by \"a\", \"b\", \"c\", \"d\", \"e\" or some of them");
  limits.pools = 6;
  verdict = Diagnosed(victim, before, limits);
  CHECK(Describe(verdict) == "polluted by \"a\", \"b\", \"c\", \"d\", \"e\" and 5 more or some of them");
  limits.pools = 4;
  verdict = Diagnosed(victim, before, limits);
  CHECK(Describe(verdict) == "undecided: 4 fresh pools did not settle it");
  CHECK(verdict.kind == Kind::kUndecided);
  limits = {};
  limits.time = 0s;
  verdict = Diagnosed(victim, before, limits);
  CHECK(Describe(verdict) == "undecided: the 0 s for diagnoses are used up");
  CHECK(verdict.pools == 0);
  cppool::PoolOptions nowhere = Options();
  nowhere.daemon = "/nowhere";
  CHECK(Describe(Diagnosed(victim, before, {}, nowhere))
            .rfind("undecided: no fresh pool could be started: cannot start /nowhere", 0) == 0);
}

TEST_CASE("what a case leaves behind is reported, and fails a run and a bench with --leaks error") {
  TemporaryFolder folder;
  const auto run = [](const char* subcommand, const std::string& action, std::vector<std::string> more = {}) {
    std::vector<std::string> words = {
        subcommand, "--backend", "host",    "--load",          CPPOOL_LITTERING_CASE,
        "--case",   "leaves",    "--param", "action=" + action};
    words.insert(words.end(), more.begin(), more.end());
    return Cppool(words);
  };
  const std::string left = "the case left 1 thread: 'lingering'";
  Ran ran = run("run", "thread");
  CHECK(ran.code == 0);
  CHECK(ran.Prints("\n  warning: " + left + "\n"));
  ran = run("run", "nothing,thread,descriptors", {"--leaks", "error", "--junit", folder.File("out.xml")});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("FAILED leaves W=2 action=thread\n  left something behind (--leaks error)\n"));
  CHECK(ran.Prints("\n  " + left + "\n"));
  CHECK(ran.Prints(" --leaks error "));
  CHECK(ran.Last() == "1 passed, 2 failed, 0 skipped");
  const std::string junit = ReadFile(folder.File("out.xml"));
  CHECK(Has(junit, "failures=\"2\" errors=\"0\""));
  CHECK(Has(junit, "message=\"left something behind (--leaks error)\""));
  ran = run("run", "thread", {"--leaks", "error", "--json", "--diagnose"});
  CHECK(ran.code == 1);
  const Json json = Json::parse(ran.out.substr(0, ran.out.find('\n')));
  CHECK(json.at("status") == "failed");
  CHECK(json.at("answer").at("leaks") == Json{{"threads", 1}});
  CHECK_FALSE(json.contains("verdict"));
  ran = run("bench", "thread", {"--repeat", "1", "--leaks", "error"});
  CHECK(ran.code == 1);
  CHECK(Has(ran.out + ran.err, left));
}

TEST_CASE("the command diagnoses a single case") {
  TemporaryFolder folder;
  auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> words = {"run",    "--diagnose",          "--backend", "host",
                                      "--load", CPPOOL_POLLUTING_CASE, "--case",    "polluting"};
    words.insert(words.end(), more.begin(), more.end());
    return Cppool(words);
  };
  Ran ran = run({"--param", "dread=\"\""});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("FAILED polluting W=2\n"));
  CHECK(ran.Prints("\n  verdict: bug\n  repeat: cppool run "));
  CHECK(ran.Prints("\npolluting W=2  bug\n"));
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");

  ran =
      run({"--param", "dread=\"\"", "--param", "only=x.", "--param", "log=" + folder.File("log"), "--json"});
  CHECK(ran.code == 1);  // a flaky failure is still a failure
  CHECK(
      Json::parse(ran.lines.at(0))["verdict"] ==
      Json({{"kind", "flaky"}, {"text", "flaky (failed 1 of 4)"}, {"pools", 3}, {"failed", 1}, {"ran", 4}}));
  CHECK(Json::parse(ran.Last())["summary"]["verdicts"] == Json({{"flaky", 1}}));

  ran = run({});
  CHECK(ran.code == 0);
  CHECK_FALSE(ran.Prints("verdict"));
  ran = run({"--param", "dread=3"});  // refused: nothing ran
  CHECK(ran.code == 1);
  CHECK_FALSE(ran.Prints("verdict"));
  CHECK_FALSE(Cppool({"run", "--diagnose"}, "/nowhere").Prints("verdict"));  // no daemon started: nothing ran
  CHECK(run({"--list"}).code == 2);
}

TEST_CASE(
    "a library that was loaded and of which nothing would run is an error, and its only case is the "
    "default") {
  const auto cppool = [](const std::string& command, std::vector<std::string> more) {
    more.insert(more.begin(), {command, "--backend", "host", "--load", CPPOOL_POLLUTING_CASE});
    return Cppool(more);
  };
  Ran ran = cppool("run", {});
  CHECK(ran.code == 0);
  CHECK(ran.out.rfind("passed polluting W=2 ", 0) == 0);
  ran = cppool("run", {"--json", "--world-size", "1,2"});
  CHECK(Json::parse(ran.lines.at(1))["case"] == "polluting");
  const std::string repeat = Json::parse(ran.lines.at(1))["repeat"];
  CHECK(Has(repeat, " --case polluting "));
  CHECK(Has(repeat, std::string(" --load ") + CPPOOL_POLLUTING_CASE));
  ran = cppool("bench", {"--repeat", "1", "--warmup", "0"});
  CHECK(ran.Prints("polluting"));

  const std::string error = std::string("cppool: --load ") + CPPOOL_POLLUTING_CASE +
                            ": nothing of it would run. It has the case polluting: name one, by --case or as "
                            "\"case\" of a suite, or leave the library out\n";
  for (const auto& [command, more] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"run", {"--case", "attention"}},
           {"run", {"--suite", "smoke"}},
           {"run", {"--suite", "smoke", "--list"}},
           {"run", {"--case", "attention", "--watch"}},
           {"bench", {"--case", "attention"}}}) {
    ran = cppool(command, more);
    INFO(command << " " << more.back() << ": " << ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.err == error);
    CHECK(ran.out.empty());
  }
  // With two libraries there is no default, and the one that is not used is named.
  ran = cppool("run", {"--load", CPPOOL_ODD_CASE});
  CHECK(ran.code == 2);
  CHECK(ran.err == error);
  ran = cppool("run", {"--load", CPPOOL_ODD_CASE, "--case", "polluting"});
  CHECK(ran.code == 2);
  CHECK(ran.err.rfind(std::string("cppool: --load ") + CPPOOL_ODD_CASE + ": nothing of it would run", 0) ==
        0);

  // A suite may have cells of a library and others, whose commands leave it out; a shard need not have any.
  TemporaryFolder folder;
  const std::string suite = folder.File("suite.json");
  std::ofstream(suite) << R"({"cells": [{"case": "polluting"}, {"set": {"max_seqlen_q": 64}}]})";
  ran = cppool("run", {"--suite", suite, "--list"});
  CHECK(ran.code == 0);
  CHECK(Has(ran.lines.at(0), "--load"));
  CHECK_FALSE(Has(ran.lines.at(1), "--load"));
  CHECK(cppool("run", {"--suite", suite, "--list", "--shard", "2/2"}).code == 0);
  // A library that cannot be used is the run's failure.
  ran = Cppool({"run", "--backend", "host", "--load", "/nowhere.so"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("/nowhere.so"));
}

TEST_CASE("a diagnosis repeats a run with its perturb and inputs, but without its dump and trace") {
  const std::vector<std::string> words = {"run", "--diagnose", "--param", "do=fail_with"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    return Cppool(more, CPPOOL_FAKE_DAEMON);
  };
  CHECK(with({"--param", "key=perturb", "--perturb", "7"}).Prints("verdict: bug\n"));
  CHECK(with({"--param", "key=inputs", "--inputs", "/in"}).Prints("verdict: bug\n"));
  CHECK(with({"--param", "key=dump", "--dump", "/tmp/dump"}).Prints("verdict: flaky (failed 1 of 4)\n"));
  CHECK(with({"--param", "key=trace", "--trace", "/tmp/t.json"}).Prints("verdict: flaky (failed 1 of 4)\n"));
}

TEST_CASE("the cells before a cell are those that ran in the same daemon") {
  TemporaryFolder folder;
  cppool::PoolOptions options = FakeOptions();
  options.retries = 1;
  CellRunner runner(options, {});
  auto run = [&](const std::string& name, const std::string& what, int world_size = 2) {
    Cell cell;
    cell.name = name;
    cell.world_size = world_size;
    cell.params = {{"do", what}, {"marker", folder.File(name)}};
    return runner.Run(cell, {});
  };
  auto before = [&] {  // also stops the daemon: the next cell gets a new one
    std::string names;
    for (const Cell& cell : runner.Retire()) names += cell.name;
    return names;
  };
  CHECK(before().empty());
  for (const char* name : {"a", "b", "c"}) run(name, "pass");
  run("d", "skip");
  run("e", "fail");
  run("f", "pass");
  CHECK(before() == "abcde");
  run("g", "pass");
  CHECK(before().empty());
  run("h", "pass");
  CHECK(run("i", "die_once").result->attempts == 2);  // the second attempt had a new daemon
  CHECK(before().empty());
  run("j", "pass");
  run("k", "die_once");
  run("l", "fail");
  CHECK(before() == "k");
  run("m", "pass");
  CHECK(run("n", "fatal").result->fatal);
  run("o", "pass");
  run("p", "pass");
  CHECK(before() == "o");
  run("q", "pass");
  run("r", "die");
  CHECK(before() == "q");  // q may be the cause, although the next daemon died too
  run("s", "pass");
  run("t", "die");
  run("u", "pass");
  CHECK(before().empty());
  run("v", "pass");
  run("w", "pass", 4);
  run("x", "pass", 4);
  CHECK(before() == "w");
}

TEST_CASE(
    "the command diagnoses a suite: verdicts are with the failures, in the closing table, in JSON and in "
    "JUnit") {
  TemporaryFolder folder;
  const std::string junit = folder.File("junit.xml");
  const std::vector<std::string> words = {"run", "--suite", "smoke", "--param", "do=polluted"};
  CHECK(Cppool(words, CPPOOL_FAKE_DAEMON).Last() == "18 passed, 2 failed, 0 skipped");
  std::vector<std::string> diagnose = words;
  diagnose.insert(diagnose.end(), {"--diagnose", "--junit", junit});
  Ran ran = Cppool(diagnose, CPPOOL_FAKE_DAEMON);
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "18 passed, 2 failed, 0 skipped");
  const std::string victim = "mha_256 fp16 bshd a2a W=2", wrong = "gqa_256 bf16 sbhd a2a+p2p W=4";
  const std::string by = "polluted by \"mqa_192_128 fp16 sbhd p2p W=2\", \"gqa_64 fp16 bshd a2a W=2\"";
  CHECK(ran.Prints("FAILED " + victim + "\n"));
  CHECK(ran.Prints("\n  verdict: " + by + "\n  repeat: cppool run "));
  CHECK(ran.Prints("\n  verdict: bug\n"));
  CHECK(ran.Prints("\nfailure                        verdict\n" + victim + "      " + by + "\n" + wrong +
                   "  bug\n"));

  const XmlNode suite = JunitSuiteIn(ReadFile(junit));
  std::vector<XmlNode> failures;
  for (const XmlNode& one : suite.children)
    if (!one.children.empty()) failures.push_back(one.children.at(0));
  REQUIRE(failures.size() == 2);
  CHECK(failures[0].attributes.at("message") == "because of mismatch (" + by + ")");
  CHECK(Has(failures[0].text, "verdict: " + by + "\n"));
  CHECK(failures[1].attributes.at("message") == "because of mismatch (bug)");

  diagnose.push_back("--json");
  ran = Cppool(diagnose, CPPOOL_FAKE_DAEMON);
  for (const std::string& line : ran.lines) {
    const Json cell = Json::parse(line);
    if (cell.contains("summary")) CHECK(cell["summary"]["verdicts"] == Json({{"bug", 1}, {"polluted", 1}}));
    CHECK(cell.contains("verdict") == (cell.value("status", "") == "failed"));
    if (cell.value("name", "") != victim) continue;
    const Json& verdict = cell["verdict"];
    CHECK(verdict["kind"] == "polluted");
    CHECK(verdict["text"] == by);
    CHECK(verdict["culprits"] == Json({"mqa_192_128 fp16 sbhd p2p W=2", "gqa_64 fp16 bshd a2a W=2"}));
    CHECK(verdict["minimal"] == true);
    const std::vector<Json> answers = Answers(verdict["repeat"]);
    REQUIRE(answers.size() == 3);
    CHECK(answers[1]["status"] == "passed");
    CHECK(answers[2]["status"] == "failed");
  }
  // Earlier cells may also cause a daemon's death. With --diagnose the cell is then not retried in a new
  // daemon, where it would pass.
  std::vector<std::string> dies = words;
  dies.insert(dies.end(), {"--param", "dies=true", "--junit", junit});
  ran = Cppool(dies, CPPOOL_FAKE_DAEMON);
  CHECK(ran.Last() == "18 passed, 1 failed, 0 skipped, 1 flaky");
  CHECK(ran.Prints("FLAKY " + victim + "\n  flaky (passed at attempt 2)\n  attempt 1: cppoold (pid "));
  dies.push_back("--diagnose");
  ran = Cppool(dies, CPPOOL_FAKE_DAEMON);
  CHECK(ran.Last() == "18 passed, 2 failed, 0 skipped");
  CHECK(ran.Prints("ERROR " + victim + "\n"));
  CHECK(ran.Prints("\n  verdict: " + by + "\n"));
  CHECK_FALSE(ran.Prints("flaky"));

  const std::string progress = Cppool(diagnose, CPPOOL_FAKE_DAEMON, true).err;
  CHECK(Has(progress, victim + ": fresh pool 4, after 7 cells"));
}
