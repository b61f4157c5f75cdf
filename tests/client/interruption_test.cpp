// PoolOptions::interrupted: what ends a call before its limit.
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>

#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Pool;
using cppool::PoolError;

namespace {

std::optional<PoolError> ErrorOf(Pool& pool, const char* what) {
  try {
    pool.Run(Do(what), Within(60s));
  } catch (const PoolError& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("an interrupted call ends, its daemon is killed, and the next call has another") {
  cppool::PoolOptions options = FakeOptions();
  std::atomic<int> asked{0}, limit{3};
  options.interrupted = [&] { return ++asked >= limit; };
  Pool pool(options);
  const int first = GroupOf(pool);
  asked = 0;
  const auto error = ErrorOf(pool, "hang");
  REQUIRE(error);
  CHECK(error->kind() == PoolError::Kind::kInterrupted);
  CHECK(ToString(error->kind()) == "interrupted");
  CHECK(error->attempts() == 1);
  CHECK(asked == 3);
  limit = 1 << 20;
  CHECK(GroupOf(pool) != first);
  CHECK(pool.Run(Do("late")).ok());  // asked, and not interrupted
}

TEST_CASE("an interrupted start does not count as a failed one") {
  cppool::PoolOptions options = FakeOptions("silent");
  options.interrupted = [] { return true; };
  Pool pool(options);
  for (int i = 0; i < 8; ++i) {  // more than the failed starts after which a call throws at once
    const auto error = ErrorOf(pool, "pass");
    REQUIRE(error);
    CHECK(error->kind() == PoolError::Kind::kInterrupted);
  }
}

TEST_CASE("a call that waits for another thread's can be interrupted, and leaves that one alone") {
  cppool::PoolOptions options = FakeOptions();
  const auto main_thread = std::this_thread::get_id();
  options.interrupted = [main_thread] { return std::this_thread::get_id() != main_thread; };
  Pool pool(options);
  std::optional<PoolError> error;
  std::atomic<bool> running{false};
  pool.Hello();
  std::thread other([&] {
    while (!running) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(300ms);
    error = ErrorOf(pool, "pass");
  });
  running = true;
  CHECK(pool.Run({{"do", "late"}, {"ms", 1500}}).ok());
  other.join();
  REQUIRE(error);
  CHECK(error->kind() == PoolError::Kind::kInterrupted);
}

TEST_CASE("an exception of `interrupted` is dropped") {
  cppool::PoolOptions options = FakeOptions();
  options.interrupted = []() -> bool { throw std::runtime_error("no"); };
  Pool pool(options);
  CHECK(pool.Run(Do("late")).ok());
}

TEST_CASE("a Pool that is used in its own functions throws, and may be used by another's") {
  std::atomic<int> uses = 0, refused = 0;
  Pool* pool = nullptr;
  const auto use = [&] {
    const std::function<void()> calls[] = {[&] { pool->Hello(); }, [&] { pool->Stop(); },
                                           [&] { pool->StderrTail(); }, [&] { pool->Cancel(); },
                                           [&] { pool->Status(); }};
    for (const auto& call : calls) {
      ++uses;
      try {
        call();
      } catch (const std::logic_error& error) {
        refused += Has(error.what(), "cannot be used in its own");
      }
    }
  };
  cppool::PoolOptions options = FakeOptions();
  SECTION("log") {
    options.log = [&](std::string_view) { use(); };
  }
  SECTION("interrupted") {
    options.interrupted = [&] {
      use();
      return false;
    };
  }
  SECTION("on_stderr") {
    options.on_stderr = [&](std::string_view) { use(); };
  }
  SECTION("log of another") {
    Pool other(FakeOptions());
    options.log = [&](std::string_view) { uses += other.Run(Do("pass")).ok(); };
    Pool asked(options);
    CHECK(asked.Run(Do("stale")).ok());
    CHECK(uses == 1);
    return;
  }
  Pool asked(options);
  pool = &asked;
  CHECK(asked.Run(Do("stale")).ok());
  CHECK(asked.Run({{"do", "late"}, {"ms", 300}}).ok());
  CHECK(asked.Run({{"do", "say"}, {"text", "a line\n"}}).ok());
  CHECK(Eventually([&] { return uses >= 3 && refused == uses; }));
  CHECK(asked.Run(Do("pass")).ok());
}
