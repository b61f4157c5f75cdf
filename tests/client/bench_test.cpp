// `cppool bench` with a daemon whose times are known.
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>

#include "client/command/bench_measure.h"
#include "client/command/bench_records.h"
#include "client/command/bench_resume.h"
#include "tests/catch.h"
#include "tests/child.h"
#include "tests/client/command_support.h"

namespace cppool::command::test {
namespace {

using namespace cppool::test;

// The fake daemon's answers to a bench, and a log of its requests.
struct BenchFolder : TemporaryFolder {
  std::string daemon = Wrapped(*this, "--start sampling");
  std::string log = File("log");

  // With all columns, where it prints the table.
  Ran Bench(std::vector<std::string> words) const {
    const auto no_table = [](const std::string& word) { return word == "--json" || word == "--csv"; };
    if (std::none_of(words.begin(), words.end(), no_table)) words.emplace_back("--wide");
    return Narrow(std::move(words));
  }
  Ran Narrow(std::vector<std::string> words) const {
    std::remove(log.c_str());
    words.insert(words.begin(), {"bench", "--param", "do=bench", "--param", "log=" + log});
    return Cppool(words, daemon);
  }
  std::vector<Json> Requests() const {
    std::vector<Json> requests;
    for (const std::string& line : Lines(ReadFile(log))) requests.push_back(Json::parse(line));
    return requests;
  }
};

// The times of the fake daemon while this lives.
struct Scale {
  explicit Scale(const char* scale) { setenv("FAKE_SCALE", scale, 1); }
  ~Scale() { unsetenv("FAKE_SCALE"); }
};

}  // namespace

TEST_CASE("without --wide a bench has at most 100 columns, those that matter most") {
  const BenchFolder folder;
  std::vector<std::string> words = {"--param",      "cp_comm_type=p2p,a2a",
                                    "--param",      "max_seqlen_q=128,256",
                                    "--world-size", "2,4",
                                    "--warmup",     "2",
                                    "--repeat",     "12"};
  const Ran ran = folder.Narrow(words);
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(0) ==
        "| cp_comm_type | max_seqlen_q | W | forward ms       | backward ms      | both TFLOP/s |");
  CHECK(ran.lines.at(1) ==
        "| ------------ | ------------ | - | ---------------- | ---------------- | ------------ |");
  CHECK(ran.lines.at(2) ==
        "| p2p          | 128          | 2 | 2.000 ± 0.0 %    | 2.000 ± 0.0 %    | 1.5000       |");
  CHECK(ran.lines.at(9).rfind("| a2a          | 256          | 4 | 4.000", 0) == 0);
  CHECK(ran.Prints("--wide shows"));
  for (const std::string& line : ran.lines) CHECK(line.size() <= 104);  // "±" has two bytes
  words.insert(words.end(), {"--kernels", "cppool,cudnn"});
  CHECK(folder.Narrow(words).lines.at(0) ==
        "| cp_comm_type | max_seqlen_q | kernels | W | forward ms       | backward ms      |");
  CHECK(folder.Narrow({"--wide", "--json"}).code == 2);
}

TEST_CASE("bench verifies each point once, times it in rounds, and compares with one GPU") {
  const BenchFolder folder;
  const std::vector<std::string> words = {"--param",      "cp_comm_type=p2p,a2a",
                                          "--param",      "max_seqlen_q=128,256",
                                          "--world-size", "2,4",
                                          "--warmup",     "2",
                                          "--repeat",     "12"};
  Ran ran = folder.Bench(words);
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(0) ==
        "| cp_comm_type | max_seqlen_q | W | samples | forward ms | forward TFLOP/s | backward ms | "
        "backward TFLOP/s | both TFLOP/s | forward efficiency | backward efficiency | both efficiency | "
        "forward exposed | backward exposed | error |");
  // W=2: forward takes rank 1's 2 ms at 2 TFLOP/s, backward 2 ms at 1: 1.5 together. Alone: 1 ms at 4 and 2
  // ms at 2: 8/3. Of forward a quarter is waiting.
  CHECK(ran.lines.at(2) ==
        "| p2p | 128 | 2 | 12 | 2.000 ± 0.0 % | 2.0000 | 2.000 ± 0.0 % | 1.0000 | 1.5000 | 50.0 % | 50.0 % | "
        "56.2 % | 25.0 % | 0.0 % | 1.25 |");
  CHECK(ran.lines.at(9).rfind("| a2a | 256 | 4 | 12 | 4.000 ", 0) == 0);
  CHECK(ran.Prints("world size 4: backend host"));

  // Verified, once with waits, ten rounds; one GPU alone once per length.
  const std::vector<Json> requests = folder.Requests();
  REQUIRE(requests.size() == 8 * 12 + 2 * 10);
  CHECK((requests[0]["checks"] == true && requests[0]["repeat"] == 1 && requests[0]["warmup"] == 0));
  CHECK((requests[1]["checks"] == false && requests[1]["waits"] == true));
  int iterations = 0;
  for (std::size_t i = 2; i < 12; ++i) {
    CHECK((requests[i]["checks"] == false && requests[i]["warmup"] == 2));
    CHECK_FALSE(requests[i].contains("waits"));
    iterations += requests[i]["repeat"].get<int>();
  }
  CHECK(iterations == 12);
  CHECK((requests[12]["params"]["cp_comm_type"] == "p2p" && requests[12]["warmup"] == 2));
  CHECK(requests[2]["params"]["max_seqlen_kv"] == 128);
}

