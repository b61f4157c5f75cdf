// Runs a user's case on either runtime and checks its answers.
#pragma once

#include <string>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/end_to_end/user_case.h"

namespace cppool::test {

inline void RunUserCase(const std::string& backend, int world_size) {
  const UserCase& built = BuildUserCase();
  DaemonProcess daemon(
      {"--world-size", std::to_string(world_size), "--backend", backend, "--case", built.library},
      built.daemon);
  const auto run = [&](const Json& params, int repeat = 1) {
    return daemon.Ask(
        {{"op", "run"}, {"case", "all_reduce"}, {"params", params}, {"warmup", 1}, {"repeat", repeat}});
  };
  Json list = daemon.Ask({{"op", "list"}});
  REQUIRE(list.at("cases").size() == 2);
  CHECK(list.at("cases").at(0).at("name") == "all_reduce");
  CHECK(list.at("cases").at(0).at("parameters").at(0).at("name") == "count");

  Json answer = run({{"count", 100'003}, {"seed", 5}}, 3);
  INFO(answer);
  CHECK(answer.at("status") == "passed");
  CHECK_FALSE(answer.contains("leaks"));
  CHECK(answer.at("seed") == 5);
  REQUIRE(answer.at("checks").size() == static_cast<std::size_t>(world_size));
  CHECK(answer.at("checks").at(0).at("tensor") == "sum");
  CHECK(answer.at("checks").at(0).at("max_abs_err") == 0);
  CHECK(answer.at("ranks").at(0).at("gpu_ms").contains("gather"));
  CHECK(answer.at("ranks").at(0).at("gathered_bytes") == 400'012 * world_size);
  CHECK(answer.at("tflops").contains("sum"));

  answer = run({{"wrong_rank", world_size - 1}});
  CHECK(answer.at("status") == "failed");
  CHECK(answer.at("failure").at("kind") == "mismatch");
  CHECK(answer.at("failure").at("rank") == world_size - 1);

  answer = run({{"odd_only", true}, {"count", 4}});
  CHECK(answer.at("failure").at("kind") == "invalid_request");
  CHECK(answer.at("failure").at("detail") == "count must be odd when odd_only is set");
  CHECK(run({{"cuont", 4}}).at("error").get<std::string>().find("count") != std::string::npos);
  CHECK(run({{"count", 0}}).at("failure").at("kind") == "invalid_request");
  CHECK(run({{"odd_only", true}, {"count", 5}}).at("status") == "passed");

  answer = run({{"fail_rank", 0}});
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("kind") == "internal");
  CHECK(answer.at("failure").at("rank") == 0);
  CHECK(answer.at("failure").at("detail") == "asked to fail");
  if (answer.contains("fatal")) {  // the transport's communicators do not outlive an abort
    CHECK(backend == "cuda");
    CHECK(daemon.Wait() == 3);
  } else {
    CHECK(run(Json::object()).at("status") == "passed");
    CHECK(daemon.Wait() == 0);
  }
}

}  // namespace cppool::test
