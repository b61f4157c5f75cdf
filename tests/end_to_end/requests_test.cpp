// Requests on stdin and answers on stdout: invalid input, order, the end of input, noise.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"

namespace cppool::test {
namespace {

std::vector<std::string> Host(int world_size, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments{"--world-size", std::to_string(world_size), "--backend", "host"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Json Tiny(Json params = Json::object()) {
  params["max_seqlen_q"] = 16;
  params["num_heads"] = params.value("num_heads", 4);
  return params;
}

Json RunOf(Json params) { return {{"op", "run"}, {"params", std::move(params)}}; }

bool Has(const Json& text, const std::string& part) {
  return text.get<std::string>().find(part) != std::string::npos;
}

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
  const std::vector<Bad> lines = {
      {"this is not JSON", "invalid_request", ""},
      {"42", "invalid_request", "object"},
      {std::string(10'000'000, 'x'), "invalid_request", "1048576"},  // NOLINT(bugprone-string-constructor)
      {R"({"op": "hello", "id": ")" + std::string(2'000'000, 'x') + "\"}", "invalid_request", "1048576"},
      {"{\"op\": \"hel\xff\xfelo\"}", "invalid_request", "UTF-8"},
      {deep + std::string(200000, ']'), "invalid_request", "64"},
      {deep, "invalid_request", "64"},
      {R"({"op": "hallo"})", "invalid_request", "hello"},
      {R"({"op": "run", "parms": {}})", "invalid_request", "params"},
      {R"({"op": "run", "case": "atention"})", "invalid_request", "attention"},
      {run(R"("num_head": 4)"), "invalid_request", "num_heads"},
      {run(R"("dtype": "bf15")"), "invalid_request", "bf16"},
      {run(R"("num_heads": "four")"), "invalid_request", "num_heads"},
      {run(R"("is_training": 1)"), "invalid_request", "is_training"},
      {run(R"("batch_size": 0)"), "invalid_request", "65536"},
      {run(R"("batch_size": -2)"), "invalid_request", "65536"},
      {run(R"("batch_size": 1.5)"), "invalid_request", "batch_size"},
      {run(R"("batch_size": 99999999999999999999999)"), "invalid_request", ""},
      {run(R"("softmax_scale": 1e999)"), "invalid_request", ""},
      {run(R"("max_seqlen_q": 31)"), "invalid_request", "divisible by 4"},
      {run(R"("max_seqlen_q": 30)"), "inapplicable", "divisible by 4"},
      {run(R"("cp_comm_type": "a2a", "num_heads": 3)"), "inapplicable", "divisible by 2"},
      {run(R"("cp_comm_type": "a2a+p2p")"), "inapplicable", "needs a world_size with a divisor"},
      {run(R"("batch_size": 65536, "max_seqlen_q": 16777216, "num_heads": 1024)"), "out_of_memory",
       "nothing was allocated"},
      {run(R"("head_dim_qk": 96)"), "unsupported", "head_dim_qk 96"},
      {run(R"("dtype": "fp8")"), "invalid_request", "fp8_dpa and fp8_mha are both false"},
      {run(R"("fp8_dpa": true)"), "invalid_request", "fp8_dpa is for dtype 'fp8' alone"},
      {run(R"("window_size": [-2, 0])"), "invalid_request", "window_size"},
      {run(R"("window_size": [4])"), "invalid_request", "window_size"},
      {run(R"("bias_shape": "1h1s")"), "invalid_request", "bias_shape"},
      {run(R"("qkv_format": "thd", "cu_seqlens_q": [0, 400, 401])"), "invalid_request", "cu_seqlens_q"},
      {run(R"("qkv_format": "thd", "pad_between_seqs": true, )"
           R"("cu_seqlens_q": [0, 9, 12], "cu_seqlens_q_padded": [0, 8, 16])"),
       "invalid_request", "beyond the padded length"},
      {run(R"("cu_seqlens_q": [0, 9, 12])"), "invalid_request", "cu_seqlens_q"},
      {R"({"op": "run", "perturb": -1})", "invalid_request", "perturb"},
      {R"({"op": "run", "dump": 7})", "invalid_request", "dump"},
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

TEST_CASE("an empty line is ignored, not answered") {
  DaemonProcess daemon(Host(1));
  daemon.SendBytes("\n\r\n \t \n{\"op\": \"hello\", \"id\": 1}\n\n\n");
  CHECK(daemon.ReadAnswer().at("id") == 1);
  daemon.SendBytes("\n{\"op\": \"stats\", \"id\": 2}\n \n  ");  // the last one without a newline
  daemon.CloseInput();
  const Json stats = daemon.ReadAnswer();
  CHECK(stats.at("id") == 2);
  CHECK(stats.at("requests") == 2);
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a last line without a newline is a request") {
  DaemonProcess shell({"-c", std::string("printf '{\"op\": \"hello\", \"id\": \"last\"}' | '") +
                                 CPPOOL_DAEMON + "' --world-size 1 --backend host"},
                      "/bin/sh");
  CHECK(shell.ReadAnswer().at("id") == "last");
  CHECK(shell.Wait() == 0);
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

TEST_CASE("a daemon with --allow-faults lists the feature fault") {
  DaemonProcess daemon(Host(1, {"--allow-faults"}));
  const Json features = daemon.Ask({{"op", "hello"}}).at("features");
  CHECK(std::count(features.begin(), features.end(), "fault") == 1);
}

TEST_CASE("hello describes the world") {
  for (const int world_size : {1, 2, 4, 6, 8}) {
    DaemonProcess daemon(Host(world_size));
    const Json hello = daemon.Ask({{"op", "hello"}});
    CHECK(hello.at("protocol") == 1);
    CHECK(hello.at("protocol_minor") == 4);
    const Json features = hello.at("features");
    const auto has = [&](const char* name) {
      return std::count(features.begin(), features.end(), name) == 1;
    };
    for (const char* name : {"validate", "perturb", "dump", "inputs", "ratio", "idle_exit"}) CHECK(has(name));
    CHECK_FALSE(has("fault"));
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

TEST_CASE("a case that leaves a group of calls open is an error and does not affect the next case") {
  DaemonProcess daemon(Host(2, {"--case", CPPOOL_ODD_CASE}));
  const Json answer =
      daemon.Ask({{"op", "run"}, {"case", "odd"}, {"params", {{"action", "open_group"}, {"rank", 1}}}});
  INFO(answer);
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("failure").at("stage") == "exchange");
  CHECK(Has(answer.at("error"), "the case left a group of calls open"));
  CHECK_FALSE(answer.contains("fatal"));
  const Json params = {{"cp_comm_type", "p2p"}, {"max_seqlen_q", 64}, {"max_seqlen_kv", 64}};
  const Json next = daemon.Ask({{"op", "run"}, {"params", params}, {"deadline_ms", 60000}});
  INFO(next);
  CHECK(next.at("status") == "passed");
  CHECK(daemon.Ask({{"op", "run"}, {"case", "odd"}}).at("status") == "passed");
}

TEST_CASE("allocations that a case does not free are freed and counted") {
  DaemonProcess daemon(Host(2, {"--case", CPPOOL_ODD_CASE}));
  CHECK(daemon.Ask({{"op", "run"}, {"case", "odd"}, {"params", {{"action", "pass"}}}}).at("ok") == true);
  CHECK(daemon.Ask({{"op", "stats"}}).at("leaked_allocations") == 0);
  CHECK(daemon.Ask({{"op", "run"}, {"case", "odd"}, {"params", {{"action", "leak"}}}}).at("ok") == true);
  const Json stats = daemon.Ask({{"op", "stats"}});
  CHECK(stats.at("leaked_allocations") == 1);
  CHECK(stats.at("passed") == 2);
  for (const Json& memory : stats.at("memory")) CHECK(memory.at("held_bytes") == 0);
}

}  // namespace cppool::test
