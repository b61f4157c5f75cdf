// `cppool report`, and --html of run and bench: what the page holds. report_page_test.py opens it in a
// browser.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "client/command/report_page.h"
#include "tests/catch.h"
#include "tests/child.h"
#include "tests/client/command_support.h"

namespace cppool::command::test {
namespace {

using namespace cppool::test;

// Returns the records in a page as its script reads them: up to the end of their element.
Json RecordsIn(const std::string& html) {
  const std::string begin = "<script type=\"application/json\" id=\"records\">";
  const std::size_t at = html.find(begin);
  REQUIRE(at != std::string::npos);
  const std::size_t from = at + begin.size();
  return Json::parse(html.substr(from, html.find("</script", from) - from));
}
Json PartsIn(const std::string& file) { return RecordsIn(ReadFile(file))["parts"]; }

Json Check(const std::string& tensor, const std::string& against, int rank, bool ok, double error) {
  Json check = {{"tensor", tensor}, {"against", against},   {"rank", rank},     {"ok", ok},
                {"rel_err", 0.5},   {"max_abs_err", error}, {"tolerance", 0.01}};
  if (against == "oracle") check["ratio"] = error * 1000;
  return check;
}

Json Cell(const std::string& error) {
  return {{"name", "mha p2p W=2"},
          {"rows", {"mha"}},
          {"case", "attention"},
          {"world_size", 2},
          {"params", {{"cp_comm_type", "p2p"}}},
          {"status", error.empty() ? "passed" : "failed"},
          {"seconds", 0.5},
          {"error", error.empty() ? Json() : Json(error)},
          {"repeat", "cppool run --world-size 2"},
          {"answer", Json()}};
}

Json Row() {
  return {{"case", "attention"},
          {"world_size", 2},
          {"params", {{"max_seqlen_q", 128}}},
          {"kernels", Json()},
          {"measured",
           {{"stages",
             {{"forward", {{"ms", 1.5}, {"tflops", 2.0}, {"precision", 0.01}, {"rounds", {1.4, 1.6}}}}}},
            {"precise", true}}},
          {"efficiency", {{"forward", 0.5}}},
          {"command", "cppool bench --world-size 2"}};
}

}  // namespace

TEST_CASE("a page is whole in itself, and texts in it are no markup") {
  const std::string hostile = "</script><script>alert(1)</script><!--<script> & \"'/*RUN*/ \xe2\x80\xa8 \xff";
  ReportPage page;
  page.Begin(hostile);
  page.Add(Cell(hostile));
  page.Add({{"summary", {{"stopped", hostile}}}});
  const std::string html = page.Html();
  const Json part = RecordsIn(html)["parts"].at(0);
  const std::string shown = Replaced(hostile, "\xff", "\xef\xbf\xbd");
  CHECK(part["records"].at(0)["error"] == shown);
  CHECK(part["summary"]["stopped"] == shown);
  CHECK(part["from"] == shown);
  CHECK_FALSE(Has(html, "alert(1)</script>"));
  // It has no mark left but that of the text, and names no other file.
  for (const char* mark : {"/*CHART*/", "/*RECORDS*/", "/*BENCH*/"}) CHECK_FALSE(Has(html, mark));
  for (const char* other : {" src=", "<link", "@import", "url("}) CHECK_FALSE(Has(html, other));
  CHECK(Has(html, "Content-Security-Policy"));
  CHECK(Has(html, "Chart.js v") == !ReportText("chart").empty());
}

TEST_CASE("of an answer a page has all checks that fail, and the worst of the others") {
  Json cell = Cell("off");
  cell["answer"] = {{"ok", true},
                    {"trace", "long"},
                    {"checks",
                     {Check("out", "oracle", 0, true, 0.002), Check("out", "oracle", 1, true, 0.003),
                      Check("dq", "oracle", 0, false, 0.5), Check("dq", "oracle", 1, false, 0.6),
                      Check("out", "no_cp", 0, true, 0.004), Check("out", "no_cp", 1, true, 0.001)}},
                    {"ranks",
                     {{{"rank", 0}, {"ok", true}, {"gpu_ms", {{"forward", 1}}}},
                      {{"rank", 1}, {"ok", false}, {"error", "rank 1 threw"}}}}};
  ReportPage page;
  page.Begin("run");
  page.Add(cell);
  const Json answer = RecordsIn(page.Html())["parts"][0]["records"][0]["answer"];
  CHECK(answer["of_checks"] == 6);
  REQUIRE(answer["checks"].size() == 4);
  CHECK((answer["checks"][0] == cell["answer"]["checks"][2] &&
         answer["checks"][1] == cell["answer"]["checks"][3]));
  CHECK(answer["checks"][2] == cell["answer"]["checks"][4]);
  CHECK(answer["checks"][3] == cell["answer"]["checks"][1]);
  CHECK(answer["ranks"] == Json({{{"rank", 1}, {"error", "rank 1 threw"}}}));
  CHECK_FALSE(answer.contains("trace"));
}

TEST_CASE("the page of --html has the records that --json prints, and that of report, too") {
  const TemporaryFolder folder;
  const std::string page = folder.File("run.html"), again = folder.File("again.html"),
                    printed = folder.File("run.json");
  const Ran run = Cppool({"run", "--suite", "smoke", "--param", "do=by_schedule", "--json", "--html", page});
  CHECK(run.code == 1);
  WriteFile(printed, run.out);
  const Ran report = Cppool({"report", printed, "-o", again}, "");
  CHECK(report.code == 0);
  CHECK(report.out == again + ": 20 cells of runs, 0 rows of benches\n");

  const Json parts = PartsIn(page);
  REQUIRE(parts.size() == 1);
  CHECK(parts[0]["from"] == "cppool run --suite smoke");
  CHECK(PartsIn(again)[0]["from"] == printed);
  CHECK(PartsIn(again)[0]["records"] == parts[0]["records"]);
  CHECK(PartsIn(again)[0]["summary"] == parts[0]["summary"]);
  REQUIRE(parts[0]["records"].size() == 20);
  int failed = 0;
  for (std::size_t i = 0; i < 20; ++i) {
    const Json record = Json::parse(run.lines.at(i)), shown = parts[0]["records"][i];
    for (const char* key : {"name", "status", "world_size", "params", "repeat"})
      CHECK(shown[key] == record[key]);
    CHECK(shown.value("error", Json()) == record["error"]);
    failed += shown["status"] == "failed";
  }
  CHECK(failed > 0);
  CHECK(Json::parse(run.Last()).at("summary") == parts[0]["summary"]);
  for (const char* key : {"begin", "host", "version"}) CHECK(parts[0]["summary"][key].is_string());
  CHECK(parts[0]["summary"]["worlds"].size() == 2);
}

TEST_CASE("a bench writes its page from what it saves, and one page shows runs and benches") {
  const TemporaryFolder folder;
  const std::string daemon = Wrapped(folder, "--start sampling");
  const std::string saved = folder.File("saved"), page = folder.File("bench.html");
  const std::vector<std::string> bench = {
      "bench", "--param", "do=bench", "--param", "max_seqlen_q=128,256", "--repeat", "12"};
  std::vector<std::string> words = bench;
  words.insert(words.end(), {"--save", saved, "--html", page, "--json"});
  const Ran ran = Cppool(words, daemon);
  CHECK(ran.code == 0);
  const Json part = PartsIn(page).at(0);
  CHECK((part["kind"] == "bench" && part["records"].size() == 2));
  CHECK(part["summary"] == Json::parse(ReadFile(saved))["summary"]);
  const Json row = Json::parse(ran.lines.at(0)), shown = part["records"][0];
  for (const char* key : {"params", "efficiency", "errors", "command"}) CHECK(shown[key] == row[key]);
  CHECK(shown["measured"]["stages"]["forward"]["tflops"] == row["measured"]["stages"]["forward"]["tflops"]);

  // What --json prints, in one file with a run before it, and what was saved with a baseline.
  const std::string both = folder.File("both"), all = folder.File("all.html"),
                    compared = folder.File("compared");
  WriteFile(both, Cppool({"run", "--json"}).out + "\n" + ran.out);
  words = bench;
  words.insert(words.end(), {"--save", compared, "--baseline", saved});
  CHECK(Cppool(words, daemon).code == 0);
  CHECK(Cppool({"report", both, compared, "--output", all}, "").code == 0);
  const Json parts = PartsIn(all);
  REQUIRE(parts.size() == 3);
  CHECK((parts[0]["kind"] == "run" && parts[0]["records"].size() == 1));
  CHECK((parts[1]["kind"] == "bench" && parts[1]["records"] == part["records"]));
  CHECK(parts[2]["records"][0]["baseline"]["verdict"] == "same");
}

TEST_CASE("what report cannot use is an error that names file and line, and nothing is written") {
  const TemporaryFolder folder;
  const std::string file = folder.File("in"), page = folder.File("page.html");
  const auto error = [&](const std::vector<std::string>& words) {
    const Ran ran = Cppool(words, "");
    CHECK(ran.code == 2);
    CHECK(ran.out.empty());
    CHECK_FALSE(std::filesystem::exists(page));
    return ran.err;
  };
  const auto of = [&](const std::string& text) {
    WriteFile(file, text);
    const std::string said = error({"report", file, "-o", page});
    const std::string begin = "cppool: " + file + ":";
    CHECK(said.rfind(begin, 0) == 0);
    return said.substr(std::min(begin.size(), said.size()));
  };
  const std::string good = Cell("").dump() + "\n";
  CHECK(Has(of(""), "1: empty: give what `cppool run --json`"));
  CHECK(Has(of("\n \n"), "1: empty"));
  CHECK(Has(of("{\n}\n"), ": give what `cppool run --json` or `cppool bench --json` has printed"));
  CHECK(Has(of(good + "passed mha\n"), "2: "));
  CHECK(Has(of(good + "\n" + good.substr(0, 50)), "3: "));
  CHECK(Has(of(good + "\xff\n"), "2: "));
  CHECK(Has(of(good + "[1]\n"), "2: not an object\n"));
  CHECK(Has(of("{\"a\": 1}\n"),
            "1: neither a record of `cppool run --json` nor one of `cppool bench --json`\n"));
  CHECK(Has(of("{\"name\": \"a\", \"would\": \"run\"}\n"),
            "1: what `cppool run --list` prints: nothing ran\n"));
  CHECK(Has(of("{\"format\": \"cppool bench\", \"rows\": 1}"), "1: not as `cppool bench --save` writes it"));
  for (const char* key : {"name", "world_size", "params"})
    for (const Json& value : {Json(), Json({1})}) {
      Json cell = Cell("");
      cell[key] = value;
      CAPTURE(cell.dump());
      if (key != std::string("name") || !value.is_null())
        CHECK(Has(of(cell.dump()), "1: not as `cppool run --json` or `cppool bench --json` prints it: "));
    }
  Json cell = Cell("");
  cell["answer"] = {{"checks", {1}}};
  CHECK(Has(of(cell.dump()), "1: not as "));
  for (const char* key : {"world_size", "params", "measured"}) {
    Json row = Row();
    row[key] = "a";
    CAPTURE(key);
    CHECK(Has(of(good + row.dump()), "2: not as "));
  }
  CHECK(Has(error({"report", folder.File("none"), "-o", page}),
            "cannot read " + folder.File("none") + ": No such"));
  CHECK(Has(error({"report", folder.File(""), "-o", page}), "Is a directory"));
  WriteFile(file, good);
  CHECK(Has(error({"report", file}), "--output"));
  CHECK(Has(error({"report", "-o", page}), "FILE"));
  CHECK(Has(error({"report", file, "-o", folder.File("none") + "/page"}),
            "-o: cannot write " + folder.File("none")));
  CHECK(Has(error({"report", file, "-o", folder.File("")}), "it is a folder"));
}

TEST_CASE("a page that cannot be written is an error before anything runs") {
  const TemporaryFolder folder;
  const std::string log = folder.File("log"), page = folder.File("none") + "/page.html";
  for (const std::string command : {"run", "bench"}) {
    const Ran ran = Cppool({command, "--param", "do=bench", "--param", "log=" + log, "--html", page});
    CHECK(ran.code == 2);
    CHECK(ran.err.rfind("cppool: --html: cannot write " + page, 0) == 0);
    CHECK_FALSE(std::filesystem::exists(log));
  }
  CHECK(Cppool({"run", "--list", "--html", folder.File("page")}).code == 2);
}

TEST_CASE("the page of a run that is stopped or interrupted has what is done") {
  const TemporaryFolder folder;
  const std::string page = folder.File("page.html");
  CHECK(Cppool({"run", "--suite", "smoke", "--param", "do=fail", "--fail-fast", "--html", page}).code == 1);
  Json part = PartsIn(page).at(0);
  CHECK(part["records"].size() == 1);
  CHECK(Has(part["summary"]["stopped"], "with 1 of 20 cells done"));

  // The second cell hangs.
  const std::string begun = folder.File("begun");
  for (const std::string command : {"run", "bench"}) {
    CAPTURE(command);
    std::filesystem::remove(begun);
    const std::string words = command == "run"
                                  ? "run --param do=pass,hang --json"
                                  : "bench --world-size 1,4 --param do=bench_to_4 --repeat 2 --json";
    const std::string daemon = command == "run" ? CPPOOL_FAKE_DAEMON : Wrapped(folder, "--start sampling");
    RunChild("'" + std::string(CPPOOL_COMMAND) + "' " + words + " --daemon '" + daemon + "' --html '" + page +
             "' >'" + begun + "' & for i in $(seq 1200); do [ -s '" + begun +
             "' ] && break; sleep 0.05; done; kill -TERM $!; wait $!");
    part = PartsIn(page).at(0);
    CHECK(part["kind"] == command);
    CHECK(part["records"].size() == 1);
    CHECK(Has(part["summary"]["interrupted"], "with 1 of 2 "));
    CHECK_FALSE(part["summary"]["worlds"].empty());
  }
}

}  // namespace cppool::command::test
