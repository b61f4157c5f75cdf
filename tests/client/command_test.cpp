// The command with a fake daemon: its output, files and exit codes.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "client/command/command.h"
#include "client/command/junit.h"
#include "tests/child.h"
#include "tests/client/command_support.h"
#include "tests/client/xml.h"

using namespace cppool::test;
using cppool::Json;

TEST_CASE(
    "a suite skips cells for which the machine has too few GPUs, and a single case of that kind fails") {
  TemporaryFolder folder;
  const std::string daemon = Wrapped(folder, "--start two_devices");
  Ran ran = Cppool({"run", "--suite", "smoke"}, daemon);
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "8 passed, 0 failed, 12 skipped");
  CHECK(ran.Prints(
      "skipped 12: world size 4 needs as many GPUs, and this machine has fewer (see --transport peer)"));
  ran = Cppool({"run", "--world-size", "4"}, daemon);
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
}

TEST_CASE("the description of a world counts its devices, not its ranks") {
  auto described = [](const std::vector<std::pair<std::string, std::string>>& devices) {
    Json hello = {{"backend", "cuda"}, {"transport", "peer"}, {"devices", Json::array()}};
    for (const auto& [name, uuid] : devices) hello["devices"].push_back({{"name", name}, {"uuid", uuid}});
    return cppool::command::DescribeWorld(hello).substr(std::string("backend cuda, transport peer, ").size());
  };
  CHECK(described({{"A", "1"}, {"A", "2"}}) == "2 x A");
  CHECK(described({{"A", "1"}, {"A", "2"}, {"A", "1"}}) == "3 ranks on 2 x A");
  CHECK(described({{"A", "1"}, {"B", "2"}, {"A", "1"}, {"B", "2"}}) == "4 ranks on 1 x A, 1 x B");
  CHECK(described({{"cpu", ""}, {"cpu", ""}}) == "2 ranks on cpu");
  CHECK(described({{"cpu", ""}}) == "1 rank on cpu");
}

