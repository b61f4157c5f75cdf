// A Pool with daemons that answer and daemons that do not.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <thread>

#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::Pools;
using cppool::Result;
using cppool::Status;

namespace {

// The PoolError of a run that must throw one.
PoolError ErrorOf(Pool& pool, const Json& params, const cppool::RunOptions& options = Within(60s)) {
  try {
    Result result = pool.Run(params, options);
    FAIL("an answer instead of an error: " << result.json.dump());
  } catch (const PoolError& error) {
    return error;
  }
  throw std::logic_error("not reached");
}

}  // namespace

TEST_CASE("Run converts an answer to a Result") {
  LeavesNothing([] {
    Pool pool(FakeOptions());
    Result passed = pool.Run();
    CHECK(passed.ok());
    CHECK(passed.status == Status::kPassed);
    CHECK(passed.wall_ms == 1.5);
    CHECK(passed.seed == 1234u);
    CHECK(passed.attempts == 1);
    REQUIRE(passed.ranks.size() == 1);
    CHECK(passed.ranks[0].gpu_ms.at(0) == std::pair<std::string, double>("forward", 3.0));
    CHECK(passed.tflops.at(0) == std::pair<std::string, double>("forward", 2.0));
    CHECK(passed.json["status"] == "passed");

    Result failed = pool.Run(Do("fail"));
    CHECK_FALSE(failed.ok());
    CHECK(failed.status == Status::kFailed);
    CHECK(failed.error == "because of mismatch");
    REQUIRE(failed.failure.has_value());
    CHECK(failed.failure->kind == "mismatch");
    CHECK(failed.failure->rank == 1);
    REQUIRE(failed.checks.size() == 2);
    CHECK(failed.checks[0].tensor == "dq");
    CHECK(std::isnan(failed.checks[0].max_abs_err));
    CHECK_FALSE(failed.checks[0].ok);
    CHECK(failed.checks[1].ok);
    CHECK(failed.attempts == 1);
    CHECK(pool.Run(Do("skip")).status == Status::kSkipped);
    CHECK(pool.Run(Do("error")).status == Status::kError);
    CHECK(pool.Run(Do("no_id")).failure->kind == "invalid_request");
  });
}

TEST_CASE("a request has the run options, and the next call uses the same daemon") {
  Pool pool(FakeOptions());
  cppool::RunOptions options;
  options.case_name = "mine";
  options.deadline = 1234ms;
  options.warmup = 2;
  options.repeat = 5;
  options.checks = false;
  options.perturb = 17;
  options.dump = "a/b";
  options.inputs = "/c";
  options.trace = "t.json";
  options.fault = cppool::Fault{"throw", 1, "forward", 2};
  Json first = pool.Run({{"do", "echo"}, {"max_seqlen_q", 256}}, options).json;
  CHECK(first["request"]["case"] == "mine");
  CHECK(first["request"]["deadline_ms"] == 1234);
  CHECK(first["request"]["warmup"] == 2);
  CHECK(first["request"]["repeat"] == 5);
  CHECK(first["request"]["checks"] == false);
  CHECK(first["request"]["perturb"] == 17);
  CHECK(first["request"]["dump"] == std::filesystem::current_path().string() + "/a/b");
  CHECK(first["request"]["inputs"] == "/c");
  CHECK(first["request"]["trace"] == std::filesystem::current_path().string() + "/t.json");
  CHECK(first["request"]["fault"] ==
        Json({{"kind", "throw"}, {"rank", 1}, {"stage", "forward"}, {"count", 2}}));
  CHECK(first["request"]["params"] == Json({{"do", "echo"}, {"max_seqlen_q", 256}}));
  Json plain = pool.Run(Do("echo")).json;
  for (const char* key : {"perturb", "dump", "inputs", "trace", "fault"})
    CHECK_FALSE(plain["request"].contains(key));
  CHECK(plain["surroundings"]["pid"] == first["surroundings"]["pid"]);
  CHECK(pool.Hello()["pid"] == first["surroundings"]["pid"]);
  CHECK(pool.Stats()["ok"] == true);
  CHECK(pool.List()["ok"] == true);
}

