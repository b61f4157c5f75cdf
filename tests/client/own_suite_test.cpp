// The comforts of `cppool run`, with a fake daemon: suites of one's own, shards, limits, and what cases
// write.
#include <algorithm>
#include <set>
#include <thread>

#include "client/command/progress.h"
#include "client/suite/suite.h"
#include "client/suite/value_text.h"
#include "tests/child.h"
#include "tests/client/command_support.h"
#include "tests/client/xml.h"

using namespace cppool::test;
using cppool::Json;

namespace {

// The requests of the cells that ran, in their order, each with the name of its cell.
std::vector<Json> Requests(const Ran& ran) {
  std::vector<Json> requests;
  for (const std::string& line : ran.lines) {
    const Json json = Json::parse(line);
    if (json.contains("summary")) continue;
    requests.push_back(json["answer"]["request"]);
    requests.back()["name"] = json["name"];
    requests.back()["world_size"] = json["world_size"];
  }
  return requests;
}

std::string WithSuite(const TemporaryFolder& folder, const std::string& text) {
  std::ofstream(folder.File("mine.json")) << text;
  return folder.File("mine.json");
}

}  // namespace

TEST_CASE("a suite of one's own: rows, products, world sizes, a user's case") {
  TemporaryFolder folder;
  const std::string suite = WithSuite(folder, R"({
    "about": "all-reduces", "case": "all_reduce",
    "rows": {"small": {"count": 8}, "large": {"count": 4096}},
    "cells": [{"rows": ["sma*", "large"], "world_size": [2, 4], "set": {"do": "echo"}, "product": {"seed": [1, 2], "odd": [true]}},
              {"case": "sum", "set": {"do": "echo"}}]})");
  const Ran ran = Cppool({"run", "--suite", suite, "--json"});
  CHECK(ran.code == 0);
  const std::vector<Json> requests = Requests(ran);
  REQUIRE(requests.size() == 9);
  std::set<std::string> names;
  for (const Json& request : requests) names.insert(request["name"]);
  CHECK(names.size() == 9);
  CHECK(requests[0]["case"] == "all_reduce");
  CHECK(requests[0]["params"] == Json({{"count", 8}, {"do", "echo"}, {"odd", true}, {"seed", 1}}));
  CHECK(requests[0]["name"] == "small odd=true seed=1 W=2");
  CHECK(requests[1]["params"]["seed"] == 2);
  CHECK(requests[4]["case"] == "sum");
  CHECK(requests[4]["name"] == "sum W=2");
  CHECK(requests[5]["world_size"] == 4);
  CHECK(Json::parse(ran.Last())["summary"]["suites"]["mine"]["passed"] == 9);

  // As with a built-in one: filters, parameters, JUnit, the table by axis, the command that repeats a cell.
  const Ran filtered = Cppool({"run", "--suite", suite, "--filter", "row=small", "--filter", "world_size=4",
                               "--param", "do=fail", "--junit", folder.File("out.xml")});
  CHECK(filtered.Last() == "0 passed, 2 failed, 0 skipped");
  CHECK(filtered.Prints("repeat: cppool run --world-size 4 --case all_reduce --daemon "));
  CHECK(filtered.Prints("\nseed        1 "));
  CHECK(JunitSuiteIn(ReadFile(folder.File("out.xml"))).attributes.at("name") == "cppool.mine");
}

// A suite of one entry; LIST stands for 400 numbers, and the axis "x" has as many alternatives.
std::string TooLarge(std::string entry) {
  Json list = Json::array(), axis = Json::array();
  for (int i = 0; i < 400; ++i) {
    list.push_back(i);
    axis.push_back({{"set", {{"seed", i}}}});
  }
  for (std::size_t at; (at = entry.find("LIST")) != std::string::npos;) entry.replace(at, 4, list.dump());
  return "{\"axes\": {\"x\": " + axis.dump() + "}, \"cells\": [{" + entry + "}]}";
}

