#include <unistd.h>

#include <algorithm>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/daemon/fake_case.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

std::vector<std::string> CallsOf(FakeWorld& world, const std::string& rank) {
  const std::lock_guard lock(world.mutex);
  std::vector<std::string> calls;
  for (const std::string& call : world.calls) {
    if (call.rfind(rank + " ", 0) == 0) calls.push_back(call.substr(rank.size() + 1));
  }
  return calls;
}

// A dispatcher that opens the libraries of requests.
void OpenLibraries(Inside& inside, daemon::ThreadRanks::Options options = {}) {
  options.libraries.program = CPPOOL_TEST_DAEMON;
  inside.Dispatch(std::move(options));
}

}  // namespace

TEST_CASE("hello, list and stats answer with the protocol's members") {
  Inside inside;
  const Json hello = inside.Ask(R"({"op": "hello", "id": [1, "x"]})");
  CHECK(hello.at("ok") == true);
  CHECK(hello.at("id") == Json{1, "x"});
  CHECK(hello.at("protocol") == 1);
  CHECK(hello.at("pid") == getpid());
  CHECK(hello.at("world_size") == 2);
  CHECK(hello.at("backend") == "host");
  CHECK(hello.at("transport") == "host");
  CHECK(hello.at("devices").size() == 2);
  CHECK(hello.at("init_ms").is_object());

  const Json list = inside.Ask(R"({"op": "list"})");
  CHECK_FALSE(list.contains("id"));
  REQUIRE(list.at("cases").size() == 1);
  const Json& parameters = list.at("cases").at(0).at("parameters");
  CHECK(list.at("cases").at(0).at("name") == "fake");
  CHECK(parameters.at(0).at("name") == "action");
  CHECK(parameters.at(0).at("default") == "pass");
  CHECK(parameters.at(4).at("allowed") == Json{"yes", "no"});

  inside.Run({{"action", "pass"}});
  inside.Run({{"action", "check fails"}});
  inside.Run({{"action", "unsupported"}});
  inside.Run({{"action", "fail"}});
  inside.Ask("nonsense");
  const Json stats = inside.Ask(R"({"op": "stats"})");
  CHECK(stats.at("requests") == 8);
  CHECK(stats.at("passed") == 1);
  CHECK(stats.at("failed") == 1);
  CHECK(stats.at("skipped") == 1);
  CHECK(stats.at("errors") == 2);
  CHECK(stats.at("memory").size() == 2);
  CHECK(stats.at("memory").at(1).at("free_bytes") == 1 << 30);
  CHECK(stats.at("leaked_allocations") == 0);
  CHECK(stats.at("uptime_s").get<double>() >= 0);
  std::promise<void> end;
  std::thread thread([ended = end.get_future()] { ended.wait(); });
  const int fd = dup(2);
  const std::vector<char> touched(64 << 20, 1);
  const Json more = inside.Ask(R"({"op": "stats"})");
  CHECK(more.at("threads") == stats.at("threads").get<int>() + 1);
  CHECK(more.at("fds") == stats.at("fds").get<int>() + 1);
  CHECK(more.at("resident_bytes").get<double>() > stats.at("resident_bytes").get<double>() + (48 << 20));
  // The unit is bytes. The upper limit is wide, because ThreadSanitizer uses five times as much memory.
  CHECK(more.at("resident_bytes").get<double>() < stats.at("resident_bytes").get<double>() + (512 << 20));
  CHECK(touched.back() == 1);
  end.set_value();
  thread.join();
  close(fd);
  CHECK_FALSE(inside.last_shutdown);
  CHECK(inside.Ask(R"({"op": "shutdown"})").at("ok") == true);
  CHECK(inside.last_shutdown);
}

