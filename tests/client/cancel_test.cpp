// A call that another thread cancels, or asks where the ranks are; and one that is interrupted, with a daemon
// that can cancel.
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::Result;
using cppool::Status;

namespace {

cppool::PoolOptions RealOptions() {
  cppool::PoolOptions options;
  options.daemon = CPPOOL_TEST_DAEMON;
  options.backend = "host";
  options.log_level = "off";
  options.case_files = {CPPOOL_ODD_CASE};
  return options;
}

// A run that would take long.
Result RunLong(Pool& pool) {
  cppool::RunOptions options;
  options.repeat = 10000;
  return pool.Run({{"max_seqlen_q", 64}, {"num_heads", 4}}, options);
}

Result RunOdd(Pool& pool, const std::string& action) {
  cppool::RunOptions options;
  options.case_name = "odd";
  return pool.Run({{"action", action}, {"rank", 1}}, options);
}

// The status once an iteration has begun, or the text has `part`.
Json AwaitStatus(Pool& pool, const std::string& part = "") {
  Json status;
  CHECK(Eventually([&] {
    status = pool.Status();
    if (!part.empty()) return Has(status.at("text"), part);
    return !status.at("running").is_null() && status.at("running").at("iteration") > 0;
  }));
  return status;
}

}  // namespace

TEST_CASE("a run that another thread cancels returns the daemon's answer, and the daemon stays") {
  LeavesNothing([] {
    Pool pool(RealOptions());
    CHECK_FALSE(pool.Cancel());
    CHECK(pool.Status() ==
          Json{{"ok", true}, {"running", nullptr}, {"text", "nothing runs"}, {"waiting", 0}});
    const Json pid = pool.Hello().at("pid");
    for (int round = 0; round < 3; ++round) {
      bool cancelled = false;
      Json status;
      std::thread other([&] {
        status = AwaitStatus(pool);
        cancelled = pool.Cancel();
      });
      const Result result = RunLong(pool);
      other.join();
      CHECK(cancelled);
      INFO(result.json.dump(1) << status.dump(1));
      CHECK(result.status == Status::kError);
      CHECK(result.failure->kind == "cancelled");
      CHECK_FALSE(result.fatal);
      CHECK(status.at("ranks").size() == 2);
      CHECK(Has(status.at("text"), "rank 1: "));
    }
    CHECK(pool.Hello().at("pid") == pid);
    CHECK_FALSE(pool.Cancel());
  });
}

TEST_CASE("a cancel that comes while the daemon starts is sent when it has started") {
  Pool pool(RealOptions());
  std::thread other([&] { CHECK(Eventually([&] { return pool.Cancel(); })); });
  const Result result = RunLong(pool);
  other.join();
  CHECK(result.failure->kind == "cancelled");  // assertions of Catch2 are for one thread at a time
}

TEST_CASE(
    "a run with a stalled rank that is cancelled is answered as fatal, and the next call has another "
    "daemon") {
  Pool pool(RealOptions());
  const Json pid = pool.Hello().at("pid");
  std::thread other([&] {
    const Json status = AwaitStatus(pool, "waiting for rank 1");
    CHECK(status.at("awaited") == 1);
    CHECK(pool.Cancel());
  });
  const Result result = RunOdd(pool, "sleep");
  other.join();
  CHECK(result.failure->kind == "cancelled");
  CHECK(result.fatal);
  CHECK(pool.Hello().at("pid") != pid);
}

TEST_CASE("an interrupted run is cancelled, says where the ranks were, and leaves its daemon warm") {
  cppool::PoolOptions options = RealOptions();
  std::atomic<bool> interrupted{false};
  options.interrupted = [&] { return interrupted.load(); };
  Pool pool(options);
  Json pid;
  const auto interrupt = [&](const auto& run, const std::string& part) -> std::optional<PoolError> {
    std::thread other([&] {
      AwaitStatus(pool, part);
      interrupted = true;
    });
    std::optional<PoolError> error;
    try {
      run();
    } catch (const PoolError& thrown) {
      error = thrown;
    }
    other.join();
    interrupted = false;
    return error;
  };
  // Beside much load the daemon may not answer within the 1.5 s of an interrupted call.
  bool stays_warm = false;
  for (int i = 0; i < 5 && !stays_warm; ++i) {
    pid = pool.Hello().at("pid");
    const auto warm = interrupt([&] { RunLong(pool); }, "");
    REQUIRE(warm);
    CHECK(warm->kind() == PoolError::Kind::kInterrupted);
    CHECK(Has(warm->diagnosis(), "rank 1: "));
    stays_warm = Has(warm->what(), "the request was cancelled, since the call was interrupted: rank 0: ") &&
                 pool.Hello().at("pid") == pid;
  }
  CHECK(stays_warm);

  const auto stalled = interrupt([&] { RunOdd(pool, "sleep"); }, "waiting for rank 1");
  REQUIRE(stalled);
  CHECK(stalled->kind() == PoolError::Kind::kInterrupted);
  CHECK(Has(stalled->diagnosis(), "rank 0: meet"));
  CHECK(pool.Hello().at("pid") != pid);
}

TEST_CASE("a daemon that cannot cancel is not asked to: an error says so, and the call goes on") {
  Pool pool(FakeOptions());
  std::thread other([&] {
    for (const bool cancel : {true, false}) {
      std::string error;
      CHECK(Eventually([&] {
        try {
          if (cancel ? pool.Cancel() : pool.Status().at("text") == "") return true;
        } catch (const PoolError& thrown) {
          error = thrown.what();
          CHECK(thrown.kind() == PoolError::Kind::kProtocol);
        }
        return !error.empty();
      }));
      CHECK(Has(error, cancel ? "has no feature `cancel`" : "has no feature `status`"));
    }
  });
  const Result result = pool.Run({{"do", "late"}, {"ms", 3000}});
  other.join();
  CHECK(result.ok());
}

TEST_CASE("lines on the progress go to the log") {
  cppool::PoolOptions options = RealOptions();
  std::vector<Json> lines;
  options.log = [&](std::string_view line) { lines.push_back(Json::parse(line)); };
  Pool pool(options);
  std::thread other([&] {
    CHECK(Eventually([&] {
      const Json running = pool.Status().at("running");
      return !running.is_null() && running.at("wall_ms") > 300;
    }));
    pool.Cancel();
  });
  cppool::RunOptions run;
  run.repeat = 10000;
  run.progress = true;
  const Result result = pool.Run({{"max_seqlen_q", 64}, {"num_heads", 4}}, run);
  other.join();
  CHECK(result.failure->kind == "cancelled");
  REQUIRE_FALSE(lines.empty());
  for (const Json& line : lines) CHECK(line.at("progress").at("iterations") == 10000);
}