TEST_CASE("a suite's file that is wrong is refused with the place and what is allowed") {
  TemporaryFolder folder;
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"{", "suite "},
      {"[1]", "must be an object"},
      {R"({"cels": []})", "unknown key \"cels\"; did you mean \"cells\"?"},
      {"{}", "has no \"cells\""},
      {R"({"cells": []})", "cells: must be a list with at least one element"},
      {R"({"cells": [{"row": ["a"]}]})", "cells[0]: unknown key \"row\"; did you mean \"rows\"?"},
      {R"({"rows": {"small": {}}, "cells": [{}, {"rows": ["smal"]}]})",
       "cells[1].rows[0]: there is no row \"smal\"; did you mean \"small\"?"},
      {R"({"rows": {"small": 3}, "cells": [{}]})", "rows.small: must be an object"},
      {R"({"cells": [{"product": {"seed": []}}]})",
       "cells[0].product.seed: must be a list with at least one element"},
      {R"({"cells": [{"product": {}}]})", "cells[0].product: must have at least one member"},
      {R"({"cells": [{"product": {"seed": 1}}]})",
       "cells[0].product.seed: must be a list with at least one element"},
      {R"({"cells": [{"world_size": 65}]})", "cells[0].world_size: must be an integer from 1 to 64, not 65"},
      {R"({"cells": [{"world_size": [2, "4"]}]})", "cells[0].world_size[1]: must be an integer"},
      {R"({"cells": [{"over": ["dtype"]}]})", "unknown axis \"dtype\""},
      {R"({"axes": {"d": [{"sett": {}}]}, "cells": [{"over": ["d"]}]})", "axes.d[0]: unknown key \"sett\""},
      {R"({"cells": [{"essential": 1}]})", "cells[0].essential: must be true or false"},
      {R"({"case": 7, "cells": [{}]})", "case: must be a text"},
  };
  for (const auto& [text, part] : wrong) {
    const Ran ran = Cppool({"run", "--suite", WithSuite(folder, text)});
    INFO(text << " -> " << ran.err);
    CHECK(ran.code == 2);
    CHECK(Has(ran.err, part));
    CHECK(ran.out.empty());
  }
  CHECK(Has(Cppool({"run", "--suite", folder.File("none.json")}).err, "No such file or directory"));
  CHECK(Has(Cppool({"run", "--suite", folder.path().string()}).err, "Is a directory"));
  CHECK(Has(Cppool({"run", "--suite", "smoky"}).err, "did you mean \"smoke\"?"));
}

TEST_CASE("a suite with products without end is refused before it fills the memory") {
  using cppool::suite::CellsOfFile;
  using cppool::suite::UsageError;
  for (const auto& [entry, place] : {std::pair("\"product\": {\"a\": LIST, \"b\": LIST}", "product"),
                                     {"\"over\": [\"x\", \"x\"]", "over[1]"}}) {
    std::string refused;
    try {
      CellsOfFile("mine", Json::parse(TooLarge(entry)));
    } catch (const UsageError& error) {
      refused = error.what();
    }
    CHECK(refused == "suite mine: cells[0]." + std::string(place) +
                         ": makes more than 100000 cells: give fewer values, or make several suites");
  }
}

TEST_CASE("shards share the cells of each world size, each cell in one of them") {
  std::vector<std::string> names;
  for (const char* shard : {"1/3", "2/3", "3/3"}) {
    const Ran ran = Cppool({"run", "--suite", "smoke", "--shard", shard, "--json", "--param", "do=echo"});
    CHECK(ran.code == 0);
    std::set<int> worlds;
    const std::vector<Json> requests = Requests(ran);
    for (const Json& request : requests) {
      names.push_back(request["name"]);
      worlds.insert(request["world_size"].get<int>());
    }
    CHECK((requests.size() == 6 || requests.size() == 7));
    CHECK(worlds == std::set<int>{2, 4});
  }
  CHECK(names.size() == 20);
  CHECK(std::set<std::string>(names.begin(), names.end()).size() == 20);
  for (const char* wrong : {"", "0/3", "4/3", "1", "1/", "/3", "1/3x", "-1/3", "a/b"})
    CHECK(Cppool({"run", "--suite", "smoke", "--shard", wrong}).code == 2);
  const Ran none = Cppool({"run", "--suite", "smoke", "--shard", "21/21"});
  CHECK(none.code == 1);
  CHECK(none.err == "cppool: shard 21/21 has none of the 20 cells\n");
}

TEST_CASE("with --fail-fast the first failure is the last cell") {
  TemporaryFolder folder;
  const Ran ran =
      Cppool({"run", "--suite", "smoke", "--fail-fast", "--param", "do=by_schedule", "--filter",
              "cp_comm_type!=all_gather", "--filter", "world_size=4", "--junit", folder.File("out.xml")});
  CHECK(ran.code == 1);
  CHECK(ran.Last() == "0 passed, 1 failed, 0 skipped");  // p2p comes first
  CHECK(ran.Last(1) == "stopped after the first failure (--fail-fast) with 1 of 9 cells done");
  const XmlNode suite = JunitSuiteIn(ReadFile(folder.File("out.xml")));
  CHECK(suite.attributes.at("tests") == "9");
  CHECK(suite.attributes.at("failures") == "1");
  CHECK(suite.attributes.at("skipped") == "8");
  CHECK(Cppool({"run", "--suite", "smoke", "--fail-fast"}).Last() == "20 passed, 0 failed, 0 skipped");
}

TEST_CASE("the limit of a run ends the case that runs, and no other begins") {
  TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  const Ran ran = Cppool({"run", "--param", "do=hang", "--param", "seed=1,2,3", "--deadline", "80000",
                          "--limit", "0.8", "--junit", folder.File("out.xml"), "--json"});
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));  // a backstop
  CHECK(ran.code == 1);
  const std::string stopped = "stopped at the limit of the run (--limit) with 1 of 3 cells done";
  CHECK(Json::parse(ran.Last())["summary"]["stopped"] == stopped);
  CHECK(Has(Json::parse(ran.lines.at(0))["error"], "did not answer within 2."));
  const XmlNode suite = JunitSuiteIn(ReadFile(folder.File("out.xml")));
  CHECK(suite.attributes.at("errors") == "3");
  CHECK(suite.children.at(2).children.at(0).attributes.at("message") == "not run: " + stopped);
  CHECK(Cppool({"run", "--limit", "60"}).code == 0);
  for (const char* wrong : {"0", "-1", "nan", "x"}) CHECK(Cppool({"run", "--limit", wrong}).code == 2);
}