TEST_CASE("an invalid line is answered with its error, and the next line is served") {
  Inside inside;
  const std::vector<std::pair<std::string, std::string>> lines = {
      {"", ""},
      {"\"\xff\"", ""},
      {std::string(200000, '['), ""},
      {R"({"op": "helo"})", "hello"},
      {R"({"op": "run", "case": "fak"})", "fake"},
      {R"({"op": "run", "case": ")" + std::string(1000, 'x') + "\"}", "xxx..."},
      {R"({"op": "run", "case": "fake", "params": {"actoin": "pass"}})", "action"},
      {R"({"op": "run", "case": "fake", "params": {"rank": -1}})", "63"},
  };
  for (const auto& [line, part] : lines) {
    INFO(line.substr(0, 100));
    const Json answer = inside.Ask(line);
    CHECK(answer.at("ok") == false);
    CHECK(answer.at("status") == "error");
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK(Has(answer.at("error"), part));
    CHECK_FALSE(inside.last_fatal);
  }
  const auto overlong = inside.Handle({"{\"op\"", true, 10'000'000});
  REQUIRE(overlong);
  CHECK(Has(Json::parse(overlong->text).at("error"), "10000005"));
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE("the answer to a passed run has the checks, times and results of every rank") {
  Inside inside;
  Json answer = inside.Send(
      Json{{"op", "run"}, {"case", "fake"}, {"id", 7}, {"params", {{"action", "work"}, {"seed", 99}}}});
  CHECK(answer.at("ok") == true);
  CHECK(answer.at("id") == 7);
  CHECK(answer.at("status") == "passed");
  CHECK(answer.at("seed") == 99);
  CHECK(answer.at("kernels") == Json{{"name", "fake"}, {"version", "7"}, {"family", "none"}, {"more", 1}});
  CHECK(answer.at("wall_ms").get<double>() > 0);
  REQUIRE(answer.at("ranks").size() == 2);
  CHECK(answer.at("ranks").at(1).at("rank") == 1);
  CHECK(answer.at("ranks").at(1).at("ok") == true);
  CHECK(answer.at("ranks").at(1).at("gpu_ms").at("forward") == 4.0);
  CHECK(answer.at("ranks").at(0).at("bandwidth").at("GB/s") == 3.5);
  // 4e9 and 8e9 operations on two ranks, the slower of which takes 4 ms.
  CHECK(answer.at("tflops").at("forward").get<double>() == Catch::Approx(1.5));

  answer = inside.Run({{"action", "pass"}, {"rank", 1}});
  REQUIRE(answer.at("checks").size() == 1);
  CHECK(answer.at("checks").at(0).at("tensor") == "out");
  CHECK(answer.at("checks").at(0).at("rank") == 1);
  CHECK(answer.at("checks").at(0).at("ok") == true);
}

TEST_CASE("a case reads given parameters, defaults, and parameters that its validate replaced") {
  Inside inside;
  const Json answer =
      inside.Send(Json{{"op", "run"},
                       {"case", "fake"},
                       {"checks", false},
                       {"params", {{"action", "read back"}, {"number", 0.25}, {"flag", true}, {"seed", 7}}}});
  CHECK(answer.at("status") == "passed");
  CHECK(inside.Run({{"action", "replace"}}).at("status") == "passed");
  CHECK(inside.Run({{"action", "given"}, {"number", 1}, {"maybe", nullptr}}).at("status") == "passed");
}

TEST_CASE("a case that compares nothing though it should passes with a warning") {
  Inside inside;
  const Json silent = inside.Run({{"action", "work"}});
  CHECK(silent.at("status") == "passed");
  REQUIRE(silent.at("warnings").size() == 1);
  CHECK(Has(silent.at("warnings").at(0), "nothing was compared"));
  CHECK_FALSE(inside.Run({{"action", "pass"}}).contains("warnings"));
  const Json unasked =
      inside.Send(Json{{"op", "run"}, {"case", "fake"}, {"checks", false}, {"params", {{"action", "work"}}}});
  CHECK_FALSE(unasked.contains("warnings"));
}

TEST_CASE("an error in a case's validate is the answer, and no rank runs") {
  Inside inside;
  const std::vector<std::vector<std::string>> expected = {
      {"invalid", "error", "invalid_request", "do not go together"},
      {"unsupported", "skipped", "unsupported", "Sundays"},
      {"inapplicable", "skipped", "inapplicable", "three ranks"},
      {"validate throws", "error", "internal", "from validate"},
      {"replace badly", "error", "internal", "not a JSON object"},
      {"name badly", "error", "internal", "\"version\""},
      {"validate misuses", "error", "internal", "nonsense"},
  };
  for (const auto& e : expected) {
    const Json answer = inside.Run({{"action", e[0]}});
    INFO(answer);
    CHECK(answer.at("ok") == false);
    CHECK(answer.at("status") == e[1]);
    CHECK(answer.at("failure").at("kind") == e[2]);
    CHECK(Has(answer.at("error"), e[3]));
  }
  CHECK(CallsOf(*inside.fake, "0").empty());
}

TEST_CASE("op validate answers that a run would start or with the run's refusal, and no rank runs") {
  Inside inside;
  const auto validate = [&](const Json& params) {
    return inside.Send(Json{{"op", "validate"}, {"case", "fake"}, {"id", 4}, {"params", params}});
  };
  CHECK(validate({{"action", "fail"}}) == Json{{"ok", true}, {"id", 4}, {"runs", true}});
  for (const Json& params : std::vector<Json>{{{"action", "invalid"}},
                                              {{"action", "unsupported"}},
                                              {{"action", "validate throws"}},
                                              {{"number", 2}},
                                              {{"nmber", 2}},
                                              {{"needs", 1e12}}}) {
    Json answer = validate(params);
    Json run = inside.Send(Json{{"op", "run"}, {"case", "fake"}, {"id", 4}, {"params", params}});
    INFO(answer);
    CHECK(answer.at("ok") == false);
    for (Json* json : {&answer, &run}) json->erase("wall_ms");
    CHECK(answer == run);
  }
  CHECK(CallsOf(*inside.fake, "0").empty());
  const Json stats = inside.Ask(R"({"op": "stats"})");
  CHECK(stats.at("errors") == 5);  // validations do not count
  CHECK(stats.at("skipped") == 1);
  CHECK(stats.at("passed") == 0);
}

