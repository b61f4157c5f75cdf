// Requests on stdin and answers on stdout: invalid input, order, the end of input, noise.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

Json Tiny(Json params = Json::object()) {
  params["max_seqlen_q"] = 16;
  params["num_heads"] = params.value("num_heads", 4);
  return params;
}

Json RunOf(Json params) { return {{"op", "run"}, {"params", std::move(params)}}; }

}  // namespace

TEST_CASE("each invalid input gets a clear error, and the next request is served") {
  DaemonProcess daemon(Host(2));
  const std::string deep(200000, '[');
  const auto run = [](const std::string& params) {
    return R"({"op": "run", "id": 1, "params": {)" + params + "}}";
  };
  struct Bad {
    std::string line, kind, part;
  };
  // One of each part that can refuse: framing, JSON, request, case, parameters, their relations, memory,
  // kernels, files.
  const std::vector<Bad> lines = {
      {"this is not JSON", "invalid_request", ""},
      {std::string(10'000'000, 'x'), "invalid_request", "1048576"},  // NOLINT(bugprone-string-constructor)
      {deep, "invalid_request", "64"},
      {R"({"op": "run", "parms": {}})", "invalid_request", "params"},
      {R"({"op": "run", "case": "atention"})", "invalid_request", "attention"},
      {run(R"("num_head": 4)"), "invalid_request", "num_heads"},
      {run(R"("batch_size": 0)"), "invalid_request", "65536"},
      {run(R"("max_seqlen_q": 31)"), "invalid_request", "divisible by 4"},
      {run(R"("max_seqlen_q": 30)"), "inapplicable", "divisible by 4"},
      {run(R"("batch_size": 65536, "max_seqlen_q": 16777216, "num_heads": 1024)"), "out_of_memory",
       "nothing was allocated"},
      {run(R"("head_dim_qk": 96)"), "unsupported", "head_dim_qk 96"},
      {R"({"op": "run", "inputs": "/nonexistent"})", "invalid_request", "inputs"},
      {R"({"op": "validate", "inputs": "/nonexistent"})", "invalid_request", "inputs"},
  };
  for (const Bad& bad : lines) {
    INFO(bad.line.substr(0, 200));
    daemon.Send(bad.line);
    const Json answer = daemon.ReadAnswer();
    INFO(answer);
    CHECK(answer.at("ok") == false);
    CHECK(answer.at("status") ==
          (bad.kind == "unsupported" || bad.kind == "inapplicable" ? "skipped" : "error"));
    CHECK(answer.at("failure").at("kind") == bad.kind);
    CHECK(Has(answer.at("error"), bad.part));
    CHECK_FALSE(answer.contains("fatal"));
    CHECK(daemon.Ask({{"op", "hello"}, {"id", bad.part}}).at("id") == bad.part);
  }
  CHECK(daemon.Ask(RunOf(Tiny())).at("status") == "passed");
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("requests are answered in order, also those still in the pipe at the end of input") {
  DaemonProcess daemon(Host(2));
  // All requests are sent before an answer is read, so all must fit into the pipes.
  std::string lines;
  for (int i = 0; i < 60; ++i) {
    Json request = i % 3 == 0 ? RunOf(Tiny()) : i % 3 == 1 ? Json{{"op", "hello"}} : Json{{"op", "nonsense"}};
    request["id"] = i;
    lines += request.dump() + (i < 59 ? "\n" : "");
  }
  daemon.Send(lines);
  daemon.CloseInput();
  for (int i = 0; i < 60; ++i) {
    const Json answer = daemon.ReadAnswer();
    CHECK(answer.at("id") == i);
    CHECK(answer.at("ok") == (i % 3 != 2));
  }
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a script may write all requests of a large suite before it reads an answer") {
  DaemonProcess daemon(Host(2));
  daemon.Ask({{"op", "hello"}});   // it has set the size of its pipes by now
  constexpr int kRequests = 2000;  // 600 KB; their answers are more than a pipe holds
  const std::string padding(200, 'x');
  for (int i = 0; i < kRequests; ++i) daemon.Send(Json({{"op", "list"}, {"id", {i, padding}}}).dump());
  daemon.CloseInput();
  for (int i = 0; i < kRequests; ++i) CHECK(daemon.ReadAnswer()["id"][0] == i);
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("an empty line is ignored, not answered, and a last line without a newline is a request") {
  DaemonProcess daemon(Host(1));
  daemon.SendBytes("\n\r\n \t \n{\"op\": \"hello\", \"id\": 1}\n\n\n");
  CHECK(daemon.ReadAnswer().at("id") == 1);
  daemon.SendBytes("\n \n  \n{\"op\": \"stats\", \"id\": 2}");
  daemon.CloseInput();
  const Json stats = daemon.ReadAnswer();
  CHECK(stats.at("id") == 2);
  CHECK(stats.at("requests") == 2);
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("shutdown is answered, later requests are not") {
  DaemonProcess daemon(Host(2));
  daemon.Send("{\"op\": \"shutdown\", \"id\": 9}\n{\"op\": \"hello\"}");
  CHECK(daemon.ReadAnswer() == Json{{"ok", true}, {"id", 9}});
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("the sentinel is an option and may be empty") {
  DaemonProcess bare(Host(1, {"--sentinel", ""}));
  bare.Send(R"({"op": "hello"})");
  CHECK(Json::parse(*bare.ReadLine()).at("ok") == true);
  DaemonProcess own(Host(1, {"--sentinel", "@@ "}));
  own.Send(R"({"op": "hello"})");
  CHECK(own.ReadLine()->rfind("@@ {", 0) == 0);
}

TEST_CASE("hello describes the world") {
  for (const int world_size : {1, 2, 4, 6, 8}) {
    const bool faults = world_size == 2;
    DaemonProcess daemon(
        Host(world_size, faults ? std::vector<std::string>{"--allow-faults"} : std::vector<std::string>{}));
    const Json hello = daemon.Ask({{"op", "hello"}});
    CHECK(hello.at("protocol") == 1);
    CHECK(hello.at("protocol_minor") == 5);
    std::vector<std::string> features = {
        "a2a_size",     "cancel",   "crash_line", "digests",  "dump",     "fp8",      "idle_exit",
        "inapplicable", "inputs",   "kernels",    "launches", "leaks",    "load",     "perturb",
        "profile",      "progress", "ratio",      "samples",  "sampling", "stack",    "start_line",
        "status",       "trace",    "transfers",  "validate", "waits",    "warnings", "worst"};
    if (faults) features.emplace_back("fault");
    std::sort(features.begin(), features.end());
    std::vector<std::string> named = hello.at("features");
    std::sort(named.begin(), named.end());
    CHECK(named == features);
    CHECK(hello.at("pid") == daemon.pid());
    CHECK(hello.at("world_size") == world_size);
    CHECK(hello.at("backend") == "host");
    CHECK(hello.at("transport") == "host");
    CHECK(hello.at("devices").size() == static_cast<std::size_t>(world_size));
    CHECK(hello.at("init_ms").at("total").get<double>() > 0);
    CHECK(daemon.Wait() == 0);
  }
}

TEST_CASE("the output of a case to descriptor 1 goes to stderr, and a case cannot read requests") {
  DaemonProcess daemon(Host(2, {"--case", CPPOOL_ODD_CASE}));
  const auto run = [&](const char* action) {
    return daemon.Ask({{"op", "run"}, {"case", "odd"}, {"params", {{"action", action}}}});
  };
  CHECK(run("noise").at("status") == "passed");
  CHECK(run("steal").at("status") == "passed");
  CHECK(run("pass").at("status") == "passed");
  daemon.CloseInput();
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 0);
  for (const char* noise : {"noise by printf", "noise by cout", "noise by write"})
    CHECK(Has(daemon.Stderr(), noise));
}

}  // namespace cppool::test