TEST_CASE("what a case writes is shown when it fails, with --verbose always, with --quiet only then") {
  const std::vector<std::string> says = {"run", "--param", "text=\"one line\\nanother\\n\"", "--param"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.begin(), says.begin(), says.end());
    return Cppool(words);
  };
  const std::string shown = "  its output and the daemon's:\n  | one line\n  | another\n";
  CHECK(with({"do=say_and_fail"}).Prints(shown));
  CHECK_FALSE(with({"do=say"}).Prints("one line"));
  CHECK(with({"do=say", "--verbose"}).Prints(shown));
  CHECK(Json::parse(with({"do=say_and_fail", "--json"}).lines.at(0))["output"] ==
        Json({"one line", "another"}));

  CHECK(with({"do=say", "--quiet"}).out == "1 passed, 0 failed, 0 skipped\n");
  const Ran quiet = with({"do=say_and_fail", "--quiet"});
  CHECK(quiet.Prints("FAILED attention W=2\n"));
  CHECK(quiet.Prints(shown));
  CHECK(Cppool({"run", "--suite", "smoke", "--quiet"}).out == "20 passed, 0 failed, 0 skipped\n");
  CHECK(Cppool({"run", "--suite", "smoke", "--verbose"})
            .Prints("passed mha_128 fp16 bshd p2p W=2 in 1.500 ms\n"));
  CHECK(Cppool({"run", "--verbose", "--quiet"}).code == 2);

  // Much output: its end, and how much came before.
  const Ran flood = Cppool({"run", "--param", "do=flood_stderr", "--verbose"});
  CHECK(flood.Prints("  | (49800 lines before these)\n"));
  CHECK(flood.Prints("  | a line of the flood, number 49999\n"));
  CHECK_FALSE(flood.Prints("  | a line of the flood, number 49799\n"));
}

TEST_CASE("a log has everything that the daemons write, by time and cell") {
  TemporaryFolder folder;
  const std::string log = folder.File("run.log");
  Cppool({"run", "--param", "do=say,fail", "--param", "text=\"a word\\n\"", "--log", log});
  const std::vector<std::string> lines = Lines(ReadFile(log));
  const auto has = [&](const std::string& end) {
    return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.size() > end.size() + 14 && line[0] == '[' && line.substr(14) == " " + end;
    });
  };
  CHECK(has("the fake daemon has started"));
  CHECK(has("[attention W=2 do=say] a word"));
  CHECK(has("[attention W=2 do=say] passed"));
  CHECK(has("[attention W=2 do=fail] failed: because of mismatch"));

  const Ran nowhere = Cppool({"run", "--log", "/nowhere/run.log"});
  CHECK(nowhere.code == 2);
  CHECK(nowhere.err == "cppool: cannot write /nowhere/run.log: No such file or directory\n");
  const Ran full = Cppool({"run", "--log", "/dev/full"});
  CHECK(full.code == 1);
  CHECK(full.err == "cppool: cannot write /dev/full: No space left on device\n");
  CHECK(full.Last() == "1 passed, 0 failed, 0 skipped");
}

TEST_CASE("with --json a crash is an object") {
  const Json crash = Json::parse(Cppool({"run", "--param", "do=crash", "--json"}).lines.at(0))["crash"];
  CHECK(crash == Json({{"error", "rank 1 crashed"},
                       {"rank", 1},
                       {"stage", "forward/attend"},
                       {"case", nullptr},
                       {"library", nullptr},
                       {"stack", {"Attend", "Run"}}}));
  CHECK_FALSE(Json::parse(Cppool({"run", "--param", "do=die", "--json"}).lines.at(0)).contains("crash"));
}

TEST_CASE("without a terminal a line now and then says that the run goes on") {
  using cppool::command::Progress;
  std::ostringstream err;
  {
    Progress progress(err, false, 20, std::chrono::milliseconds(5));
    const auto has = [&](const std::string& part) {
      return Eventually([&] {
        progress.Show(4, 1, "a cell");
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        progress.Clear();  // from here on nothing is written
        return err.str().find(part) != std::string::npos;
      });
    };
    CHECK(has("cppool: [5/20] 0:0"));
    CHECK(has(" left, 1 failed, a cell\n"));
    const std::string before = err.str();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(err.str() == before);
  }
  std::ostringstream quick;
  {
    Progress progress(quick, false, 20);
    progress.Show(0, 0, "a cell");
    progress.Clear();
  }
  CHECK(quick.str().empty());
}