TEST_CASE("bench asks for samples until they are precise, and says when they are not") {
  const BenchFolder folder;
  Ran ran = folder.Bench({"--world-size", "1", "--precision", "0.2", "--time", "5"});
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(2).rfind("| 1 | 60 | 1.000 ± 0.0 % |", 0) == 0);  // six in each round
  CHECK(ran.Prints("known to 0.2 % or for 5.0 s"));
  const Json sampling = folder.Requests().back()["sampling"];
  CHECK(sampling["precision"].get<double>() == Catch::Approx(0.002 * std::sqrt(10)));
  CHECK(sampling["max_ms"] == 500);

  const Scale scale("1");  // from request to request a thousandth more
  ran = folder.Bench({"--world-size", "1", "--precision", "0.01"});
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(2).rfind("| 1 | 60 ! | 1.00", 0) == 0);
  CHECK(folder.Bench({"--repeat", "5", "--time", "1"}).code == 2);
  CHECK(folder.Bench({"--precision", "0"}).code == 2);
}

TEST_CASE("bench times several kernels in turn, on the same inputs, and compares them with the first") {
  const BenchFolder folder;
  Ran ran = folder.Bench({"--kernels", "cppool,cudnn,none", "--world-size", "1", "--repeat", "20"});
  CHECK(ran.code == 0);  // what is not supported is no failure
  CHECK(ran.lines.at(0).rfind("| kernels | W |", 0) == 0);
  CHECK(ran.lines.at(2).rfind("| cppool | 1 | 20 | 1.000 ", 0) == 0);
  CHECK(ran.lines.at(2).ends_with("| 1.25 | - | - |"));
  CHECK(ran.lines.at(3).rfind("| cudnn | 1 | 20 | 0.500 ", 0) == 0);
  CHECK(ran.lines.at(3).ends_with("| 0.500 (0.500 to 0.500) | 0.500 (0.500 to 0.500) |"));
  CHECK(ran.lines.at(4).rfind("| none | 1 | 0 | - |", 0) == 0);
  CHECK(ran.Prints("not measured: skipped: because of unsupported"));
  CHECK(ran.Prints("kernels: family fake name cudnn version"));

  std::vector<Json> timed = folder.Requests();
  std::erase_if(timed, [](const Json& request) { return request["checks"] == true; });
  REQUIRE(timed.size() == 20);
  int second_first = 0;
  for (std::size_t i = 0; i < 20; i += 2) {  // in turn, and not always in the same order
    CHECK(timed[i]["kernels"] != timed[i + 1]["kernels"]);
    CHECK(timed[i]["params"] == timed[i + 1]["params"]);
    second_first += timed[i]["kernels"] == "cudnn";
  }
  CHECK(second_first == 3);

  ran = folder.Bench({"--kernels", "cppool,./mine.so,fast,./other.so,cudnn", "--world-size", "1", "--repeat",
                      "1", "--json"});
  REQUIRE(ran.lines.size() == 5);
  CHECK(Json::parse(ran.lines[1])["kernels"] == "./mine.so,fast");
  CHECK(Json::parse(ran.lines[2])["kernels"] == "./other.so");
  CHECK(folder.Bench({"--kernels", "cppool,cppool"}).code == 2);
  CHECK(folder.Bench({"--kernels", "cppool,,cudnn"}).code == 2);
}