TEST_CASE("a run of one case prints its outcome, the backend and the counts, and sets the exit code") {
  Ran ran = Cppool({"run"});
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "1 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(1) == "world size 2: backend host, transport host, 2 ranks on cpu");
  CHECK(ran.Prints("passed attention W=2 in 1.500 ms"));
  CHECK(ran.err.empty());

  ran = Cppool({"run", "--world-size", "4", "--param", "do=skip"});
  CHECK(ran.code == 1);  // nothing ran
  CHECK(ran.Last() == "0 passed, 0 failed, 1 skipped");
  CHECK(ran.Last(1) == "world size 4: backend host, transport host, 4 ranks on cpu");
  CHECK(ran.Prints("skipped 1: because of unsupported"));

  ran = Cppool({"run", "--param", "do=error"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
  ran = Cppool({"run", "--param", "do=die"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
  CHECK(ran.Prints("the last words"));
  ran = Cppool({"run", "--param", "do=fatal"});
  CHECK(ran.code == 1);
  CHECK(ran.Last(1) == "world size 2: backend host, transport host, 2 ranks on cpu");
}

TEST_CASE("a failure prints the failed checks and a command that repeats the case") {
  Ran ran = Cppool({"run", "--param", "do=fail", "--param", "text=it's $HOME", "--param",
                    "window_size=[-1,0]", "--deadline", "5"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("FAILED attention W=2\n"));
  CHECK(
      ran.Prints("dq of rank 1 against oracle: max_abs_err nan, rel_err 0.5, tolerance 0.01; worst at head "
                 "3, token 17: got nan, "
                 "wanted 1.5; 64 elements are out: head 3\n"));
  CHECK_FALSE(ran.Prints("out of rank 0"));
  CHECK(ran.Prints("because of mismatch"));
  std::string repeat;
  for (const std::string& line : ran.lines)
    if (line.rfind("  repeat: cppool ", 0) == 0) repeat = line.substr(17);
  REQUIRE_FALSE(repeat.empty());

  const Child child = RunChild(std::string(CPPOOL_COMMAND) + " " + repeat + " --json 2>/dev/null");
  CHECK(child.exit_code == 1);
  Json repeated = Json::parse(Lines(child.output).at(0));
  CHECK(repeated["status"] == "failed");
  CHECK(repeated["params"] == Json({{"do", "fail"}, {"text", "it's $HOME"}, {"window_size", {-1, 0}}}));
  CHECK(Has(repeated["repeat"], "--deadline 5"));
  CHECK(repeated["repeat"].get<std::string>().starts_with(CPPOOL_COMMAND " run "));
}

TEST_CASE("a suite runs every cell in the pool of its world size") {
  TemporaryFolder folder;
  std::string daemon = Wrapped(folder, "--count '" + folder.File("count") + "'");
  Ran ran = Cppool({"run", "--suite", "matrix", "--filter", "dtype=bf16"}, daemon);
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "576 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(1) == "own: 144 of 144 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(2) == "matrix: 432 of 432 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(3).rfind(
            "world size 2: backend host, transport host, 2 ranks on cpu; world size 4: backend host, "
            "transport host, 4 ranks on cpu; world size 6: ",
            0) == 0);
  CHECK(Lines(ReadFile(folder.File("count"))).size() == 4);  // one daemon per world size

  ran = Cppool({"run", "--suite", "smoke", "--param", "do=skip", "--world-size", "8"});
  CHECK(ran.code == 1);
  CHECK(ran.Last(1).rfind("world size 8: ", 0) == 0);
  CHECK(ran.Prints("skipped 20: because of unsupported"));
}

TEST_CASE("run --list prints the cells, their commands and whether they would run, and runs nothing") {
  TemporaryFolder folder;
  Ran ran = Cppool({"run", "--suite", "essential", "--list", "--max-seqlen", "256", "--backend", "host",
                    "--devices", "1,3", "--transport", "nccl"});
  CHECK(ran.code == 0);
  REQUIRE(ran.lines.size() == 121);
  CHECK(ran.Last() == "120 would run, 0 would fail, 0 would be skipped");
  CHECK(ran.lines[0].find("flash:cp_2_0 bf16 sbhd p2p W=2: cppool run --world-size 2 --backend host "
                          "--transport nccl --devices 1,3 --daemon ") == 0);
  for (std::size_t i = 0; i < 120; ++i) CHECK(Has(ran.lines[i], "max_seqlen_q=256 "));
  CHECK(ran.Prints("--param 'window_size=[8,0]'"));  // 128 at 4096 tokens

  const std::vector<std::string> by_schedule = {"run",    "--suite", "smoke",
                                                "--list", "--param", "do=by_schedule"};
  ran = Cppool(by_schedule);
  CHECK(ran.code == 0);
  CHECK(ran.Prints("\n  would be skipped: because of unsupported\n"));
  CHECK(ran.Last() == "15 would run, 0 would fail, 5 would be skipped");
  ran = Cppool({"run", "--list", "--param", "do=error"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("\n  would fail: because of invalid_request\n"));

  // If a daemon cannot start, the list gives the cause; the cells are listed nevertheless.
  ran = Cppool({"run", "--suite", "smoke", "--list"}, Wrapped(folder, "--start two_devices"));
  CHECK(ran.code == 0);
  CHECK(ran.Prints("  would be skipped: world size 4 needs as many GPUs, and this machine has fewer"));
  CHECK(ran.Last() == "8 would run, 0 would fail, 12 would be skipped");
  ran = Cppool({"run", "--suite", "smoke", "--list"}, Wrapped(folder, "--start usage"));
  CHECK(ran.Prints("    cuda: 4 ranks need 4 devices, 1 is there\n"));
  ran = Cppool({"run", "--suite", "smoke", "--list"}, "/nowhere");
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 would run, 20 would fail, 0 would be skipped");
  CHECK(ran.lines.size() == 41);

  ran = Cppool({"run", "--suite", "matrix", "--list", "--json", "--filter", "row=flash:cp_1_2", "--param",
                "seed=7", "--param", "do=by_schedule"});
  REQUIRE(ran.lines.size() == 33);
  CHECK(Json::parse(ran.lines.back()) == Json({{"summary", {{"run", 24}, {"fail", 0}, {"skip", 8}}}}));
  ran.lines.pop_back();
  Json first = Json::parse(ran.lines[0]);
  CHECK(first["world_size"] == 2);
  CHECK(first["rows"] == Json({"flash:cp_1_2", "fused:cp_1_5"}));
  CHECK(first["suite"] == "matrix");
  CHECK(first["params"]["seed"] == 7);
  int skipped = 0;
  for (const std::string& line : ran.lines) {
    const Json cell = Json::parse(line);
    const bool gathers = cell["params"]["cp_comm_type"] == "all_gather";
    skipped += gathers;
    CHECK(cell["would"] == (gathers ? "skip" : "run"));
    CHECK(cell["error"] == (gathers ? Json("because of unsupported") : Json()));
  }
  CHECK(skipped == 8);
}

TEST_CASE("a cell whose daemon died is an error, even if there are too few devices for a new daemon") {
  TemporaryFolder folder;
  const Ran ran =
      Cppool({"run", "--suite", "smoke", "--filter", "world_size=2", "--param", "do=die", "--json"},
             Wrapped(folder, "--start once --file '" + folder.File("started") + "'"));
  CHECK(ran.code == 1);
  const Json first = Json::parse(ran.lines.at(0));
  CHECK(first["status"] == "error");
  CHECK(first["attempts"] == 2);
  CHECK(Has(first["error"], "exited with code 3; then cppoold"));
  const Json second = Json::parse(ran.lines.at(1));
  CHECK(second["status"] == "error");
  CHECK(second["attempts"].is_null());
}

TEST_CASE("a suite ends with a table of counts by axis and the worst errors") {
  Ran ran = Cppool({"run", "--suite", "matrix", "--param", "do=by_schedule", "--filter", "row=flash:cp_1_2",
                    "--filter", "row=alibi_causal"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "18 passed, 9 failed, 9 skipped");
  CHECK(ran.Last(1) == "own: 2 of 4 passed, 1 failed, 1 skipped");
  CHECK(ran.Last(2) == "matrix: 16 of 32 passed, 8 failed, 8 skipped");
  auto row = [&](const std::string& start) {  // the counts of the line that begins with `start`
    for (const std::string& line : ran.lines) {
      if (line.rfind(start, 0) != 0) continue;
      std::istringstream counts(line.substr(start.size()));
      std::vector<int> numbers;
      for (int number; counts >> number;) numbers.push_back(number);
      return numbers;
    }
    return std::vector<int>();
  };
  using Counts = std::vector<int>;
  CHECK(row("schedule    p2p ") == Counts{0, 9, 0});
  CHECK(row("            all_gather ") == Counts{0, 0, 9});
  CHECK(row("            a2a+p2p ") == Counts{9, 0, 0});
  CHECK(row("bias        no_bias ") == Counts{16, 8, 8});
  CHECK(row("            alibi ") == Counts{2, 1, 1});
  CHECK(row("window      left ") == Counts{16, 8, 8});
  CHECK(row("world size  2 ") == Counts{9, 9, 8});
  for (const char* axis : {"format ", "mask ", "softmax ", "heads ", "head dim ", "dtype "}) {
    INFO(axis);
    CHECK(Has(ran.out, "\n" + std::string(axis)));
  }
  // a2a has the ratios 1.25 and null, a2a+p2p 0.5 and null; ratios against no_cp are not included.
  CHECK(ran.Prints("worst error against fp64, as a multiple of plain attention's:\n"));
  CHECK(ran.Prints("  out                 1.25  flash:cp_1_2 bf16 bshd a2a W=2\n"));
  CHECK(ran.Prints("  dq                     -  flash:cp_1_2 bf16 bshd a2a W=2\n"));

  ran = Cppool({"run", "--suite", "matrix", "--param", "do=by_schedule", "--filter", "row=flash:cp_1_2",
                "--filter", "row=alibi_causal", "--json"});
  CHECK_FALSE(ran.Prints("schedule    p2p"));
  const Json summary = Json::parse(ran.Last())["summary"];
  CHECK(summary["suites"]["own"] == Json({{"passed", 2}, {"failed", 1}, {"skipped", 1}, {"flaky", 0}}));
  CHECK(summary["worst_ratio"]["out"] == Json({{"ratio", 1.25}, {"cell", "flash:cp_1_2 bf16 bshd a2a W=2"}}));
  CHECK(summary["worst_ratio"]["dq"]["ratio"] == nullptr);

  CHECK_FALSE(Cppool({"run"}).Prints("schedule"));  // no table for a single case
}

TEST_CASE(
    "run --fault starts the daemon with --allow-faults, sends the fault, and is part of the command that "
    "repeats the case") {
  const std::string fault = "flip_bit:1:forward/p2p step 2 of 2: keys and values";
  Ran ran = Cppool({"run", "--param", "do=echo", "--json", "--fault", fault});
  const Json line = Json::parse(ran.lines.at(0));
  CHECK(line["answer"]["request"]["fault"] == Json({{"kind", "flip_bit"},
                                                    {"rank", 1},
                                                    {"count", 1},
                                                    {"stage", "forward/p2p step 2 of 2: keys and values"}}));
  const Json arguments = line["answer"]["surroundings"]["arguments"];
  CHECK(std::find(arguments.begin(), arguments.end(), "--allow-faults") != arguments.end());
  CHECK(Has(line["repeat"], "--fault '" + fault + "'"));
  ran = Cppool({"run", "--param", "do=echo", "--json", "--fault", "stall"});
  CHECK(Json::parse(ran.lines.at(0))["answer"]["request"]["fault"] ==
        Json({{"kind", "stall"}, {"rank", 0}, {"count", 1}}));
}

TEST_CASE("values of one parameter make a case each, in run as in bench") {
  Ran ran = Cppool({"run", "--list", "--json", "--param", "max_seqlen_q=8k,16k", "--param",
                    "window_size=[-1,0],[8,0]", "--param", "do=pass"});
  CHECK(ran.code == 0);
  REQUIRE(ran.lines.size() == 5);
  std::vector<Json> params;
  for (int i = 0; i < 4; ++i) params.push_back(Json::parse(ran.lines[static_cast<std::size_t>(i)])["params"]);
  CHECK(params[0] == Json({{"do", "pass"}, {"max_seqlen_q", 8192}, {"window_size", {-1, 0}}}));
  CHECK(params[1]["window_size"] == Json({8, 0}));
  CHECK(params[3] == Json({{"do", "pass"}, {"max_seqlen_q", 16384}, {"window_size", {8, 0}}}));
  CHECK(Json::parse(ran.lines[3])["name"] == "attention W=2 max_seqlen_q=16384 window_size=[8,0]");

  ran = Cppool({"run", "--param", "do=pass,fail"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "1 passed, 1 failed, 0 skipped");
  CHECK(ran.Prints("FAILED attention W=2 do=fail\n"));

  ran = Cppool({"run", "--suite", "smoke", "--param", "seed=1,2", "--list"});
  CHECK(ran.Last() == "40 would run, 0 would fail, 0 would be skipped");
}

TEST_CASE("run --dump and --trace of several cells name a folder with an entry for each cell") {
  const TemporaryFolder folder;
  const std::string dumps = folder.File("dumps"), traces = folder.File("new/traces");
  Ran ran = Cppool(
      {"run", "--param", "do=echo", "--param", "seed=1,2", "--dump", dumps, "--trace", traces, "--json"});
  REQUIRE(ran.code == 0);
  const Json one = Json::parse(ran.lines.at(0)), two = Json::parse(ran.lines.at(1));
  CHECK(one["answer"]["request"]["dump"] == dumps + "/attention-W2-seed1");
  CHECK(two["answer"]["request"]["dump"] == dumps + "/attention-W2-seed2");
  CHECK(two["answer"]["request"]["trace"] == traces + "/attention-W2-seed2.json");
  CHECK(std::filesystem::is_directory(traces));
  // Repeated alone it would write into the folder of all.
  CHECK_FALSE(Has(one["repeat"], "--dump"));
  CHECK_FALSE(Has(one["repeat"], "--trace"));

  // Also where filters leave one cell of the suite.
  const std::string name = "mha_128 fp16 bshd p2p W=2";
  ran = Cppool({"run", "--suite", "smoke", "--filter", "name=" + name, "--param", "do=echo", "--dump", dumps,
                "--json"});
  CHECK(Json::parse(ran.lines.at(0))["answer"]["request"]["dump"] == dumps + "/mha_128-fp16-bshd-p2p-W2");

  const std::string file = folder.File("file");
  std::ofstream(file) << "mine";
  for (const char* option : {"--dump", "--trace", "--failures"}) {
    ran = Cppool({"run", "--param", "seed=1,2", option, file}, "/no/daemon");
    CHECK(ran.code == 2);
    CHECK(Has(ran.err, std::string(option) + ": cannot make the folder \"" + file + "\": "));
  }
  CHECK(ReadFile(file) == "mine");
}

TEST_CASE("run --failures runs each failed cell once more with dump, trace and log, and says how it ended") {
  const TemporaryFolder folder;
  const std::string kept = folder.File("kept");
  Ran ran = Cppool({"run", "--param", "do=pass,fail,skip", "--failures", kept, "--json"});
  CHECK(ran.code == 1);
  CHECK_FALSE(Json::parse(ran.lines.at(0)).contains("again"));
  CHECK_FALSE(Json::parse(ran.lines.at(2)).contains("again"));
  const Json again = Json::parse(ran.lines.at(1))["again"];
  CHECK(again["status"] == "failed");
  CHECK(again["folder"] == kept + "/attention-W2-dofail");
  CHECK(again["error"] == Json::parse(ran.lines.at(1))["error"]);
  CHECK_FALSE(std::filesystem::exists(kept + "/attention-W2-dopass"));

  // It fails unless it is dumped, and unless it is traced.
  for (const char* key : {"dump", "trace"}) {
    ran = Cppool(
        {"run", "--param", "do=fail_without", "--param", std::string("key=") + key, "--failures", kept});
    CHECK(ran.code == 1);
    CHECK(ran.Prints("  again: passed; in " + kept + "/attention-W2\n"));
    CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
  }

  ran = Cppool({"run", "--param", "do=say_and_fail", "--param", "text=\"once\\n\"", "--failures", kept});
  const std::string log = ReadFile(kept + "/attention-W2/log.txt");
  CHECK(Has(log, "[attention W=2] once\n"));
  CHECK(Has(log, "[attention W=2] failed: "));

  // The daemon dies each time: the next one has the cell again.
  ran = Cppool({"run", "--param", "do=die", "--retries", "0", "--failures", kept});
  CHECK(ran.Prints("  again: error; in " + kept + "/attention-W2\n"));

  ran = Cppool({"run", "--failures", kept, "--diagnose"});
  CHECK(ran.code == 2);
}

TEST_CASE("run --failures keeps at most 20 cells and 2 GiB") {
  const TemporaryFolder folder;
  const std::string kept = folder.File("kept");
  Ran ran = Cppool({"run", "--param", "do=fail", "--param",
                    "seed=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22", "--failures", kept});
  CHECK(ran.Last() == "0 passed, 22 failed, 0 skipped");
  CHECK(ran.Prints("  again: not run: --failures keeps at most 20 cells and 2 GiB\n"));
  const std::filesystem::directory_iterator entries(kept);
  CHECK(std::distance(begin(entries), end(entries)) == 20);

  // Of an earlier run: a dump of which most is a hole.
  const std::string dump = kept + "/attention-W2/dump";
  std::filesystem::create_directories(dump);
  std::ofstream(dump + "/q.npy") << "q";
  std::filesystem::resize_file(dump + "/q.npy", (std::uintmax_t{2} << 30) + 1);
  ran = Cppool({"run", "--param", "do=fail", "--failures", kept});
  CHECK(ran.Prints("/attention-W2; its dump is not kept: with it " + kept + " would have more than 2 GiB\n"));
  CHECK_FALSE(std::filesystem::exists(dump));
  CHECK(std::filesystem::exists(kept + "/attention-W2/log.txt"));
}

TEST_CASE(
    "run --perturb, --dump, --inputs and --trace are sent to the daemon and are part of the command that "
    "repeats the case") {
  Ran ran = Cppool({"run", "--param", "do=echo", "--json", "--perturb", "9223372036854775807", "--dump",
                    "a folder", "--inputs", "/in", "--trace", "t.json"});
  CHECK(ran.code == 0);
  const Json one = Json::parse(ran.lines.at(0));
  const Json request = one["answer"]["request"];
  CHECK(request["perturb"] == 9223372036854775807u);
  CHECK(request["dump"] == (std::filesystem::current_path() / "a folder").string());
  CHECK(request["inputs"] == "/in");
  CHECK(request["trace"] == (std::filesystem::current_path() / "t.json").string());
  CHECK(Has(one["repeat"], " --perturb 9223372036854775807 --dump 'a folder' --inputs /in --trace t.json "));

  ran = Cppool({"run", "--suite", "smoke", "--perturb", "7", "--param", "do=echo", "--json"});
  CHECK(Json::parse(ran.lines.at(19))["answer"]["request"]["perturb"] == 7);
  CHECK_FALSE(Json::parse(ran.lines.at(19))["answer"]["request"].contains("dump"));
}

TEST_CASE("run --trace says before it starts a daemon that the file cannot be written, and what to do") {
  for (const auto& [file, why] : std::map<std::string, std::string>{
           {"/nowhere/t.json",
            "cannot write \"/nowhere/t.json\": there is no folder /nowhere: make it, or name a file "
            "elsewhere"},
           {"/tmp", "cannot write \"/tmp\": it is a folder: name a file in it"},
           {"/dev/null", "it exists and is no regular file: name another one"}}) {
    const Ran ran = Cppool({"run", "--trace", file}, "/no/daemon");
    INFO(ran.err);
    CHECK(ran.code == 2);
    CHECK(Has(ran.err, why));
  }
}

TEST_CASE("run --json prints an object for each case, then the summary") {
  Ran ran = Cppool({"run", "--suite", "smoke", "--json"});
  CHECK(ran.code == 0);
  REQUIRE(ran.lines.size() == 21);
  Json first = Json::parse(ran.lines[0]);
  CHECK(first["status"] == "passed");
  CHECK(first["attempts"] == 1);
  CHECK(first["answer"]["wall_ms"] == 1.5);
  CHECK(first["error"] == nullptr);
  Json summary = Json::parse(ran.Last())["summary"];
  CHECK(summary["passed"] == 20);
  CHECK(Has(ran.err, "20 passed, 0 failed, 0 skipped\n"));  // as text, on stderr
  CHECK(summary["failed"] == 0);
  CHECK(summary["skipped"] == 0);
  CHECK(summary["worlds"][0]["backend"] == "host");

  ran = Cppool({"run", "--param", "do=die", "--json"});
  CHECK(ran.code == 1);
  Json died = Json::parse(ran.lines.at(0));
  CHECK(died["status"] == "error");
  CHECK(died["answer"] == nullptr);
  CHECK(Has(died["error"], "exited with code 3"));
  CHECK(Json::parse(ran.Last())["summary"]["failed"] == 1);
}

namespace {

// The words of a run of one case whose daemon crashes at the first request and does `then` at the next.
std::vector<std::string> CrashOnce(const TemporaryFolder& folder, const std::string& then,
                                   const std::vector<std::string>& more = {}) {
  std::filesystem::remove(folder.File("marker"));
  std::vector<std::string> words = {"run",
                                    "--param",
                                    "do=crash_once",
                                    "--param",
                                    "then=" + then,
                                    "--param",
                                    "marker=" + folder.File("marker")};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// How often a text has a part.
int Times(const std::string& text, const std::string& part) {
  int times = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++times;
  return times;
}

}  // namespace

TEST_CASE(
    "a crash that does not come back is flaky: reported with its rank, stage and stack, and the run fails") {
  TemporaryFolder folder;
  const std::string junit = folder.File("junit.xml");
  const std::string crash =
      "exited with code 3: rank 1 crashed in stage 'forward/attend', stack: Attend < Run\n";
  for (const char* how : {"--quiet", "--verbose"}) {
    const Ran ran = Cppool(CrashOnce(folder, "pass", {how, "--junit", junit}));
    INFO(ran.out);
    CHECK(ran.code == 1);
    CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
    CHECK(ran.out.rfind("FLAKY attention W=2\n  flaky (passed at attempt 2)\n  attempt 1: cppoold (pid ",
                        0) == 0);
    CHECK(Times(ran.out, crash) == 1);
    CHECK(Times(ran.out, "rank 1 crashed") == 1);
    const XmlNode suite = JunitSuiteIn(ReadFile(junit));
    CHECK(suite.attributes.at("failures") == "1");
    const XmlNode failure = suite.children.at(0).children.at(0);
    CHECK(failure.name == "failure");
    CHECK(failure.attributes.at("message") == "flaky (passed at attempt 2)");
    CHECK(Has(failure.text, crash));
  }

  Ran ran = Cppool(CrashOnce(folder, "pass", {"--json"}));
  CHECK(ran.code == 1);
  const Json cell = Json::parse(ran.lines.at(0));
  CHECK(cell["status"] == "flaky");
  CHECK(cell["flaky"] == "flaky (passed at attempt 2)");
  CHECK(cell["attempts"] == 2);
  CHECK(cell["answer"]["status"] == "passed");
  REQUIRE(cell["lost"].size() == 1);
  CHECK(cell["lost"][0]["crash"]["rank"] == 1);
  CHECK(cell["lost"][0]["crash"]["stage"] == "forward/attend");
  CHECK(cell["lost"][0]["crash"]["stack"] == Json({"Attend", "Run"}));
  const Json summary = Json::parse(ran.Last())["summary"];
  CHECK(summary["flaky"] == 1);
  CHECK(summary["passed"] == 0);

  // A daemon that dies every time is a failure.
  ran = Cppool({"run", "--param", "do=crash", "--json"});
  CHECK(Json::parse(ran.lines.at(0))["status"] == "error");
  CHECK(Json::parse(ran.lines.at(0))["attempts"] == 2);
  CHECK_FALSE(Json::parse(ran.lines.at(0)).contains("flaky"));
  CHECK(Json::parse(ran.Last())["summary"]["flaky"] == 0);
}

TEST_CASE("a crash, and then no answer in time, is flaky and fails the run") {
  const TemporaryFolder folder;
  Ran ran = Cppool(CrashOnce(folder, "hang", {"--deadline", "0.2", "--retries", "1"}));
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
  CHECK(ran.out.starts_with("FLAKY attention W=2\n  flaky (timeout at attempt 2)\n"));
  CHECK(Times(ran.out, "rank 1 crashed in stage 'forward/attend', stack: Attend < Run; then cppoold") == 1);
  ran = Cppool(CrashOnce(folder, "hang", {"--deadline", "0.2", "--json"}));
  const Json cell = Json::parse(ran.lines.at(0));
  CHECK(cell["status"] == "flaky");
  CHECK(cell["flaky"] == "flaky (timeout at attempt 2)");
  CHECK(cell["lost"].at(0)["crash"]["rank"] == 1);
}

TEST_CASE("run --list: a crash that does not come back is flaky, as in a run") {
  const TemporaryFolder folder;
  Ran ran = Cppool(CrashOnce(folder, "pass", {"--list"}));
  CHECK(ran.code == 1);
  CHECK(ran.Prints("\n  flaky (passed at attempt 2)\n    attempt 1: cppoold (pid "));
  CHECK(Times(ran.out, "rank 1 crashed in stage 'forward/attend', stack: Attend < Run\n") == 1);
  CHECK(ran.Last() == "0 would run, 0 would fail, 0 would be skipped, 1 flaky");
  ran = Cppool(CrashOnce(folder, "pass", {"--list", "--json"}));
  CHECK(ran.code == 1);
  const Json cell = Json::parse(ran.lines.at(0));
  CHECK(cell["would"] == "flaky");
  CHECK(cell["flaky"] == "flaky (passed at attempt 2)");
  CHECK(cell["lost"].at(0)["crash"]["rank"] == 1);
  CHECK(Json::parse(ran.Last())["summary"]["flaky"] == 1);
  CHECK(Cppool(CrashOnce(folder, "pass", {"--list", "--retries", "1"})).code == 0);
}

TEST_CASE("run --retries allows a flaky pass, and asks as often as it says") {
  TemporaryFolder folder;
  const std::string junit = folder.File("junit.xml");
  Ran ran = Cppool(CrashOnce(folder, "pass", {"--retries", "1", "--junit", junit}));
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
  CHECK(ran.Prints("FLAKY attention W=2\n  flaky (passed at attempt 2)\n"));
  CHECK(ran.Prints("stack: Attend < Run"));
  const XmlNode suite = JunitSuiteIn(ReadFile(junit));
  CHECK(suite.attributes.at("failures") == "0");
  const XmlNode flaky = suite.children.at(0).children.at(0);
  CHECK(flaky.name == "flakyFailure");
  CHECK(flaky.attributes.at("message") == "flaky (passed at attempt 2)");
  CHECK(flaky.children.at(0).name == "stackTrace");
  CHECK(Has(flaky.children.at(0).text, "stack: Attend < Run"));

  ran = Cppool(CrashOnce(folder, "pass", {"--retries", "0"}));
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
  // What did not pass in the end is no pass.
  for (const char* then : {"fail", "skip"}) {
    ran = Cppool(CrashOnce(folder, then, {"--retries", "5"}));
    CHECK(ran.code == 1);
    CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
    CHECK(ran.Prints(std::string("flaky (") + then + (then == std::string("skip") ? "ped" : "ed") +
                     " at attempt 2)"));
  }
  const std::string daemon = Wrapped(folder, "--count '" + folder.File("count") + "'");
  CHECK(Cppool({"run", "--param", "do=die", "--retries", "3"}, daemon).code == 1);
  CHECK(Lines(ReadFile(folder.File("count"))).size() == 4);
}

TEST_CASE("a flaky cell has a column in the table of a suite, and is in its progress") {
  TemporaryFolder folder;
  const Ran ran = Cppool(
      {"run", "--suite", "smoke", "--param", "do=crash_once", "--param", "marker=" + folder.File("marker")},
      CPPOOL_FAKE_DAEMON, true);
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "19 passed, 0 failed, 0 skipped, 1 flaky");
  CHECK(ran.Prints("passed  failed  skipped   flaky\n"));
  CHECK(std::regex_search(ran.out, std::regex("\nworld size  2 +7 +0 +0 +1\n")));
  CHECK(Has(ran.err, " 0 failed, 1 flaky, "));
}

TEST_CASE("run --times runs each cell so often, and one that ends differently counts once, as flaky") {
  TemporaryFolder folder;
  const std::string log = folder.File("log"), junit = folder.File("junit.xml");
  std::vector<std::string> words = {"run",     "--times",    "4",       "--param", "do=nth",
                                    "--param", "log=" + log, "--junit", junit};
  const auto with = [&](std::vector<std::string> more) {
    std::filesystem::remove(log);
    more.insert(more.begin(), words.begin(), words.end());
    return Cppool(more);
  };
  Ran ran = with({"--param", "ends=[pass,pass,fail,pass]"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
  CHECK(ran.Prints("FLAKY attention W=2\n  flaky (failed 1 of 4)\n  dq of rank 1 against oracle"));
  CHECK(Lines(ReadFile(log)).size() == 4);
  const XmlNode one = JunitSuiteIn(ReadFile(junit)).children.at(0);
  CHECK(one.children.at(0).attributes.at("message") == "because of mismatch (flaky (failed 1 of 4))");
  // A failed check is never asked again: retries do not allow it.
  CHECK(with({"--param", "ends=[pass,pass,fail,pass]", "--retries", "1"}).code == 1);
  ran = with({"--param", "ends=[fail]"});
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
  CHECK(Lines(ReadFile(log)).size() == 4);
  ran = with({"--param", "ends=[pass]"});
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "1 passed, 0 failed, 0 skipped");
  // A death counts among the attempts.
  ran = with({"--param", "ends=[pass,crash,pass]"});
  CHECK(ran.Prints("\n  flaky (failed 1 of 5)\n  attempt 1: "));
  CHECK(ran.code == 1);
  CHECK(with({"--param", "ends=[pass,crash,pass]", "--retries", "1"}).code == 0);
  ran = with({"--param", "ends=[fail,pass]", "--fail-fast", "--param", "seed=1,2"});
  CHECK(ran.Last(1).rfind("stopped after the first failure (--fail-fast) with 1 of 2 cells done", 0) == 0);
  CHECK(Lines(ReadFile(log)).size() == 4);
  ran = Cppool({"run", "--suite", "smoke", "--times", "2", "--param", "do=nth", "--param", "ends=[pass]",
                "--param", "log=" + folder.File("suite")});
  CHECK(ran.Last() == "20 passed, 0 failed, 0 skipped");
  CHECK(Lines(ReadFile(folder.File("suite"))).size() == 40);
  CHECK(Cppool({"run", "--times", "2", "--list"}).code == 2);
}

TEST_CASE("run --until-fail runs all cells again until one fails, or so often") {
  TemporaryFolder folder;
  const std::string log = folder.File("log");
  const auto run = [&](const std::string& ends, std::vector<std::string> more) {
    std::filesystem::remove(log);
    more.insert(more.begin(), {"run", "--until-fail", "--param", "do=nth", "--param", "ends=" + ends,
                               "--param", "log=" + log, "--param", "seed=1,2"});
    return Cppool(more);
  };
  Ran ran = run("[pass,pass,pass,pass,fail,pass]", {});  // the first cell, in round 3
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "1 passed, 0 failed, 0 skipped, 1 flaky");
  CHECK(ran.Last(1) == "stopped after the first failure, in round 3 (--until-fail), with 2 of 2 cells done");
  CHECK(ran.Prints("FLAKY attention W=2 seed=1\n  flaky (failed 1 of 3)\n"));
  CHECK(Lines(ReadFile(log)).size() == 5);
  ran = run("[pass]", {"--times", "3"});
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "2 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(1) == "no failure in 3 rounds (--until-fail)");
  CHECK(Lines(ReadFile(log)).size() == 6);
  ran = run("[fail]", {"--times", "3"});
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");
  CHECK(Lines(ReadFile(log)).size() == 1);
  ran = run("[pass]", {"--limit", "0.8"});
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "2 passed, 0 failed, 0 skipped");
  CHECK(Lines(ReadFile(log)).size() > 2);
  ran = run("[skip]", {});  // does not go on for ever
  CHECK(ran.code == 1);
  CHECK(Lines(ReadFile(log)).size() == 2);
  CHECK(Cppool({"run", "--until-fail", "--list"}).code == 2);
  CHECK(Cppool({"run", "--until-fail", "--watch", "--load", "x.so"}).code == 2);
  CHECK(Cppool({"run", "--retries", "1", "--diagnose"}).code == 2);
}

TEST_CASE("a case that hangs until the run's limit has failed, however often it passed before") {
  const TemporaryFolder folder;
  const auto run = [&](const std::string& ends, std::vector<std::string> more,
                       const std::string& daemon = CPPOOL_TEST_DAEMON) {
    std::filesystem::remove(folder.File("log"));
    more.insert(more.begin(), {"run", "--param", "do=nth", "--param", "ends=" + ends, "--param",
                               "log=" + folder.File("log"), "--limit", "6"});
    return Cppool(more, daemon);
  };
  Ran ran = run("[pass,pass,pass,hang]", {"--until-fail"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints(
      "FLAKY attention W=2\n  flaky (failed 1 of 4)\n  ended by the limit of the run (--limit), "));
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
  CHECK(ran.Last(1) == "stopped after the first failure, in round 4 (--until-fail), with 1 of 1 cells done");
  // The last of the runs that were asked for.
  ran = run("[pass,hang]", {"--times", "2"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped, 1 flaky");
  // How long a daemon takes to start says nothing about its runs.
  const std::string slow = folder.File("slow");
  std::ofstream(slow) << "#!/bin/sh\nsleep 1\nexec '" << CPPOOL_TEST_DAEMON << "' \"$@\"\n";
  chmod(slow.c_str(), 0755);
  ran = run("[pass,hang]", {"--until-fail"}, slow);
  CHECK(ran.code == 1);
  CHECK(ran.Prints("\n  flaky (failed 1 of 2)\n"));
}

TEST_CASE("a run that the limit cuts short does not count, and a crash before it does") {
  const TemporaryFolder folder;
  const std::string junit = folder.File("junit.xml");
  const auto run = [&](const std::string& ends, std::vector<std::string> more) {
    std::filesystem::remove(folder.File("log"));
    more.insert(more.begin(), {"run", "--param", "do=nth", "--param", "ends=" + ends, "--param",
                               "log=" + folder.File("log"), "--limit", "4", "--param", "wall_ms=60000"});
    return Cppool(more);
  };
  Ran ran = run("[pass,pass,hang]", {"--until-fail"});
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "1 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(1) == "no failure in 2 rounds (--until-fail)");
  // The cell has not run as often as asked: it has not passed.
  ran = run("[pass,hang]", {"--times", "2", "--junit", junit});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(1) == "stopped at the limit of the run (--limit) with 0 of 1 cells done");
  CHECK(JunitSuiteIn(ReadFile(junit)).attributes.at("errors") == "1");
  ran = run("[pass,crash,hang]", {"--until-fail"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("\n  flaky (failed 2 of 3)\n  attempt 1: "));
  CHECK(ran.Prints("rank 1 crashed"));
}

TEST_CASE("a case that the run's limit ends says so") {
  const Ran ran = Cppool({"run", "--param", "do=hang", "--limit", "0.8"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints(
      "ERROR attention W=2\n  ended by the limit of the run (--limit), not by its own deadline of 90 s: "));
  CHECK_FALSE(
      Has(Cppool({"run", "--param", "do=hang", "--deadline", "0.2", "--limit", "60"}).out, "--limit"));
}

TEST_CASE("a daemon that cannot start is started once per world size, and every cell that needs it fails") {
  TemporaryFolder folder;
  Ran ran = Cppool({"run", "--suite", "smoke"},
                   Wrapped(folder, "--start usage --count '" + folder.File("count") + "'"));
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 20 failed, 0 skipped");
  CHECK(ran.Last(1) == "backend none: no daemon answered");
  CHECK(ran.Prints("cuda: 4 ranks need 4 devices, 1 is there"));
  CHECK(Lines(ReadFile(folder.File("count"))).size() == 2);
}

TEST_CASE("JUnit's XML is well-formed for any texts") {
  using cppool::command::JunitCase;
  using Outcome = JunitCase::Outcome;
  std::string nasty =
      "<&>\"' ]]> \x01\x1b[31m \xff\xfe \xc3\x28 \xed\xa0\x80 \xef\xbf\xbf fine: \xc3\xa9 \xf0\x9f\x98\x80";
  nasty += '\0';
  std::vector<JunitCase> cases = {{"g", "passes", Outcome::kPassed, 0.25, "", "", ""},
                                  {"g", nasty, Outcome::kFailed, 1, nasty, "two\nlines" + nasty, ""},
                                  {"g", "errs", Outcome::kError, 2, "m", "d", nasty},
                                  {"g", "skips", Outcome::kSkipped, 0, "reason", "d", ""}};
  std::ostringstream out;
  const std::chrono::system_clock::time_point begin{std::chrono::seconds(86399)};
  cppool::command::WriteJunit(out, {"suite", begin, {}}, cases);
  INFO(out.str());
  XmlNode root = ParseXml(out.str());
  CHECK(root.name == "testsuites");
  const auto& suite = root.children.at(0);
  CHECK(suite.attributes.at("tests") == "4");
  CHECK(suite.attributes.at("failures") == "1");
  CHECK(suite.attributes.at("errors") == "1");
  CHECK(suite.attributes.at("skipped") == "1");
  CHECK(suite.attributes.at("time") == "3.250");
  CHECK(suite.attributes.at("timestamp") == "1970-01-01T23:59:59");
  CHECK_FALSE(suite.attributes.at("hostname").empty());
  std::ostringstream with;
  cppool::command::WriteJunit(with, {"suite", begin, {{"world size 2", nasty}}}, cases);
  const XmlNode property = ParseXml(with.str()).children.at(0).children.at(0).children.at(0);
  CHECK(property.attributes.at("name") == "world size 2");
  CHECK(property.attributes.at("value").find("<&>") == 0);
  REQUIRE(suite.children.size() == 4);
  CHECK(suite.children[0].children.empty());
  CHECK(suite.children[1].children.at(0).name == "failure");
  CHECK(Has(suite.children[1].children.at(0).text, "fine: \xc3\xa9 \xf0\x9f\x98\x80"));
  CHECK(suite.children[1].attributes.at("name").find("<&>\"' ]]> ??[31m ?? ?( ??? ??? fine") == 0);
  CHECK(suite.children[2].children.at(0).name == "error");
  CHECK(suite.children[2].children.at(1).name == "system-err");
  CHECK(suite.children[2].children.at(1).text.find("<&>") == 0);
  CHECK(suite.children[1].children.size() == 1);
  CHECK(suite.children[3].children.at(0).name == "skipped");
  CHECK(suite.children[3].children.at(0).attributes.at("message") == "reason");
}

TEST_CASE("a JUnit report has a test case per cell, in the suite's order") {
  TemporaryFolder folder;
  std::string file = folder.File("out.xml");
  Ran ran = Cppool({"run", "--suite", "smoke", "--junit", file});
  CHECK(ran.code == 0);
  XmlNode suite = JunitSuiteIn(ReadFile(file));
  CHECK(suite.attributes.at("name") == "cppool.smoke");
  CHECK(suite.attributes.at("tests") == "20");
  CHECK(suite.children.at(0).attributes.at("name") + ": " ==
        Cppool({"run", "--suite", "smoke", "--list"})
            .lines.at(0)
            .substr(0, suite.children.at(0).attributes.at("name").size() + 2));

  Cppool({"run", "--param", "do=fail", "--junit", file});
  XmlNode failure = JunitSuiteIn(ReadFile(file)).children.at(0).children.at(0);
  CHECK(failure.name == "failure");
  // Another thread reads the daemon's stderr, possibly after the answer: the run is repeated until the report
  // has it.
  CHECK(Eventually([&] {
    Cppool({"run", "--param", "do=fail", "--junit", file});
    const XmlNode one = JunitSuiteIn(ReadFile(file)).children.at(0);
    return one.children.size() == 2 && one.children[1].name == "system-err" &&
           one.children[1].text.find("the fake daemon has started") != std::string::npos;
  }));
  CHECK(failure.attributes.at("message") == "because of mismatch");
  CHECK(Has(failure.text, "dq of rank 1"));
  CHECK(Has(failure.text, "repeat: cppool run --world-size 2"));
  Cppool({"run", "--param", "do=die", "--junit", file});
  CHECK(JunitSuiteIn(ReadFile(file)).children.at(0).children.at(0).name == "error");
  Cppool({"run", "--param", "do=skip", "--junit", file});
  CHECK(JunitSuiteIn(ReadFile(file)).children.at(0).children.at(0).name == "skipped");

  const Ran unwritable = Cppool({"run", "--junit", "/nowhere/out.xml"});
  CHECK(unwritable.code == 2);
  CHECK(unwritable.err == "cppool: cannot write /nowhere/out.xml: No such file or directory\n");
  const std::string kept = ReadFile(file);
  CHECK(Cppool({"run", "--list", "--junit", file}).code == 2);
  CHECK(ReadFile(file) == kept);
}

TEST_CASE("a number is written with so many digits, and as a dash when it is not finite") {
  CHECK(cppool::command::Fixed(1.25, 1) == "1.2");
  CHECK(cppool::command::Fixed(std::nan(""), 1) == "-");
}

TEST_CASE("invalid arguments are a usage error with exit code 2") {
  auto words = GENERATE(
      as<std::vector<std::string>>{}, std::vector<std::string>{}, std::vector<std::string>{"fly"},
      std::vector<std::string>{"run", "--suite", "everything"},
      std::vector<std::string>{"run", "--junit", ""}, std::vector<std::string>{"run", "--dump", ""},
      std::vector<std::string>{"run", "--trace", ""},
      std::vector<std::string>{"run", "--suite", "smoke", "--filter", "!=bf16"},
      std::vector<std::string>{"run", "--param", "no_value"},
      std::vector<std::string>{"run", "--param", "=3"}, std::vector<std::string>{"run", "--world-size", "0"},
      std::vector<std::string>{"run", "--world-size", "two"},
      std::vector<std::string>{"run", "--filter", "dtype=bf16"},
      std::vector<std::string>{"run", "--suite", "smoke", "--filter", "dtypo=bf16"},
      std::vector<std::string>{"run", "--suite", "smoke", "--case", "mine"},
      std::vector<std::string>{"run", "--suite", "smoke", "--max-seqlen", "-1"},
      std::vector<std::string>{"run", "--max-seqlen", "64"},
      std::vector<std::string>{"run", "--suite", "smoke", "--inputs", "d"},
      std::vector<std::string>{"run", "--perturb", "-1"}, std::vector<std::string>{"run", "--perturb", "x"},
      std::vector<std::string>{"run", "--fault", ""}, std::vector<std::string>{"run", "--fault", ":1"},
      std::vector<std::string>{"run", "--fault", "throw:"},
      std::vector<std::string>{"run", "--fault", "throw:-1"},
      std::vector<std::string>{"run", "--fault", "throw:x:forward"},
      std::vector<std::string>{"run", "--fault", "throw", "--suite", "smoke"},
      std::vector<std::string>{"run", "--world-size", "65"},
      std::vector<std::string>{"run", "--param", "model=\xff"},
      std::vector<std::string>{"run", "--case", "\xff"}, std::vector<std::string>{"run", "--dump", "\xff"},
      std::vector<std::string>{"run", "--deadline", "nan"},
      std::vector<std::string>{"run", "--deadline", "-NAN(1)"},
      std::vector<std::string>{"bench", "--deadline", "nan"},
      std::vector<std::string>{"bench", "--param", "model=bf16,\xff"},
      std::vector<std::string>{"run", "--transport", "pigeon"},
      std::vector<std::string>{"run", "--deadline", "0"}, std::vector<std::string>{"run", "--backend", "tpu"},
      std::vector<std::string>{"run", "--unknown"},
      std::vector<std::string>{"bench", "--param", "a=1", "--param", "a=2"},
      std::vector<std::string>{"run", "--param", "a=1", "--param", "a=2"},
      std::vector<std::string>{"run", "--param", "a=1,"},
      std::vector<std::string>{"bench", "--param", "a=,1"},
      std::vector<std::string>{"bench", "--repeat", "0"});
  bool subcommand = !words.empty() && words[0] != "fly";
  Ran ran = Cppool(words, subcommand ? CPPOOL_FAKE_DAEMON : "");
  CHECK(ran.code == 2);
  CHECK_FALSE(ran.err.empty());
  CHECK(ran.out.empty());
}

TEST_CASE("options that no request can have are a usage error, and no report is begun") {
  const TemporaryFolder folder;
  std::vector<std::string> words;
  for (int i = 0; i < 17; ++i) words.insert(words.end(), {"--load", "lib" + std::to_string(i) + ".so"});
  for (const std::string command : {"run", "bench"}) {
    CAPTURE(command);
    std::vector<std::string> all = {command};
    if (command == "run") all.insert(all.end(), {"--junit", folder.File("report")});
    all.insert(all.end(), words.begin(), words.end());
    const Ran ran = Cppool(all);
    CHECK(ran.code == 2);
    CHECK(ran.err == "cppool: \"load\" names 17 libraries, more than 16\n");
    CHECK(ran.out.empty());
  }
  CHECK_FALSE(std::filesystem::exists(folder.File("report")));
}

TEST_CASE("the error for an unknown command names it and the nearest known one") {
  Ran ran = Cppool({"bensh", "--param", "a=1"}, "");
  CHECK(ran.code == 2);
  CHECK(Has(ran.err, "\"bensh\""));
  CHECK(Has(ran.err, "did you mean \"bench\"?"));
  ran = Cppool({}, "");
  CHECK(ran.code == 2);
  CHECK(ran.err ==
        "cppool: a command is missing (known: run, bench, list, doctor, serve, ps, stop, pipe, torchrun, "
        "shims, diff, report): see "
        "`cppool --help`\n");
}

TEST_CASE("an unknown option is named with the nearest known one, and the others of the command") {
  Ran ran = Cppool({"run", "--max_seqle=4"}, "");
  CHECK(ran.code == 2);
  CHECK(ran.err.starts_with(
      "cppool: unknown option \"--max_seqle\"; did you mean \"--max-seqlen\"? (known: --help, --suite, "));
  ran = Cppool({"run", "--world-size", "0"}, "");
  CHECK(ran.code == 2);
  CHECK(ran.err.starts_with("cppool: --world-size: Value 0 not in range"));
  CHECK_FALSE(Has(ran.err, "Run with --help"));
  for (const char* option : {"--limit=5", "--fail-fast", "--log=log"})
    CHECK(Has(Cppool({"run", "--list", option}, "").err, "--list"));
}

TEST_CASE("what the real torchrun has not is refused beside what it alone has, and so is a deadline of 10m") {
  Ran ran;
  for (const auto& [first, second] :
       {std::pair{"--deadline=5", "--max-restarts=3"}, {"--max-restarts=3", "--deadline=5"}}) {
    ran = Cppool({"torchrun", first, second, "script.py"}, "");
    CHECK(ran.code == 2);
    CHECK(Has(ran.err, "--deadline is for warm ranks, and --max-restarts=3 for the real torchrun"));
  }
  ran = Cppool({"torchrun", "--deadline", "10m", "script.py"}, "");
  CHECK(ran.code == 2);
  CHECK(Has(ran.err, "--deadline is a number of seconds from 0.001 to 86400, not '10m'"));
}

TEST_CASE("the rank that failed is printed before the ranks that were released because of it") {
  Ran ran = Cppool({"run", "--param", "do=released"});
  CHECK(ran.Prints("\n  rank 1 threw\n  rank 0: released, since rank 1 failed\n"));
}

TEST_CASE("a cell that is impossible with so many ranks is skipped with the daemon's reason") {
  TemporaryFolder folder;
  const std::string daemon = Wrapped(folder, "--start only_p2p");
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {}, {"--list"}, {"--world-size", "3"}, {"--world-size", "3", "--param", "seed=1"}}) {
    std::vector<std::string> words = {"run", "--suite", "smoke"};
    words.insert(words.end(), more.begin(), more.end());
    const Ran ran = Cppool(words, daemon);
    INFO(ran.out);
    CHECK(ran.code == 0);
    CHECK(ran.Prints("because of inapplicable"));
    CHECK(ran.Last() == (more == std::vector<std::string>{"--list"}
                             ? "5 would run, 0 would fail, 15 would be skipped"
                             : "5 passed, 0 failed, 15 skipped"));
  }
  // Asked for alone it has not run, which is no success; a sweep measures the points that are possible.
  CHECK(Cppool({"run", "--param", "cp_comm_type=a2a"}, daemon).code == 1);
  CHECK(Cppool({"run", "--param", "cp_comm_type=a2a,p2p"}, daemon).code == 0);
  const Ran bench = Cppool({"bench", "--param", "do=bench", "--param", "cp_comm_type=a2a,p2p"}, daemon);
  CHECK(bench.code == 0);
  CHECK(bench.Prints("not measured: skipped: because of inapplicable"));
  CHECK(Cppool({"bench", "--param", "do=bench", "--param", "cp_comm_type=a2a"}, daemon).code == 1);
}

TEST_CASE("run --world-size takes several, as in bench") {
  Ran ran = Cppool({"run", "--world-size", "4,2", "--param", "do=pass", "--param", "seed=1,2", "--verbose"});
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "4 passed, 0 failed, 0 skipped");
  CHECK(ran.Last(1).rfind("world size 2: ", 0) == 0);
  CHECK(ran.out.rfind("passed attention W=2 seed=1 ", 0) == 0);
  CHECK(ran.Prints("\npassed attention W=4 seed=2 "));
  ran = Cppool({"run", "--suite", "smoke", "--world-size", "2,3", "--list"});
  CHECK((ran.Prints(" W=3") && !ran.Prints(" W=4")));
  CHECK(ran.Last() == "40 would run, 0 would fail, 0 would be skipped");
  CHECK(Cppool({"run", "--world-size", "2,65"}).code == 2);
}

TEST_CASE("one failure is reported once") {
  // By the checks, by the error and by the rank; by two ranks and by the daemon's log; by the error and by
  // the daemon's stderr.
  Ran ran = Cppool({"run", "--param", "do=told_often"});
  INFO(ran.out);
  CHECK(Times(ran.out, "dq of rank 1 against oracle") == 1);
  CHECK(Times(ran.out, "max_abs_err 7") == 1);
  CHECK(Times(ran.out, "does not hold") == 0);
  CHECK(ran.Prints("\n  1 of 2 checks do not hold\n"));

  ran = Cppool({"run", "--param", "do=told_by_ranks"});
  INFO(ran.out);
  CHECK(Times(ran.out, "the kernel threw") == 2);  // with the line of the case's own, which is not left out
  CHECK(ran.Prints("\n  | a line of the case: the kernel threw 7\n"));
  CHECK(ran.Prints("\n  rank 0: communication was aborted: rank 1 failed first\n"));
  CHECK(Times(ran.out, "failed first") == 1);

  ran = Cppool({"run", "--suite", "smoke", "--filter", "world_size=2"}, "/nowhere");
  CHECK(Times(ran.out, "No such file") == 1);
  CHECK(Times(ran.out, "no daemon of world size 2 could be started: see mha_128 fp16 bshd p2p W=2\n") == 7);
  TemporaryFolder folder;
  ran = Cppool({"run"}, Wrapped(folder, "--start start_told"));
  INFO(ran.out);
  CHECK(Times(ran.out, "no room for 4 ranks: ask for fewer") == 1);
}

TEST_CASE("filters that match no cell are an error") {
  Ran ran = Cppool({"run", "--suite", "smoke", "--filter", "dtype=fp8"});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 0 failed, 0 skipped");
  CHECK(ran.err ==
        "cppool: no cell of the suite matches the filters: no cell has dtype=fp8 (known: bf16, fp16)\n");
  CHECK(Cppool({"run", "--suite", "smoke", "--filter", "dtype=fp8", "--list"}).code == 1);

  // Each has a cell, and no cell has all.
  ran = Cppool({"run", "--suite", "smoke", "--filter", "cp_comm_type=a2a+p2p", "--filter", "dtype=bf16",
                "--filter", "world_size=2"});
  CHECK(ran.code == 1);
  CHECK(
      ran.err ==
      "cppool: no cell of the suite matches the filters: no cell matches all of them; without cp_comm_type 2 "
      "would; without world_size 2 would\n");
  ran = Cppool({"run", "--suite", "matrix", "--filter", "row=flash:cp_1_99"});
  CHECK(Has(ran.err, "no cell has row=flash:cp_1_99; did you mean \""));
  CHECK(Has(ran.err, "in all)"));
}

TEST_CASE("a filter's value may be a glob, and a filter may be negated") {
  const auto matched = [](std::vector<std::string> words) {
    words.insert(words.begin(), {"run", "--suite", "smoke", "--list"});
    return static_cast<int>(Cppool(words).lines.size()) - 1;
  };
  CHECK(matched({"--filter", "row=mha_*"}) == 7);
  CHECK(matched({"--filter", "row=m?a_64"}) == 2);
  CHECK(matched({"--filter", "row!=mha_*"}) == 13);
  CHECK(matched({"--filter", "cp_comm_type=a2a*", "--filter", "cp_comm_type!=a2a+p2p"}) == 5);
  CHECK(matched({"--filter", "cp_comm_type!=a2a+p2p", "--filter", "cp_comm_type!=p2p"}) == 10);
  CHECK(matched({"--filter", "name=*p2p W=4"}) == 6);
  // The axes of the closing table are keys, with the values that it shows.
  CHECK(matched({"--filter", "schedule=p2p"}) == matched({"--filter", "cp_comm_type=p2p"}));
  CHECK(matched({"--filter", "schedule=p2p", "--filter", "mask=causal"}) == 3);
  CHECK(matched({"--filter", "format=bshd", "--filter", "heads!=MHA"}) > 0);
  CHECK(matched({"--filter", "head dim=192/128"}) == 4);
  CHECK(
      Has(Cppool({"run", "--suite", "smoke", "--filter", "schedul=p2p"}).err, "did you mean \"schedule\"?"));
  CHECK(matched({"--filter", "seed!=7"}) == -1);  // no cell has the parameter: a usage error
}

TEST_CASE("GPUs that are named are an explicit wish for CUDA") {
  const auto backend = [](std::vector<std::string> words) {
    words.insert(words.begin(), {"run", "--param", "do=echo", "--json"});
    const Json arguments = Json::parse(Cppool(words).lines.at(0))["answer"]["surroundings"]["arguments"];
    const auto found = std::find(arguments.begin(), arguments.end(), "--backend");
    return (found + 1)->get<std::string>();
  };
  CHECK(backend({"--devices", "0,1"}) == "cuda");
  CHECK(backend({"--devices", "0,1", "--backend", "host"}) == "host");
  CHECK(backend({"--devices", ""}) == "auto");  // no GPU
  CHECK(backend({}) == "auto");
}

TEST_CASE("a limit on the size of files fails the report, and says so") {
  TemporaryFolder folder;
  const Child child =
      RunChild("ulimit -f 1; '" + std::string(CPPOOL_COMMAND) + "' run --suite smoke --daemon '" +
               CPPOOL_FAKE_DAEMON + "' --junit '" + folder.File("out.xml") + "'");
  CHECK(child.exit_code == 1);
  CHECK(Has(child.output, "cppool: cannot write " + folder.File("out.xml") + ": File too large\n"));
}

TEST_CASE("help and version exit with code 0, and without a terminal there is no progress") {
  CHECK(Cppool({"--help"}, "").code == 0);
  CHECK(Cppool({"run", "--help"}, "").Prints("--max-seqlen"));
  // One value each time, as it is parsed.
  CHECK_FALSE(Cppool({"run", "--help"}, "").Prints("--load FILE ..."));
  CHECK(Cppool({"run", "--help"}, "").Prints(".cxx, or .c), which is compiled. May be repeated"));
  CHECK(Cppool({"--version"}, "").Prints("cppool "));
  CHECK(Cppool({"run", "--suite", "smoke"}).err.empty());
}

TEST_CASE("doctor reports which world sizes run, and why others do not") {
  Ran ran = Cppool({"doctor"});
  CHECK(ran.code == 0);
  for (const char* world : {"world size 1 (--backend auto): backend host",
                            "world size 8 (--backend auto): backend host, transport host, 8 ranks on cpu"})
    CHECK(ran.Prints(world));
  CHECK(ran.Prints("CPU cores: "));
  CHECK(ran.Prints("cppoold of a test\nCUDA module: that the daemon says\n"));
  TemporaryFolder folder;
  ran = Cppool({"doctor", "--backend", "cuda"}, Wrapped(folder, "--start usage"));
  CHECK(ran.code == 1);
  CHECK(ran.Prints("world size 2 (--backend cuda): does not run: cuda: 4 ranks need 4 devices, 1 is there"));
}

TEST_CASE("run shows on a terminal how far it is, the rate and the time left, and clears the line") {
  const Ran ran = OnTerminal(
      CPPOOL_COMMAND, {"run", "--suite", "smoke", "--param", "do=echo", "--daemon", CPPOOL_FAKE_DAEMON});
  INFO(ran.out);
  CHECK(ran.code == 0);
  CHECK(ran.Prints("[1/20] 0:00, 0 failed, "));
  CHECK(std::regex_search(
      ran.out, std::regex(R"(\[20/20\] 0:\d\d, \d+\.\d/(s|min), 0:\d\d left, 0 failed, [^\n]* W=4)")));
  CHECK(ran.out.rfind("\r\033[K") > ran.out.rfind("[20/20]"));
  CHECK(ran.out.ends_with("20 passed, 0 failed, 0 skipped\r\n"));
}

TEST_CASE("unwritable output is a failure, and a closed stdout's descriptor is not reused for another file") {
  TemporaryFolder folder;
  const std::string report = folder.File("out.xml");
  const std::string run = std::string("'") + CPPOOL_COMMAND + "' run --suite smoke --daemon '" +
                          CPPOOL_FAKE_DAEMON + "' --junit '" + report + "' 2>'" + folder.File("err") + "' ";
  const int full = std::system((run + ">/dev/full").c_str());
  CHECK(WIFEXITED(full));
  CHECK(WEXITSTATUS(full) == 1);
  CHECK(Has(ReadFile(folder.File("err")), "stdout could not be written"));
  // The reader of the pipe has exited.
  CHECK(std::system(("( sleep 0.3; " + run + "; echo $? >'" + folder.File("code") + "' ) | true").c_str()) ==
        0);
  CHECK(ReadFile(folder.File("code")) == "1\n");
  CHECK(Has(ReadFile(folder.File("err")), "stdout could not be written"));
  CHECK(JunitSuiteIn(ReadFile(report)).children.size() == 20);
  CHECK(std::system((run + ">&-").c_str()) == 0);
  CHECK(JunitSuiteIn(ReadFile(report)).children.size() == 20);
}

namespace {

// A daemon that answers, but hangs in its first case of 4 ranks, of which it writes its process id to a file.
struct HangingDaemon {
  explicit HangingDaemon(const TemporaryFolder& folder)
      : program(CPPOOL_FAKE_DAEMON), hung(folder.File("hung")) {}
  ~HangingDaemon() {
    if (const int pid = std::atoi(ReadFile(hung).c_str()); pid > 0) kill(pid, SIGKILL);
  }
  bool hangs() const { return ReadFile(hung).find('\n') != std::string::npos; }

  std::string program, hung;
};

// Starts the command as nohup does, with stdout `out` and the default disposition of `signal`.
pid_t StartCommand(std::vector<std::string> words, int out, int signal) {
  words.insert(words.begin(), "cppool");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t command = fork();
  REQUIRE(command >= 0);
  if (command == 0) {
    ::signal(SIGHUP, SIG_IGN);
    ::signal(signal, SIG_DFL);
    if (dup2(out, STDOUT_FILENO) >= 0) execv(CPPOOL_COMMAND, argv.data());
    _exit(99);
  }
  return command;
}

// Sends the signal, and checks that the command's status is death by it, as without a handler.
void InterruptIt(pid_t command, int signal) {
  if (signal != SIGHUP) kill(command, SIGHUP);
  kill(command, signal);
  int status = 0;
  REQUIRE(waitpid(command, &status, 0) == command);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == signal);
}

}  // namespace

TEST_CASE("an interrupted suite prints the finished cells and writes them to its report") {
  TemporaryFolder folder;
  const HangingDaemon daemon(folder);
  const int signal = GENERATE(SIGINT, SIGTERM, SIGHUP);
  const bool stalled = GENERATE(false, true);  // stdout is a full pipe that is not read
  int pipe_ends[2];
  REQUIRE(pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK) == 0);
  while (write(pipe_ends[1], "x", 1) == 1) {
  }
  fcntl(pipe_ends[1], F_SETFL, 0);  // from now on writes block
  const std::string out = folder.File("out"), report = folder.File("report.xml");
  const int file = open(out.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  const pid_t command = StartCommand({"run", "--suite", "smoke", "--param", "do=hang_at_4", "--param",
                                      "hung=" + daemon.hung, "--daemon", daemon.program, "--junit", report},
                                     stalled ? pipe_ends[1] : file, signal);
  REQUIRE(Eventually([&] { return daemon.hangs(); }));
  InterruptIt(command, signal);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  close(file);

  const std::string missing = std::string("interrupted (") + strsignal(signal) + ") with 8 of 20 cells done";
  if (!stalled) {
    const auto lines = Lines(ReadFile(out));
    REQUIRE(lines.size() >= 2);
    CHECK(lines.back() == "8 passed, 0 failed, 0 skipped");
    CHECK(lines[lines.size() - 2] == missing);
  }
  const XmlNode suite = JunitSuiteIn(ReadFile(report));
  REQUIRE(suite.children.size() == 20);
  CHECK(suite.attributes.at("errors") == "12");
  std::set<std::string> names;
  for (const XmlNode& one : suite.children) {
    names.insert(one.attributes.at("name"));
    if (!one.children.empty()) CHECK(one.children.at(0).attributes.at("message") == "not run: " + missing);
  }
  CHECK(names.size() == 20);
}

TEST_CASE("an interrupted bench prints and saves the points that are done") {
  TemporaryFolder folder;
  const bool json = GENERATE(false, true);
  const std::string out = folder.File("out");
  const int file = open(out.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  const std::string log = folder.File("log"), saved = folder.File("saved");
  std::vector<std::string> words = {"bench",
                                    "--world-size",
                                    "2,4",
                                    "--repeat",
                                    "6",
                                    "--daemon",
                                    Wrapped(folder, "--start sampling"),
                                    "--param",
                                    "do=bench_to_4",
                                    "--param",
                                    "log=" + log,
                                    "--save",
                                    saved};
  if (json) words.emplace_back("--json");
  const pid_t command = StartCommand(words, file, SIGINT);
  // 8 requests to the world of 2 ranks, 6 to that of one, and the one that is not answered.
  REQUIRE(Eventually([&] { return Lines(ReadFile(log)).size() == 15; }));
  InterruptIt(command, SIGINT);
  close(file);

  const auto lines = Lines(ReadFile(out));
  const std::string missing = "interrupted (Interrupt) with 1 of 2 points done";
  REQUIRE(lines.size() >= 2);
  if (json) {
    CHECK(lines.size() == 2);
    CHECK(Json::parse(lines[0])["measured"]["stages"]["forward"]["ms"] == 2.0);
    CHECK(Json::parse(lines[1])["summary"]["interrupted"] == missing);
  } else {
    CHECK(std::regex_search(lines.at(2), std::regex(R"(^\| 2 \| .*2\.000 ± 0\.0 % )")));
    CHECK(lines.at(3).empty());  // no further row
    CHECK(lines.back() == missing);
  }
  const Json kept = Json::parse(ReadFile(saved));
  CHECK(kept["rows"].size() == 1);
  CHECK(kept["summary"]["interrupted"] == missing);
}