TEST_CASE("random delays are set on every rank before its case runs, and only if the request has perturb") {
  Inside inside;
  CHECK(inside.Send(Json{{"op", "run"}, {"case", "fake"}, {"perturb", 77}}).at("status") == "passed");
  inside.world.threads().Wait();
  for (const char* rank : {"0", "1"})
    CHECK(CallsOf(*inside.fake, rank) == std::vector<std::string>{"begin", "perturb 77", "end", "trim"});
  CHECK(inside.Run().at("status") == "passed");
  inside.world.threads().Wait();
  CHECK(CallsOf(*inside.fake, "0").size() == 7);
}

TEST_CASE("dump and inputs are passed to a case that has the feature, and refused for others") {
  Inside inside;
  const auto run = [&](const char* action, Json keys) {
    keys["op"] = "run";
    keys["case"] = "fake";
    keys["params"] = {{"action", action}};
    return inside.Send(keys);
  };
  CHECK(run("dump", {{"dump", "some/folder"}}).at("status") == "passed");
  CHECK(run("no dump", Json::object()).at("status") == "passed");
  const Json answer = run("pass", {{"inputs", "some/folder"}});
  CHECK(answer.at("failure").at("kind") == "invalid_request");
  CHECK(Has(answer.at("error"), "case 'fake' has no \"inputs\""));
}

TEST_CASE("the memory needed by all ranks that share a device is checked before anything runs") {
  Inside inside;  // 2 ranks share 1 GiB
  CHECK(inside.Run({{"needs", 512.0 * 1024 * 1024}}).at("status") == "passed");
  const auto calls = CallsOf(*inside.fake, "0").size();
  const Json answer = inside.Run({{"needs", 513.0 * 1024 * 1024}});
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("kind") == "out_of_memory");
  CHECK(Has(answer.at("error"), "0.501 GiB"));
  inside.world.threads().Wait();
  CHECK(CallsOf(*inside.fake, "0").size() <= calls + 1);  // a trim may still have been running
  CHECK(inside.Run({{"action", "ask for room"}, {"needs", 512.0 * 1024 * 1024}}).at("status") == "passed");
  CHECK(inside.Run({{"action", "ask for room"}, {"needs", 513.0 * 1024 * 1024}}).at("error") == "no room");
  CHECK(inside.Run().at("status") == "passed");
}

TEST_CASE(
    "memory is kept between requests that follow one another, and given back when one needs it or none "
    "comes") {
  Inside inside(1);
  const auto run = [&](double needs) {  // and the next line follows at once
    const Json request = {{"op", "run"}, {"case", "fake"}, {"params", {{"needs", needs}}}};
    return Json::parse(inside.Handle({request.dump(), false, 0})->text);
  };
  const auto trims = [&] {
    inside.world.threads().Wait();
    const auto calls = CallsOf(*inside.fake, "0");
    return std::count(calls.begin(), calls.end(), "trim");
  };
  inside.fake->free_bytes = 1000;
  inside.fake->pooled_bytes = 500;
  CHECK(run(1000).at("status") == "passed");
  CHECK(run(1000).at("status") == "passed");
  CHECK(trims() == 0);
  CHECK(run(1500).at("status") == "passed");
  CHECK(trims() == 1);
  CHECK(run(1501).at("failure").at("kind") == "out_of_memory");
  CHECK(trims() == 2);
  CHECK(run(10).at("status") == "passed");
  inside.Ask(R"({"op": "stats"})");
  CHECK(trims() == 3);
  inside.dispatcher->WhileIdle();
  CHECK(trims() == 3);  // nothing has run since
}

TEST_CASE("a case has a clean state before its iterations and a trim after them") {
  Inside inside(1);
  inside.fake->left_behind = 3;
  const Json answer = inside.Send(Json{
      {"op", "run"}, {"case", "fake"}, {"warmup", 2}, {"repeat", 2}, {"params", {{"action", "iterate"}}}});
  CHECK(answer.at("status") == "passed");
  CHECK(inside.Ask(R"({"op": "stats"})").at("leaked_allocations") == 3);
  CHECK(CallsOf(*inside.fake, "0") == std::vector<std::string>{"begin", "iteration -2", "iteration -1",
                                                               "iteration 0", "iteration 1", "samples",
                                                               "end iterations", "end", "trim"});
}