TEST_CASE("bench's JSON has a row as it is done, and the command that measures it again") {
  const BenchFolder folder;
  const Ran ran = folder.Bench({"--world-size", "2,4", "--warmup", "2", "--repeat", "12", "--json"});
  REQUIRE(ran.lines.size() == 3);
  const Json row = Json::parse(ran.lines[0]);
  const Json& forward = row["measured"]["stages"]["forward"];
  CHECK((forward["ms"] == 2.0 && forward["tflops"] == 2.0 && forward["precision"] == 0.0));
  CHECK((forward["samples"] == 12 && forward["rounds"].size() == 10 && forward["exposed_ms"] == 0.5));
  CHECK(forward["quartiles"] == Json({2.0, 2.0}));
  CHECK(row["efficiency"]["forward"] == 0.5);
  CHECK(row["errors"] == Json({{"out", 1.25}}));
  CHECK(row["measured"]["precise"] == true);
  CHECK(Json::parse(ran.Last())["summary"]["points"] == 2);

  const std::string command = row["command"];
  CHECK(Has(command, " bench --world-size 2 "));
  REQUIRE(command.starts_with("cppool "));
  const auto child = RunChild(std::string(CPPOOL_COMMAND) + command.substr(6) + " --json 2>/dev/null");
  CHECK(child.exit_code == 0);
  const Json again = Json::parse(Lines(child.output).at(0));
  for (const char* same : {"case", "world_size", "params", "warmup", "repeat", "measured", "one_gpu"})
    CHECK(again[same] == row[same]);
}

TEST_CASE("bench's CSV has a line for each stage, and quotes") {
  const BenchFolder folder;
  const Ran ran =
      folder.Bench({"--world-size", "2", "--repeat", "6", "--param", "window_size=[-1,0],[8,0]", "--csv"});
  CHECK(ran.code == 0);
  REQUIRE(ran.lines.size() == 5);
  CHECK(ran.lines[0] ==
        "case,world_size,kernels,do,log,window_size,stage,ms,precision,quartile_1,quartile_3,samples,tflops,"
        "efficiency,exposed_ms,error,ratio,ratio_low,ratio_high,verdict,not_measured\r");
  CHECK(ran.lines[2] ==
        "attention,2,,bench," + folder.log + ",\"[-1,0]\",forward,2,0,2,2,6,2,0.5,0.5,1.25,,,,,\r");
  CHECK(folder.Bench({"--csv", "--json"}).code == 2);
}

TEST_CASE("bench validates every point before it times one") {
  const BenchFolder folder;
  Ran ran = Cppool({"bench", "--param", "do=bench,error", "--param", "log=" + folder.log, "--repeat", "1"},
                   folder.daemon);
  CHECK(ran.code == 2);
  CHECK(Has(ran.err, "\"do\":\"error\""));
  CHECK(ran.err.ends_with("because of invalid_request\ncppool: nothing was timed\n"));
  CHECK(folder.Requests().empty());
  // An older daemon cannot be asked for samples.
  ran = Cppool({"bench", "--repeat", "1"});
  CHECK(ran.code == 2);
  CHECK(Has(ran.err, "no \"samples\""));
}

TEST_CASE("a point that fails its checks is not timed, and fails the bench") {
  const BenchFolder folder;
  const Ran ran = folder.Bench({"--param", "max_seqlen_q=128,666", "--repeat", "1"});
  CHECK(ran.code == 1);
  CHECK(ran.Prints("| 666 | 2 | 0 | - | - | - | - | - | - | - | - | - | - | - |\n"));
  CHECK(ran.Prints("not measured: failed: because of mismatch"));
  CHECK(folder.Requests().size() == 3 + 1 + 1);
}

TEST_CASE("a sweep over lists, and cases without attention's stages") {
  const BenchFolder folder;
  const Ran ran =
      Cppool({"bench", "--param", "window_size=[-1,0],[8,0]", "--world-size", "1", "--repeat", "6", "--wide"},
             folder.daemon);
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(2) == "| [-1,0] | 1 | 6 | 3.000 ± 0.0 % | 2.0000 | 100.0 % |");
  CHECK(ran.lines.at(3).rfind("| [8,0] | 1 |", 0) == 0);
}