TEST_CASE("a newer daemon's minor version, features and unknown members are accepted") {
  LeavesNothing([] {
    Pool pool(FakeOptions("newer"));
    CHECK(pool.Features() == std::vector<std::string>{"validate", "a new one"});
    CHECK(pool.Hello()["protocol_minor"] == 99);
    const Result result = pool.Run(Do("more_members"));
    CHECK(result.status == Status::kFailed);
    CHECK(result.attempts == 1);
    CHECK(result.failure->kind == "a new kind");
    CHECK(result.checks.size() == 2);
    CHECK(result.ranks.size() == 1);
    CHECK(result.json["new"]["a"] == Json({1, 2}));
  });
}

TEST_CASE("an older daemon has no features, and a feature that is not a string breaks the protocol") {
  Pool old(FakeOptions());
  CHECK(old.Features().empty());
  Pool odd(FakeOptions("odd_features"));
  CHECK(odd.Run().ok());
  try {
    odd.Features();
    FAIL("a feature that is not a string was accepted");
  } catch (const PoolError& error) {
    CHECK(error.kind() == PoolError::Kind::kProtocol);
    CHECK(Has(error.what(), "a feature is not a string"));
  }
}

TEST_CASE("Validate returns whether a run would start, and if not, why") {
  LeavesNothing([] {
    Pool pool(FakeOptions());
    cppool::RunOptions options = Within(1234ms);
    options.perturb = 3;
    Result runs = pool.Validate({{"max_seqlen_q", 256}}, options);
    CHECK(runs.ok());
    CHECK(runs.attempts == 1);
    CHECK(runs.json["request"]["op"] == "validate");
    CHECK(runs.json["request"]["params"] == Json({{"max_seqlen_q", 256}}));
    CHECK(runs.json["request"]["deadline_ms"] == 1234);
    CHECK(runs.json["request"]["perturb"] == 3);
    Result skipped = pool.Validate(Do("skip"));
    CHECK(skipped.status == Status::kSkipped);
    CHECK(skipped.error == "because of unsupported");
    CHECK(pool.Validate(Do("error")).status == Status::kError);
    for (const auto& [what, why] : {std::pair("contradict", "\"runs\" is not true"),
                                    std::pair("digest", "\"libraries[0].digest\" must be")}) {
      try {
        pool.Validate(Do(what));
        FAIL("the answer was accepted: " << what);
      } catch (const PoolError& error) {
        CHECK(error.kind() == PoolError::Kind::kProtocol);
        CHECK(Has(error.what(), why));
      }
    }
  });
}

// Its answer to a passed deadline names what hangs: it must not be killed before, nor waited for much longer.
TEST_CASE("Validate waits for the deadline that it sends, and the grace") {
  LeavesNothing([] {
    Pool pool(FakeOptions());
    try {
      pool.Validate(Do("hang"), Within(100ms));
      FAIL("it was answered");
    } catch (const PoolError& error) {
      CHECK(error.kind() == PoolError::Kind::kTimeout);
      CHECK(Has(error.what(), "did not answer within 0.3 s"));
    }
  });
}

TEST_CASE("a check has a ratio if the daemon's answer has one") {
  Pool pool(FakeOptions());
  Result result = pool.Run({{"do", "by_schedule"}, {"cp_comm_type", "a2a"}});
  REQUIRE(result.checks.size() == 3);
  CHECK(result.checks[0].ratio == 1.25);
  REQUIRE(result.checks[1].ratio.has_value());
  CHECK(std::isnan(*result.checks[1].ratio));
  CHECK_FALSE(pool.Run(Do("fail")).checks.at(0).ratio.has_value());
}