TEST_CASE("libraries that take a device's memory have the daemon replaced: an answer says so") {
  const TemporaryFolder folder;
  const Environment cache("CPPOOL_CACHE", folder.path().string());
  const auto fake = std::make_shared<FakeWorld>();
  fake->ordinal = 0;
  Inside inside(2, {}, fake);
  daemon::ThreadRanks::Options options;
  options.most_library_bytes = 64 << 20;
  OpenLibraries(inside, options);
  const auto run = [&](const char* library) {
    const Json answer = inside.Send({{"op", "run"}, {"case", "fake"}, {"load", library}});
    CHECK(answer.at("status") == "passed");
    CHECK_FALSE(inside.last_fatal);
    return answer.value("respawn", "");
  };
  CHECK(run(CPPOOL_ODD_CASE).empty());
  fake->free_bytes = fake->free_bytes - (64 << 20);
  CHECK(run(CPPOOL_ODD_CASE).empty());
  fake->free_bytes = fake->free_bytes - (36 << 20);
  const std::string respawn = run(CPPOOL_ODD_REBUILT);
  CHECK(respawn.find("100 MiB of the memory of rank 0's device") != std::string::npos);
  CHECK_FALSE(inside.Run().contains("respawn"));  // it names no library
}

TEST_CASE("what is opened or closed between two runs is no case's, and hides nothing that a case opens") {
  const TemporaryFolder folder;
  const Environment cache("CPPOOL_CACHE", folder.path().string());
  base::UniqueFd before(dup(2));
  Inside inside;
  OpenLibraries(inside);
  CHECK_FALSE(inside.Run().contains("leaks"));
  CHECK(inside.Send({{"op", "list"}, {"load", {CPPOOL_ODD_OPENS}}}).at("ok") == true);
  CHECK_FALSE(inside.Run().contains("leaks"));  // the library's constructor has opened a descriptor
  const int known = before.get();
  before = base::UniqueFd();
  base::UniqueFd of_case;
  inside.fake->on_end = [&] { of_case = base::UniqueFd(dup(2)); };
  const Json answer = inside.Run();
  INFO(answer);
  CHECK(of_case.get() == known);
  CHECK(answer.value("leaks", Json::object()).value("fds", 0) == 1);
}

TEST_CASE("a library that opens as much as was closed since the last run hides nothing that a case opens") {
  const TemporaryFolder folder;
  const Environment cache("CPPOOL_CACHE", folder.path().string());
  base::UniqueFd before(dup(2));
  Inside inside;
  OpenLibraries(inside);
  CHECK_FALSE(inside.Run().contains("leaks"));
  CHECK(inside.Send({{"op", "list"}, {"load", {CPPOOL_ODD_OPENS}}}).at("ok") == true);
  const int known = before.get();
  before = base::UniqueFd();
  base::UniqueFd of_case;
  inside.fake->on_end = [&] { of_case = base::UniqueFd(dup(2)); };
  const Json answer = inside.Run();
  INFO(answer);
  REQUIRE(of_case.get() == known);
  REQUIRE(answer.contains("warnings"));
  const std::string warning = answer.at("warnings").at(0);
  CHECK(warning.find(": " + std::to_string(known) + " (") != std::string::npos);
}

TEST_CASE(
    "a case that chooses kernels is asked, whatever kernels are named, and gets the daemon's where it wants "
    "them") {
  const TemporaryFolder folder;
  const Environment cache("CPPOOL_CACHE", folder.path().string());
  const Environment cudnn("CPPOOL_CUDNN_MODULE", folder.File("none.so"));
  cppool_case choosing = *FakeCase();
  choosing.name = "choosing";
  choosing.features = CPPOOL_CASE_CHOOSES_KERNELS;
  choosing.validate = [](cppool_validation* v) {
    return v->fail(v, ("has its own for " + std::string(v->wanted_kernels)).c_str()), CPPOOL_UNSUPPORTED;
  };
  Inside inside;
  inside.registry.Add(&choosing, "a test");
  OpenLibraries(inside);
  for (const std::string kernels : {"cudnn", CPPOOL_KERNEL_TWO, CPPOOL_KERNEL_TWO ",third"}) {
    Json request = {{"op", "run"}, {"case", "choosing"}, {"kernels", kernels}};
    CHECK(inside.Send(request).at("error") == "has its own for " + kernels);
    request["trace"] = folder.File("none/trace.json");
    CHECK(inside.Send(request).at("error").get<std::string>().starts_with("\"trace\": "));
  }
}

}  // namespace cppool::test