TEST_CASE("a bench is saved, and a later one is faster, slower or the same") {
  const BenchFolder folder;
  const std::string file = folder.File("saved");
  const auto bench = [&](const char* scale, std::vector<std::string> words) {
    const Scale now(scale);
    words.insert(words.end(), {"--world-size", "1", "--repeat", "20"});
    return folder.Bench(words);
  };
  CHECK(bench("1", {"--save", file}).code == 0);
  CHECK(Json::parse(ReadFile(file))["rows"].size() == 1);

  Ran ran = bench("1.01", {"--baseline", file});
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(0).ends_with("| forward now/then | backward now/then | verdict |"));
  CHECK(ran.lines.at(2).ends_with("| same |"));
  CHECK(ran.Prints("against " + file + ": 0 slower, 1 not, 0 not in it"));
  CHECK(bench("0.9", {"--baseline", file}).lines.at(2).ends_with("| faster |"));
  ran = bench("1.05", {"--baseline", file, "--json"});
  CHECK(ran.code == 3);
  const Json row = Json::parse(ran.lines.at(0));
  CHECK(row["baseline"]["verdict"] == "slower");
  CHECK(row["baseline"]["ratio"]["forward"]["value"].get<double>() == Catch::Approx(1.05).epsilon(0.005));

  // Slower twice: verified and ten rounds each time. A row that was slower once has the times of the second
  // measurement.
  CHECK(folder.Requests().size() == 22);
  const std::string last_of_first = std::to_string(folder.Requests().at(10)["id"].get<int>());
  ran = bench(("1.05 until " + last_of_first).c_str(), {"--baseline", file, "--json"});
  CHECK(ran.code == 0);
  CHECK(folder.Requests().size() == 22);
  const Json once = Json::parse(ran.lines.at(0));
  CHECK(once["baseline"]["verdict"] == "same");
  CHECK(once["measured"]["stages"]["forward"]["ms"].get<double>() == Catch::Approx(1.003).epsilon(0.003));

  // A round that is as fast as then: the others were disturbed.
  const std::string before_last = std::to_string(folder.Requests().at(9)["id"].get<int>());
  ran = bench(("1.5 until " + before_last).c_str(), {"--baseline", file, "--json"});
  CHECK(ran.code == 0);
  CHECK(folder.Requests().size() == 11);
  CHECK(Json::parse(ran.lines.at(0))["baseline"]["ratio"]["forward"]["low"].get<double>() > 1.02);

  CHECK(bench("1.05", {"--baseline", file, "--slower-than", "10"}).code == 0);
  CHECK(folder.Requests().size() == 11);
  CHECK(bench("1.01", {"--baseline", file, "--slower-than", "0.1"}).code == 3);
  CHECK(bench("1", {"--slower-than", "10"}).code == 2);  // than what?

  // Rows that the saved bench lacks.
  ran = bench("2", {"--baseline", file, "--param", "seed=7"});
  CHECK(ran.code == 4);
  CHECK(ran.Prints("against " + file + ": 0 slower, 0 not, 1 not in it\nnot in " + file + ": W=1 "));
  ran = bench("2", {"--baseline", file, "--kernels", "cudnn"});
  CHECK(ran.code == 4);
  CHECK(std::regex_search(ran.out, std::regex("not in .*saved: W=1 .* with cudnn\n")));
  CHECK(bench("1", {"--save", file, "--param", "seed=1"}).code == 0);
  ran = bench("1", {"--baseline", file, "--param", "seed=1,7", "--json"});
  CHECK(ran.code == 0);
  CHECK(Json::parse(ran.Last())["summary"]["notes"].at(1).get<std::string>().starts_with("not in " + file +
                                                                                         ": W=1 "));
  CHECK(bench("1.05", {"--baseline", file, "--param", "seed=1,7"}).code == 3);

  CHECK(bench("1", {"--save", file, "--baseline", file, "--param", "seed=1"}).code == 0);
  for (const char* content :
       {"", "[]", "{\"rows\": []}", "{\"format\": \"cppool bench\", \"version\": 2, \"rows\": []}"}) {
    std::ofstream(file) << content;
    ran = bench("1", {"--baseline", file});
    CHECK(ran.code == 2);
    CHECK(ran.err.rfind("cppool: --baseline: " + file + " is ", 0) == 0);
  }
  ran = bench("1", {"--baseline", folder.File("none")});
  CHECK(ran.code == 2);
  CHECK(Has(ran.err, "No such file"));
  ran = bench("1", {"--save", folder.File("none") + "/saved"});
  CHECK(ran.code == 2);
  CHECK(Has(ran.err, "cannot write"));
  // A device or a pipe is not replaced by a file.
  REQUIRE(mkfifo(folder.File("pipe").c_str(), 0600) == 0);
  ran = bench("1", {"--save", folder.File("pipe")});
  CHECK(ran.code == 2);
  CHECK(ran.err == "cppool: --save: cannot write " + folder.File("pipe") +
                       ": it exists and is no regular file: name another one\n");
  CHECK(std::filesystem::is_fifo(folder.File("pipe")));
  CHECK(folder.Requests().empty());
}