TEST_CASE("run options out of range are refused before a daemon is spawned") {
  TemporaryFolder folder;
  cppool::PoolOptions options = FakeOptions();
  options.arguments = {"--count", folder.File("count")};
  Pool pool(options);
  CHECK_THROWS_AS(pool.Run({}, Within(0ms)), std::invalid_argument);
  CHECK_THROWS_AS(pool.Run({}, Within(25h)), std::invalid_argument);
  cppool::RunOptions refused;
  refused.dump = std::string("a\0b", 3);
  CHECK_THROWS_AS(pool.Run({}, refused), std::invalid_argument);
  CHECK_THROWS_AS(pool.Validate({}, refused), std::invalid_argument);
  refused = {};
  refused.perturb = std::uint64_t{1} << 63;
  CHECK_THROWS_AS(pool.Run({}, refused), std::invalid_argument);
  refused = {};
  refused.fault = cppool::Fault{"throw", -1};
  CHECK_THROWS_AS(pool.Run({}, refused), std::invalid_argument);
  refused.fault = cppool::Fault{"throw", 0, "", 0};
  CHECK_THROWS_AS(pool.Run({}, refused), std::invalid_argument);
  cppool::RunOptions none;
  none.repeat = 0;
  CHECK_THROWS_AS(pool.Run({}, none), std::invalid_argument);
  none.repeat = 1;
  none.warmup = -1;
  CHECK_THROWS_AS(pool.Run({}, none), std::invalid_argument);
  auto refusal = [&](const Json& params, const cppool::RunOptions& what) -> std::string {
    try {
      pool.Run(params, what);
      return "none";
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  CHECK(Has(refusal({{"good", 1}, {"scale", std::nan("")}}, {}), "the parameter \"scale\": "));
  CHECK(Has(refusal({{"deep", {1, {{"er", HUGE_VAL}}}}}, {}), "the parameter \"deep\": "));
  CHECK(Has(refusal({{"name", "\xff"}}, {}), "the parameter \"name\": "));
  CHECK(Has(refusal({{"\xff", 1}}, {}), "the parameter \""));
  refused = {};
  refused.case_name = "\xff";
  CHECK(Has(refusal({}, refused), "UTF-8"));
  CHECK(CountLines(folder.File("count")) == 0);
  CHECK(pool.Run().ok());
  CHECK(CountLines(folder.File("count")) == 1);
}

TEST_CASE(
    "options that a command line or environment cannot hold, and limits out of range, are refused by the "
    "constructor") {
  auto change = GENERATE(values<void (*)(cppool::PoolOptions&)>({
      [](cppool::PoolOptions& options) { options.sentinel = std::string("a\0b", 3); },
      [](cppool::PoolOptions& options) { options.sentinel = "a\nb"; },
      [](cppool::PoolOptions& options) { options.retries = -1; },
      [](cppool::PoolOptions& options) { options.daemon = std::string("a\0b", 3); },
      [](cppool::PoolOptions& options) {
        options.devices = {"0", std::string("a\0b", 3)};
      },
      [](cppool::PoolOptions& options) { options.case_files = {std::string("a\0b", 3)}; },
      [](cppool::PoolOptions& options) { options.arguments = {std::string("a\0b", 3)}; },
      [](cppool::PoolOptions& options) {
        options.environment = {{"A", std::string("a\0b", 3)}};
      },
      [](cppool::PoolOptions& options) {
        options.environment = {{"A=B", "C"}};
      },
      [](cppool::PoolOptions& options) {
        options.environment = {{"", "C"}};
      },
      [](cppool::PoolOptions& options) { options.start_limit = std::chrono::milliseconds::max(); },
      [](cppool::PoolOptions& options) { options.start_limit = -1ms; },
      [](cppool::PoolOptions& options) { options.grace = std::chrono::milliseconds::max(); },
      [](cppool::PoolOptions& options) { options.kill_grace = 25h; },
      [](cppool::PoolOptions& options) { options.idle_exit = -1s; },
  }));
  cppool::PoolOptions options = FakeOptions();
  change(options);
  CHECK_THROWS_AS(Pool(options), std::invalid_argument);
  CHECK_THROWS_AS(Pools(options), std::invalid_argument);
}

TEST_CASE("the daemon gets the command line and the environment of the options") {
  cppool::PoolOptions options = FakeOptions();
  options.world_size = 4;
  options.backend = "host";
  options.devices = {"3", "GPU-1234"};
  options.case_files = {"a.so", "b.so"};
  options.log_level = "debug";
  options.sentinel = "<<>>";
  options.environment = {{"FAKE_VARIABLE", "a = b"}};
  Pool pool(options);
  Json seen = pool.Run(Do("echo")).json["surroundings"];
  CHECK(seen["arguments"] ==
        Json({"--world-size", "4", "--backend", "host", "--transport", "auto", "--sentinel", "<<>>", "--case",
              "a.so", "--case", "b.so", "--log-level", "debug"}));
  CHECK(seen["environment"]["CUDA_VISIBLE_DEVICES"] == "3,GPU-1234");
  CHECK(seen["environment"]["FAKE_VARIABLE"] == "a = b");
  CHECK(seen["environment"]["CPPOOL_PARENT_PID"] == std::to_string(getpid()));
}

TEST_CASE("with an empty sentinel answers are bare lines") {
  cppool::PoolOptions options = FakeOptions("noise");
  options.sentinel = "";
  std::vector<std::string> log;
  options.log = [&](std::string_view line) { log.emplace_back(line); };
  Pool pool(options);
  CHECK(pool.Run().ok());
  CHECK(log == std::vector<std::string>{"a library greets", "and greets"});
}

TEST_CASE(
    "a daemon that cannot start is an error with its message, and is not started again in the same call") {
  struct Case {
    const char* start;
    const char* text;
  };
  auto [start, text] =
      GENERATE(Case{"usage", "4 ranks need 4 devices"}, Case{"usage", "exited with code 2 at its start"},
               Case{"die", "killed by signal 9"}, Case{"silent", "did not answer `hello` within 1 s"},
               Case{"garbage", "is not JSON"}, Case{"other_protocol", "speaks protocol 7, this client 1"},
               Case{"other_world", "world size"}, Case{"refuse", "not today"});
  INFO(start);
  LeavesNothing([&, start = start, text = text] {
    TemporaryFolder folder;
    cppool::PoolOptions options = FakeOptions(start);
    options.arguments.insert(options.arguments.end(), {"--count", folder.File("count")});
    if (std::string(start) == "silent") options.start_limit = 1s;
    Pool pool(options);
    PoolError error = ErrorOf(pool, {});
    CHECK(error.kind() == PoolError::Kind::kStart);
    INFO(error.what());
    CHECK(Has(error.what(), text));
    CHECK(Has(error.stderr_tail(), "the fake daemon has started"));
    CHECK(CountLines(folder.File("count")) == 1);
  });
}

TEST_CASE("the cause of a failed start is read from the daemon's start line") {
  const auto error_of = [](const std::string& start) {
    INFO(start);
    Pool pool(FakeOptions(start));
    PoolError error = ErrorOf(pool, {});
    CHECK(error.kind() == PoolError::Kind::kStart);
    CHECK(Has(error.what(), "exited with code 2 at its start"));
    CHECK_FALSE(Has(error.stderr_tail(), "not the last one"));
    return error;
  };
  for (const char* start : {"start_line", "start_noise", "start_new"}) {
    const PoolError error = error_of(start);
    REQUIRE(error.start_failure());
    const cppool::StartFailure& why = *error.start_failure();
    CHECK(why.error == "no room for 4 ranks: ask for fewer");
    CHECK(why.kind == (start == std::string("start_new") ? "a new kind" : "out_of_memory"));
    CHECK(why.detail == "no room");
    CHECK(why.stage == "ranks");
    CHECK(why.rank == 3);
    CHECK(why.world_size == 4);
    CHECK(why.devices == 2);
    CHECK(why.backend == "cuda");
    CHECK(why.transport == "peer");
    CHECK(Has(error.what(), "at its start: no room for 4 ranks: ask for fewer\n"));
    CHECK_FALSE(Has(error.what(), "cppoold: start {"));
    if (start != std::string("start_noise")) CHECK(Has(error.stderr_tail(), "the reason for people"));
  }
  const PoolError bare = error_of("start_bare");
  REQUIRE(bare.start_failure());
  CHECK(bare.start_failure()->error == "why");
  CHECK(bare.start_failure()->detail.empty());
  CHECK_FALSE(bare.start_failure()->rank);
}

TEST_CASE("without a valid start line the error has the tail of stderr and no start failure") {
  for (const char* start :
       {"usage", "start_cut", "start_not_utf8", "start_types", "start_huge", "start_inside"}) {
    INFO(start);
    Pool pool(FakeOptions(start));
    const PoolError error = ErrorOf(pool, {});
    CHECK(error.kind() == PoolError::Kind::kStart);
    CHECK_FALSE(error.start_failure());
    CHECK(Has(error.what(), "exited with code 2 at its start\n"));
    CHECK_FALSE(error.stderr_tail().empty());
  }
}

TEST_CASE(
    "the error of a daemon that has started has no start failure, even if its stderr has a start line") {
  Pool pool(FakeOptions("start_all_the_same"));
  CHECK(pool.Run().ok());
  CHECK(Eventually([&] { return Has(pool.StderrTail(), "cppoold: start {"); }));
  const PoolError error = ErrorOf(pool, Do("die"));
  CHECK(error.kind() == PoolError::Kind::kDied);
  CHECK_FALSE(error.start_failure());
}

TEST_CASE("calls that are refused after failed starts report the last failure") {
  Pool pool(FakeOptions("start_line"));
  for (int i = 0; i < 5; ++i) ErrorOf(pool, {});
  const PoolError refused = ErrorOf(pool, {});
  CHECK(Has(refused.what(), "has failed to start 5 times in a row"));
  CHECK(Has(refused.what(), "The last failure: "));
  CHECK(Has(refused.what(), "no room for 4 ranks"));
  REQUIRE(refused.start_failure());
  CHECK(refused.start_failure()->kind == "out_of_memory");
}

TEST_CASE("the error for a daemon that does not exist names its path") {
  LeavesNothing([] {
    cppool::PoolOptions options = FakeOptions();
    options.daemon = "/nowhere/cppoold";
    Pool pool(options);
    PoolError error = ErrorOf(pool, {});
    CHECK(error.kind() == PoolError::Kind::kStart);
    CHECK(Has(error.what(), "/nowhere/cppoold"));
    CHECK(Has(error.what(), "No such file"));
  });
}

TEST_CASE(
    "with retries a daemon that dies is replaced and the result is flaky, and a death too many is an error") {
  LeavesNothing([] {
    TemporaryFolder folder;
    cppool::PoolOptions options = FakeOptions();
    options.retries = 1;
    Pool pool(options);
    const auto once = [&](const std::string& what, const std::string& then) {
      return pool.Run({{"do", what}, {"then", then}, {"marker", folder.File(what + then)}});
    };
    Result result = once("die_once", "pass");
    CHECK(result.ok());
    CHECK(result.attempts == 2);
    CHECK(result.flaky == "flaky (passed at attempt 2)");
    REQUIRE(result.lost.size() == 1);
    CHECK(result.lost[0].kind == PoolError::Kind::kDied);
    CHECK(Has(result.lost[0].error, "exited with code 3"));
    CHECK(Has(result.lost[0].stderr_tail, "the last words"));
    CHECK_FALSE(result.lost[0].crash.has_value());
    result = once("garbage_once", "pass");
    CHECK(result.ok());
    CHECK(result.attempts == 2);
    CHECK(result.lost.at(0).kind == PoolError::Kind::kProtocol);

    result = once("crash_once", "pass");
    CHECK(result.flaky == "flaky (passed at attempt 2)");
    REQUIRE(result.lost.size() == 1);
    REQUIRE(result.lost[0].crash.has_value());
    CHECK(result.lost[0].crash->rank == 1);
    CHECK(result.lost[0].crash->stage == "forward/attend");
    CHECK(result.lost[0].crash->stack == std::vector<std::string>{"Attend", "Run"});
    CHECK(Has(result.lost[0].error,
              "exited with code 3: rank 1 crashed in stage 'forward/attend', stack: Attend < Run"));
    CHECK(once("crash_once", "fail").flaky == "flaky (failed at attempt 2)");
    CHECK(once("crash_once", "skip").flaky == "flaky (skipped at attempt 2)");
    CHECK(once("crash_once", "error").flaky == "flaky (error at attempt 2)");
    CHECK(pool.Run().flaky.empty());
    CHECK(pool.Run(Do("fail")).lost.empty());

    const PoolError hung =
        ErrorOf(pool, {{"do", "crash_once"}, {"then", "hang"}, {"marker", folder.File("h")}}, Within(100ms));
    CHECK(Has(hung.what(), "stack: Attend < Run; then cppoold"));
    CHECK(Has(hung.what(), "did not answer within 0.3 s and was killed"));
    CHECK(hung.flaky() == "flaky (timeout at attempt 2)");
    REQUIRE(hung.lost().size() == 1);
    CHECK(hung.lost()[0].crash->stage == "forward/attend");

    PoolError died = ErrorOf(pool, Do("die"));
    CHECK(died.kind() == PoolError::Kind::kDied);
    CHECK(Has(died.what(), "exited with code 3 (attempt 2)"));
    CHECK(Has(died.what(), "the last words"));
    CHECK(Has(died.stderr_tail(), "the last words"));
    CHECK(died.flaky().empty());  // as the daemon before it
    CHECK(died.lost().size() == 1);
    CHECK(ErrorOf(pool, Do("half_an_answer")).kind() == PoolError::Kind::kDied);
    PoolError killed = ErrorOf(pool, Do("die_by_signal"));
    CHECK(killed.kind() == PoolError::Kind::kDied);
    CHECK(Has(killed.what(), "killed by signal 9 (Killed)"));
    CHECK(pool.Run().attempts == 1);
  });
}

TEST_CASE("a request is sent to another daemon only if the options say so") {
  TemporaryFolder folder;
  cppool::PoolOptions options = FakeOptions();
  Pool pool(options);
  const PoolError once = ErrorOf(pool, {{"do", "die_once"}, {"marker", folder.File("a")}});
  CHECK(once.kind() == PoolError::Kind::kDied);
  CHECK(once.attempts() == 1);
  options.retries = 3;
  options.arguments = {"--count", folder.File("count")};
  Pool patient(options);
  CHECK(Has(ErrorOf(patient, Do("die")).what(), "(attempt 4)"));
  CHECK(CountLines(folder.File("count")) == 4);
}

TEST_CASE("an invalid answer breaks the protocol") {
  struct Case {
    const char* what;
    const char* text;
  };
  auto [what, text] = GENERATE(Case{"garbage", "is not JSON"}, Case{"no_object", "not an object"},
                               Case{"no_result", "has no \"status\""}, Case{"deep", "nested deeper than 64"},
                               Case{"endless_answer", "more than 16 MiB"},
                               Case{"close_stdout", "closed its stdout and runs on"});
  INFO(what);
  LeavesNothing([&, what = what, text = text] {
    Pool pool(FakeOptions());
    PoolError error = ErrorOf(pool, Do(what));
    CHECK(error.kind() == PoolError::Kind::kProtocol);
    INFO(error.what());
    CHECK(Has(error.what(), text));
    CHECK(error.attempts() == 1);
    CHECK(Has(error.stderr_tail(), "the fake daemon has started"));
    CHECK(pool.Run().ok());
  });
}

TEST_CASE("a daemon that does not answer in time is killed, and not even a retry sends the request again") {
  LeavesNothing([] {
    TemporaryFolder folder;
    cppool::PoolOptions options = FakeOptions();
    options.arguments = {"--count", folder.File("count")};
    options.retries = 1;
    Pool pool(options);
    int group = GroupOf(pool);
    PoolError error = ErrorOf(pool, Do("hang"), Within(100ms));
    CHECK(error.kind() == PoolError::Kind::kTimeout);
    CHECK(Has(error.what(), "did not answer within 0.3 s and was killed"));
    CHECK(Has(error.stderr_tail(), "the fake daemon has started"));
    CHECK(GroupGone(group));
    CHECK(CountLines(folder.File("count")) == 1);
    CHECK(pool.Run().attempts == 1);
    CHECK(CountLines(folder.File("count")) == 2);
  });
}

TEST_CASE("a stopped daemon is continued so that it can end, and no grace after SIGTERM is waited for") {
  cppool::PoolOptions options = FakeOptions();
  options.kill_grace = 60s;
  Pool pool(options);
  GroupOf(pool);
  const auto start = std::chrono::steady_clock::now();
  CHECK(ErrorOf(pool, Do("stopped"), Within(100ms)).kind() == PoolError::Kind::kTimeout);
  CHECK(std::chrono::steady_clock::now() - start < 30s);
}

TEST_CASE("slow callbacks do not extend the wait") {
  for (const std::string what : {"flood_stderr_for_ever", "noise_for_ever"}) {
    INFO(what);
    cppool::PoolOptions options = FakeOptions();
    std::atomic<int> lines{0};
    const auto slow = [&](std::string_view) {
      ++lines;
      std::this_thread::sleep_for(2ms);
    };
    options.on_stderr = slow;
    options.log = slow;
    Pool pool(options);
    const auto begin = std::chrono::steady_clock::now();
    CHECK(ErrorOf(pool, Do(what), Within(100ms)).kind() == PoolError::Kind::kTimeout);
    // To pass all of the several thousand lines on would take more than ten seconds.
    CHECK(std::chrono::steady_clock::now() - begin < 5s);
    CHECK(lines > 0);
  }
}

TEST_CASE("the error says why a daemon died even if no new one can be started") {
  TemporaryFolder folder;
  cppool::PoolOptions options = FakeOptions("once");
  options.retries = 1;
  options.arguments.insert(options.arguments.end(), {"--file", folder.File("started")});
  Pool pool(options);
  const PoolError error = ErrorOf(pool, Do("die"));
  CHECK(error.kind() == PoolError::Kind::kStart);
  CHECK(error.attempts() == 2);
  const std::string text = error.what();
  CHECK(text.find("exited with code 3") < text.find("; then cppoold"));
  CHECK(Has(text, "; then cppoold"));
  CHECK(Has(text, "exited with code 2 at its start (attempt 2)"));
}

TEST_CASE("an answer within the grace period is accepted") {
  cppool::PoolOptions options = FakeOptions();
  options.grace = 60s;
  Pool pool(options);
  CHECK(pool.Run({{"do", "late"}, {"ms", 300}}, Within(1ms)).ok());
}

TEST_CASE("a daemon that does not read its stdin does not block the caller") {
  LeavesNothing([] {
    Pool pool(FakeOptions("deaf"));
    PoolError error = ErrorOf(pool, {{"much", std::string(1000000, 'x')}}, Within(100ms));
    CHECK(error.kind() == PoolError::Kind::kTimeout);
    signal(SIGPIPE, SIG_DFL);  // which would end this process
    Pool closed(FakeOptions("close_stdin"));
    error = ErrorOf(closed, {{"much", std::string(1000000, 'x')}});
    CHECK(error.kind() == PoolError::Kind::kProtocol);
    CHECK(Has(error.what(), "closed its stdin and runs on"));
  });
}

TEST_CASE("noise, stale answers and second answers are logged and ignored") {
  LeavesNothing([] {
    cppool::PoolOptions options = FakeOptions("noise");
    std::vector<std::string> log;
    options.log = [&](std::string_view line) {
      log.emplace_back(line);
      throw 1;  // exceptions of callbacks are dropped
    };
    Pool pool(options);
    CHECK(pool.Run(Do("noise")).ok());
    CHECK(log.size() == 20002);
    CHECK(log[0] == "a library greets");
    log.clear();
    CHECK(pool.Run(Do("stale")).ok());
    REQUIRE(log.size() == 1);
    CHECK(Has(log[0], "another request"));
    CHECK(pool.Run(Do("twice")).ok());
    CHECK(pool.Run().ok());
    CHECK(log.size() == 2);
    CHECK(pool.Run(Do("dribble")).attempts == 1);
  });
}

TEST_CASE("stderr is read during and between calls, passed to the callback, and its tail kept") {
  LeavesNothing([] {
    cppool::PoolOptions options = FakeOptions();
    std::atomic<int> lines{0};
    options.on_stderr = [&](std::string_view) { ++lines; };
    Pool pool(options);
    CHECK(pool.Run(Do("flood_stderr"), Within(60s)).ok());
    CHECK(Eventually([&] { return lines == 50001; }));
    std::string tail = pool.StderrTail();
    CHECK(tail.size() <= 4000);
    CHECK(tail.size() > 3900);
    CHECK(Has(tail, "number 49999\n"));
    CHECK_FALSE(Has(tail, "number 49000\n"));
    CHECK(pool.Run(Do("flood_stderr_afterwards")).ok());
    CHECK(Eventually([&] { return lines == 100001; }));
    PoolError error = ErrorOf(pool, Do("die"));
    CHECK(error.stderr_tail().size() <= 4000);
    CHECK(Has(error.stderr_tail(), "the last words"));
  });
}

TEST_CASE("a fatal answer is a result, and the next call starts a new daemon") {
  auto what = GENERATE(as<std::string>{}, "fatal", "fatal_lingering");
  LeavesNothing([&] {
    Pool pool(FakeOptions());
    int group = GroupOf(pool);
    Result result = pool.Run(Do(what));
    CHECK(result.fatal);
    CHECK(result.status == Status::kError);
    CHECK(result.failure->kind == "cuda");
    CHECK(result.attempts == 1);
    CHECK(GroupGone(group));
    CHECK(NoChildren());
    CHECK(pool.Run().attempts == 1);
  });
}

TEST_CASE("a fatal answer to stats does not count as an attempt of the next call") {
  LeavesNothing([&] {
    Pool pool(FakeOptions("fatal_stats"));
    int group = GroupOf(pool);
    CHECK(pool.Stats().at("fatal") == true);
    CHECK(GroupGone(group));
    CHECK(pool.Run().attempts == 1);
  });
}

TEST_CASE("a daemon that died between two calls is replaced without counting as an attempt") {
  LeavesNothing([] {
    Pool pool(FakeOptions());
    int pid = pool.Hello()["pid"];
    CHECK(pool.Run(Do("die_after")).ok());
    REQUIRE(Eventually([&] { return !Alive(pid); }));
    Result result = pool.Run(Do("echo"));
    CHECK(result.attempts == 1);
    CHECK(result.json["surroundings"]["pid"] != pid);
  });
}

TEST_CASE("a Pool ends its daemon in order, and kills it if necessary") {
  LeavesNothing([] {
    int group = 0;
    {
      Pool pool(FakeOptions("ignore_end"));
      group = GroupOf(pool);
    }
    CHECK(GroupGone(group));
    { Pool unused(FakeOptions()); }
    TemporaryFolder folder;
    Pool pool(FakeOptions());
    group = GroupOf(pool);
    pool.Stop();
    CHECK(GroupGone(group));
    pool.Stop();
    CHECK(pool.Run().ok());
  });
}

TEST_CASE("calls from many threads take turns on one daemon") {
  LeavesNothing([] {
    TemporaryFolder folder;
    cppool::PoolOptions options = FakeOptions();
    options.arguments = {"--count", folder.File("count")};
    Pool pool(options);
    std::atomic<int> passed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&, i] {
        for (int j = 0; j < 20; ++j) {
          Result result = pool.Run({{"do", "echo"}, {"token", i * 100 + j}});
          if (result.ok() && result.json["request"]["params"]["token"] == i * 100 + j) ++passed;
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(passed == 160);
    CHECK(CountLines(folder.File("count")) == 1);
  });
}

TEST_CASE("Pools has one Pool per world size") {
  LeavesNothing([] {
    cppool::PoolOptions options = FakeOptions();
    options.world_size = 99;  // At() replaces it
    Pools pools(options);
    CHECK(&pools.At(2) == &pools.At(2));
    CHECK(&pools.At(2) != &pools.At(4));
    CHECK(pools.At(4).Hello()["world_size"] == 4);
    CHECK(pools.At(2).Hello()["world_size"] == 2);
    std::vector<std::thread> threads;
    std::vector<Pool*> seen(8);
    for (std::size_t i = 0; i < seen.size(); ++i) threads.emplace_back([&, i] { seen[i] = &pools.At(8); });
    for (std::thread& thread : threads) thread.join();
    CHECK(std::all_of(seen.begin(), seen.end(), [&](Pool* pool) { return pool == &pools.At(8); }));
    pools.Stop();
    CHECK(NoChildren());
  });
}
