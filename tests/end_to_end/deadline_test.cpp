// The answer to a passed deadline: which rank hangs, where, and what it waits for.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kDeadlineMs = 400;

// The answer to a case on 4 ranks in which rank 2 does `action`. Checks that it is a timeout, and that the
// daemon then exits.
Json TimedOut(const std::string& action, Clock::duration* took = nullptr) {
  DaemonProcess daemon(Host(4, {"--case", CPPOOL_ODD_CASE}));
  daemon.Ask({{"op", "hello"}});
  const auto sent = Clock::now();
  daemon.Send(Json{{"op", "run"},
                   {"case", "odd"},
                   {"deadline_ms", kDeadlineMs},
                   {"params", {{"action", action}, {"rank", 2}}}}
                  .dump());
  Json answer = daemon.ReadAnswer();
  if (took) *took = Clock::now() - sent;
  INFO(answer.dump(1));
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("fatal") == true);
  CHECK(answer.at("failure").at("kind") == "timeout");
  CHECK_FALSE(daemon.ReadLine());
  CHECK(daemon.Wait() == 3);
  return answer;
}

// Whether a frame of the rank's stack names the function.
[[maybe_unused]] bool InStack(const Json& answer, int rank, const std::string& function) {
  for (const Json& frame : answer.at("ranks").at(rank).at("stack")) {
    if (Has(frame.get<std::string>(), function)) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("a deadline passes: the answer comes within a second") {
  for (const std::string action : {"alone", "recv", "deaf"}) {
    auto best = Clock::duration::max();  // the best of three: the machine may be busy
    for (int i = 0; i < 3; ++i) {
      Clock::duration took{};
      TimedOut(action, &took);
      best = std::min(best, took);
    }
    INFO(action);
    CHECK(best < std::chrono::milliseconds(kDeadlineMs + 1000));
  }
}

TEST_CASE("a deadline passes: ranks that have finished are reported as finished") {
  const Json answer = TimedOut("alone");
  INFO(answer.dump(1));
  const std::string error = answer.at("error");
  CHECK(
      Has(error,
          "not finished after 400 ms: rank 0: finished; rank 1: finished; rank 2: in the case's host code"));
  CHECK(answer.at("failure").at("rank") == 2);
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(answer.at("ranks").at(rank).at("ok") == (rank != 2));
    CHECK(answer.at("ranks").at(rank).contains("stack") == (rank == 2));
  }
}

TEST_CASE("a deadline passes: a rank that receives a message that is never sent is reported with its wait") {
  const Json answer = TimedOut("recv");
  INFO(answer.dump(1));
  const std::string error = answer.at("error");
  CHECK(Has(error, "rank 2: use, waiting for recv from rank 3, 0."));
  CHECK(Has(error, "rank 3: meet, in all_reduce of 4 bytes with 4 ranks, waiting for rank 2"));
  // Each rank waits for another one: no rank is the cause.
  CHECK(answer.at("failure").at("rank").is_null());
}

TEST_CASE("a deadline passes: a rank in the case's code is reported with its stack") {
  struct Stuck {
    std::string action, function;
  };
  for (const Stuck& stuck : {Stuck{"spin", "SpinForEver"}, Stuck{"sleep", "nanosleep"}}) {
    const Json answer = TimedOut(stuck.action);
    INFO(answer.dump(1));
    const std::string error = answer.at("error");
    CHECK(answer.at("failure").at("rank") == 2);
    CHECK(Has(error, "others wait for rank 2: "));
    CHECK(Has(error, "rank 1: meet, in all_reduce of 4 bytes with 4 ranks, waiting for rank 2, 0."));
    CHECK(Has(error, "rank 2: in the case's host code"));
#ifndef CPPOOL_TEST_SANITIZED
    CHECK(Has(error, stuck.function));
    CHECK(InStack(answer, 2, stuck.function));
    CHECK(InStack(answer, 2, "(anonymous namespace)::Run"));
    CHECK_FALSE(InStack(answer, 2, "LocalRanks"));
#endif
  }
}

TEST_CASE("a deadline passes: the case's work on a stream is reported with its stack") {
  const Json answer = TimedOut("stream");
  INFO(answer.dump(1));
  CHECK(answer.at("failure").at("rank") == 2);
  CHECK(answer.at("failure").at("stage") == "stall");
  CHECK(Has(answer.at("error"), "rank 2: stall, 0."));
#ifndef CPPOOL_TEST_SANITIZED
  CHECK(InStack(answer, 2, "SleepForEver"));
  CHECK(
      InStack(answer, 2, "(anonymous namespace)::Run"));  // the rank's own thread, which waits for the stream
#endif
}

}  // namespace cppool::test