TEST_CASE(
    "a bench takes the points that the file of --resume has, measures the others and writes them to it") {
  const BenchFolder folder;
  const std::string file = folder.File("points");
  const auto bench = [&](std::vector<std::string> words) {
    const Scale now("1");
    for (const char* word : {"--resume", file.c_str(), "--repeat", "20", "--kernels", "cppool,cudnn"})
      words.emplace_back(word);
    return folder.Bench(words);
  };
  const auto rows = [&](const Ran& ran) {
    std::vector<Json> read;
    for (const std::string& line : ran.lines)
      if (Json row = Json::parse(line); row.contains("measured")) read.push_back(std::move(row));
    return read;
  };
  // One point fails: it is measured again each time.
  Ran ran = bench({"--param", "seed=1,2", "--param", "max_seqlen_q=128,666", "--json"});
  CHECK(ran.code == 1);
  const std::vector<Json> first = rows(ran);
  REQUIRE(first.size() == 8);
  CHECK(Json::parse(ran.Last())["summary"]["notes"] == Json{"0 of 4 points from " + file});
  CHECK_FALSE(folder.Requests().empty());

  ran = bench({"--param", "seed=1,2", "--param", "max_seqlen_q=128", "--json"});
  CHECK(ran.code == 0);
  CHECK(Json::parse(ran.Last())["summary"]["notes"] == Json{"2 of 2 points from " + file});
  CHECK(folder.Requests().empty());
  const std::vector<Json> taken = rows(ran);
  REQUIRE(taken.size() == 4);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const Json& then = first[i < 2 ? i : i + 2];
    INFO(taken[i] << "\n" << then);
    for (const char* member :
         {"case", "world_size", "params", "kernels", "ran", "errors", "ratio", "command"})
      CHECK(taken[i][member] == then[member]);
    CHECK(taken[i]["efficiency"]["together"].get<double>() ==
          Catch::Approx(then["efficiency"]["together"].get<double>()));
    for (const char* member : {"measured", "one_gpu"}) {
      const Json &stage = taken[i][member]["stages"]["forward"],
                 &stage_then = then[member]["stages"]["forward"];
      for (const char* same : {"ms", "precision", "quartiles", "rounds", "samples"})
        CHECK(stage[same] == stage_then[same]);
      CHECK(stage["tflops"].get<double>() == Catch::Approx(stage_then["tflops"].get<double>()));
    }
  }
  // The rows that this bench does not have are still there.
  CHECK(Json::parse(ReadFile(file))["rows"].size() == 8);

  ran = bench({"--param", "seed=2,3", "--param", "max_seqlen_q=128"});
  CHECK(ran.Prints("1 of 2 points from " + file + "\n"));
  for (const Json& request : folder.Requests()) CHECK(request["params"]["seed"] == 3);
  CHECK(Json::parse(ReadFile(file))["rows"].size() == 10);
  bench({"--param", "seed=1", "--param", "max_seqlen_q=666"});
  CHECK_FALSE(folder.Requests().empty());
  // All kernels of a point are timed in turn: with one that is missing all are measured.
  ran = folder.Bench({"--param", "seed=3", "--param", "max_seqlen_q=128", "--resume", file, "--repeat", "20",
                      "--kernels", "cppool,./none.so"});
  CHECK(ran.Prints("0 of 1 points from "));
  CHECK_FALSE(folder.Requests().empty());
}

