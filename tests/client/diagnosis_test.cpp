// The text of a PoolError for a daemon that no longer answers because it is stopped, spins, or waits.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>

#include "tests/catch.h"
#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Pool;
using cppool::PoolError;

namespace {

// The error text of a call that must time out.
std::string TimedOut(Pool& pool, const cppool::Json& params, const cppool::RunOptions& options) {
  std::string text;
  LeavesNothing([&] {
    try {
      pool.Run(params, options);
      FAIL("there was an answer");
    } catch (const PoolError& error) {
      CHECK(error.kind() == PoolError::Kind::kTimeout);
      text = error.what();
      CHECK(text.size() < 4000 + 2500);
      CHECK(Has(error.diagnosis(), "its threads: "));
      CHECK(Has(text, error.diagnosis()));
      CHECK(error.diagnosis().front() != ';');
    }
  });
  return text;
}

}  // namespace

TEST_CASE("the error reports a stopped daemon and the state of each of its threads") {
  auto options = FakeOptions();
  options.daemon = CPPOOL_TEST_DAEMON;
  options.world_size = 2;
  options.backend = "host";
  options.case_files = {CPPOOL_ODD_CASE};
  std::atomic<pid_t> pid{0};
  options.on_stderr = [&](std::string_view line) {
    if (line == "asleep") kill(pid, SIGSTOP);
  };
  std::string text;
  LeavesNothing([&] {
    Pool pool(options);
    pid = pool.Hello().at("pid").get<pid_t>();
    cppool::RunOptions run = Within(3s);  // its state is first read after 2.2 s: it must be stopped by then
    run.case_name = "odd";
    try {
      pool.Run({{"action", "sleep"}, {"rank", 1}}, run);
      FAIL("there was an answer");
    } catch (const PoolError& error) {
      CHECK(error.kind() == PoolError::Kind::kTimeout);
      text = error.what();
    }
  });
  INFO(text);
  CHECK(Has(text, "did not answer within 3.2 s and was killed; it was stopped"));
  for (const char* thread : {"cppoold: stopped", "watchdog: stopped", "rank 0: stopped", "rank 1: stopped"})
    CHECK(Has(text, thread));
  CHECK(Has(text, "it used 0.00 s of CPU"));
}

TEST_CASE("the error distinguishes a daemon that spins from one that waits") {
  Pool pool(FakeOptions());
  const std::string spins = TimedOut(pool, Do("spin"), Within(800ms));
  {
    INFO(spins);
    CHECK(Has(spins, "cppool_fake_dae: running"));
    CHECK_FALSE(Has(spins, "it used 0.00 s of CPU"));
    CHECK_FALSE(Has(spins, "it was stopped"));
  }
  const std::string waits = TimedOut(pool, Do("hang"), Within(200ms));
  INFO(waits);
  CHECK(Has(waits, "cppool_fake_dae: waits"));
  CHECK(Has(waits, "it used 0.00 s of CPU"));
  CHECK_FALSE(Has(waits, "running"));
}

TEST_CASE("the error for a daemon that does not answer `hello` reports its state too") {
  auto options = FakeOptions("silent");
  options.start_limit = 1s;  // in which it is seen to wait
  Pool pool(options);
  try {
    pool.Hello();
    FAIL("there was an answer");
  } catch (const PoolError& error) {
    const std::string text = error.what();
    INFO(text);
    CHECK(error.kind() == PoolError::Kind::kStart);
    CHECK(Has(text, "of its start; in its last"));
    CHECK(Has(text, "cppool_fake_dae: waits"));
  }
}