TEST_CASE("a bench that is killed goes on with the points that it had") {
  const BenchFolder folder;
  const std::string file = folder.File("points");
  // The daemon hangs at W=4, when the point of W=1 is in the file.
  const std::string command = "'" CPPOOL_COMMAND "' bench --daemon '" + folder.daemon +
                              "' --repeat 20 --resume '" + file + "' --param do=bench_to_4 --world-size 1,";
  const Child killed = RunChild("timeout 60 " + command + "4 & for i in $(seq 600); do test -s '" + file +
                                "' && break; sleep 0.1; done; kill -9 -- -$!; wait $!");
  INFO(killed.output);
  CHECK(killed.exit_code != 0);
  CHECK(Json::parse(ReadFile(file))["rows"].size() == 1);
  const Child ran = RunChild(command + "2");
  INFO(ran.output);
  CHECK(ran.exit_code == 0);
  CHECK(Has(ran.output, "1 of 2 points from " + file));
}

TEST_CASE(
    "a file for --resume that was measured in another way or elsewhere is refused, and what differs is "
    "named") {
  const BenchFolder folder;
  const std::string file = folder.File("points");
  const auto bench = [&](std::vector<std::string> words) {
    for (const char* word : {"--resume", file.c_str(), "--world-size", "1"}) words.emplace_back(word);
    return folder.Bench(words);
  };
  REQUIRE(bench({"--repeat", "20"}).code == 0);
  const std::string good = ReadFile(file);
  const auto refuses = [&](const Ran& ran, const std::string& why) {
    INFO(ran.err);
    CHECK(ran.code == 2);
    CHECK(Has(ran.err, "--resume: " + file + " " + why));
    CHECK(Has(ran.err, "give --resume another file, or remove this one"));
  };
  refuses(bench({"--repeat", "21"}), "was measured with a repeat of 20, and this bench has 21");
  refuses(bench({"--repeat", "20", "--warmup", "1"}),
          "was measured with a warmup of 3, and this bench has 1");
  refuses(bench({"--time", "1"}), "was measured with a precision of null, and this bench has 0.005");
  CHECK(ReadFile(file) == good);
  std::ofstream(file) << std::regex_replace(good, std::regex("\"version\":\"fake\""),
                                            "\"version\":\"older\"");
  refuses(bench({"--repeat", "20"}), "was measured by cppool \"older\", and this is \"fake\"");
  std::ofstream(file) << std::regex_replace(good, std::regex("\"backend\":\"host\""), "\"backend\":\"cuda\"");
  refuses(bench({"--repeat", "20"}), "was measured on backend cuda");
  Json content = Json::parse(good);
  content["summary"]["libraries"] = {{"./mine.so", "1"}};
  std::ofstream(file) << content;
  BenchPlan plan;
  plan.repeat = 20;
  const ResumedBench resumed(file, plan);
  BenchResults results;
  results.libraries = {{"./other.so", "2"}, {"./mine.so", "1"}};
  CHECK_NOTHROW(resumed.Check(results));
  results.libraries["./mine.so"] = "2";
  CHECK_THROWS_WITH(resumed.Check(results),
                    Catch::Contains("was measured with another content of ./mine.so"));

  std::ofstream(file) << "[]";
  CHECK(bench({}).code == 2);
  CHECK(bench({"--save", folder.File("saved")}).code == 2);
  CHECK(Has(folder.Bench({"--resume", "/nowhere/points"}).err, "--resume: cannot write /nowhere/points: "));
}

TEST_CASE("a comparison with an earlier bench takes two rounds of both") {
  const BenchFolder folder;
  const std::string file = folder.File("saved"), one_round = folder.File("one round");
  CHECK(folder.Bench({"--world-size", "1", "--repeat", "20", "--save", file}).code == 0);
  for (const std::vector<std::string>& words : {std::vector<std::string>{"--repeat", "1"}, {"--profile"}}) {
    std::vector<std::string> all = {"--world-size", "1", "--baseline", file};
    all.insert(all.end(), words.begin(), words.end());
    const Ran ran = folder.Bench(all);
    CHECK(ran.code == 2);
    CHECK(ran.err == "cppool: --baseline compares rounds, two at least, and " + words[0] +
                         (words.size() > 1 ? " 1" : "") + " measures one\n");
    CHECK(folder.Requests().empty());
  }

  CHECK(folder.Bench({"--world-size", "1", "--repeat", "1", "--save", one_round}).code == 0);
  Ran ran = folder.Bench({"--world-size", "1", "--repeat", "20", "--baseline", one_round});
  CHECK(ran.code == 4);
  CHECK(ran.Prints("against " + one_round + ": 0 slower, 0 not, 0 not in it, 1 without two rounds in it\n" +
                   "without two rounds in " + one_round + ": W=1 "));
  ran = folder.Bench({"--world-size", "1", "--repeat", "20", "--baseline", one_round, "--json"});
  CHECK_FALSE(Json::parse(ran.lines.at(0)).contains("baseline"));
}

TEST_CASE("a row of an earlier bench that has none of the stages is not in it") {
  const BenchFolder folder;
  const std::string file = folder.File("saved");
  CHECK(folder.Bench({"--world-size", "1", "--repeat", "20", "--save", file}).code == 0);
  std::string saved = ReadFile(file);
  for (const std::string stage : {"forward", "backward"})
    saved = std::regex_replace(saved, std::regex('"' + stage + '"'), "\"other " + stage + '"');
  std::ofstream(file) << saved;
  const Ran ran = folder.Bench({"--world-size", "1", "--repeat", "20", "--baseline", file});
  CHECK(ran.code == 4);
  CHECK(ran.Prints("against " + file + ": 0 slower, 0 not, 1 not in it\nnot in " + file + ": W=1 "));
}

TEST_CASE("bench times nothing when a row's validation ends the daemon") {
  const BenchFolder folder;
  const Ran ran =
      Cppool({"bench", "--world-size", "1", "--repeat", "10", "--param", "do=crash_once", "--param",
              "then=bench", "--param", "log=" + folder.log, "--param", "marker=" + folder.File("marker")},
             folder.daemon);
  CHECK(ran.code == 1);
  CHECK(ran.out.empty());
  CHECK(Has(ran.err, "cppool: W=1 "));
  CHECK(Has(ran.err, "rank 1 crashed"));
  CHECK(Has(ran.err, "cppool: nothing was timed\n"));
}

TEST_CASE("bench: a profiler's range is one for each kernel and point") {
  const BenchFolder folder;
  CHECK(folder.Bench({"--world-size", "1", "--profile"}).code == 0);
  const std::vector<Json> requests = folder.Requests();
  REQUIRE(requests.size() == 2);
  CHECK_FALSE(requests[0].contains("profile"));
  CHECK((requests[1]["profile"] == true && requests[1]["repeat"] == 10));
}

TEST_CASE("bench shows on a terminal how far it is, the rate and the time left") {
  const BenchFolder folder;
  const Ran ran =
      OnTerminal(CPPOOL_COMMAND, {"bench", "--param", "do=bench", "--world-size", "1", "--param",
                                  "max_seqlen_q=128,256", "--repeat", "6", "--daemon", folder.daemon});
  CHECK(ran.code == 0);
  CHECK(ran.Prints("[1/2] 0:00, 0 failed, validating W=1 "));
  CHECK(std::regex_search(ran.out,
                          std::regex(R"(\[2/2\] 0:\d\d, \d+\.\d/(s|min), \d+:\d\d left, 0 failed, W=1 )")));
  CHECK(std::regex_search(ran.out, std::regex(R"(\| 256 +\| 1 \| .*1\.000 )")));
}

TEST_CASE("the slowest rank of each iteration, and communication that no work hides") {
  Result result;
  result.ranks.resize(2);
  result.ranks[0].samples = {{"forward", {1, 5, 3}}};
  result.ranks[1].samples = {{"forward", {2, 4}}};
  CHECK(SlowestSamples(result) ==
        std::vector<std::pair<std::string, std::vector<double>>>{{"forward", {2, 5}}});
  // Rank 1 works longest, 7 of the 10 ms that rank 0 takes.
  result.ranks[0].gpu_ms = {{"forward", 10},
                            {"forward/a", 6},
                            {"forward/a/waiting", 3},
                            {"forward/b/waiting", 2},
                            {"forward2/c/waiting", 100},
                            {"inputs", 4}};
  result.ranks[1].gpu_ms = {{"forward", 9}, {"forward/a/waiting", 2}, {"inputs", 4}};
  CHECK(ExposedCommunication(result) == std::map<std::string, double>{{"forward", 0.3}, {"inputs", 0}});
}

}  // namespace cppool::command::test
